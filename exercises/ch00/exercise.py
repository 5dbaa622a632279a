"""Chapter 0, exercises: the five numbers and the roofline.

Each function says what it is given, what it returns and in which units. Replace the line that raises NotImplementedError.
`minillm grade ch00` or `pytest exercises/ch00` shows what you have earned. Times are in seconds, rates in units a second.
"""

# %%
from itertools import pairwise

from minillm.config import ModelConfig

# %% [markdown]
# ## The five numbers, from timestamps
# A server stamps the moment at which a request was sent, `start`, and the moment at which each of its tokens was ready,
# `tokens`, in seconds on one clock. The clock does not begin at 0.


# %%
def ttft(start: float, tokens: list[float]) -> float:
    """Time to first token, seconds. 1 point.

    ttft(10.0, [10.5, 10.6]) is 0.5. Hint: how long does the reader look at an empty screen?
    """
    raise NotImplementedError("Return the seconds from the moment the request was sent to its first token.")


# %%
def itl(tokens: list[float]) -> list[float]:
    """Inter-token latencies, seconds: the gap before each token but the first, in order. 1 point.

    itl([10.5, 10.6, 10.9]) is [0.1, 0.3]; one token has no gaps. Hint: n tokens have n - 1 gaps.
    """
    raise NotImplementedError("Return the list of the gaps between one token and the next.")


# %%
def tpot(start: float, tokens: list[float]) -> float | None:
    """Time per output token, seconds: what a token after the first takes on average; None for a single token. 1 point.

    tpot(10.0, [10.5, 10.6, 10.9]) is 0.2. Hint: the serving benchmarks leave the first token out, above and below the line.
    """
    raise NotImplementedError("Return the mean seconds a token after the first, or None when there is only one token.")


# %%
def p99_interpolated(values: list[float]) -> float:
    """The 99th percentile as vLLM has it, in the unit of the values, which come in any order. 1 point.

    Number the n sorted values from 0 to n - 1. P99 stands at place 0.99 (n - 1); between two values, it lies between them in
    proportion. Of 1, 2, ..., 100 it is 99.01. Hint: the whole part of the place is an index, its fraction a weight.
    """
    raise NotImplementedError("Return the value at place 0.99 (n - 1) of the sorted values, linear between neighbours.")


# %%
def p99_nearest(values: list[float]) -> float:
    """The 99th percentile as MLPerf has it, in the unit of the values, which come in any order. 1 point.

    Number the n sorted values from 0: P99 is the one whose number is 0.99 n, rounded down. Of 1, 2, ..., 100 it is 100.
    Hint: no interpolation, so the result is always a value that occurred.
    """
    raise NotImplementedError("Return the sorted value whose number, counted from 0, is 0.99 n rounded down.")


# %%
def usd_per_million(price_per_hour: float, tokens_per_s: float, busy: float = 1.0) -> float:
    """Dollars per million output tokens. 1 point.

    The machine costs `price_per_hour` dollars an hour whether it works or not. While it works, all its users together get
    `tokens_per_s`; it works for the fraction `busy` of the time. usd_per_million(3.6, 1000) is 1.0.
    Hint: how many tokens leave it in an hour?
    """
    raise NotImplementedError("Return the dollars that a million output tokens cost on a machine paid by the hour.")


# %% [markdown]
# ## The roofline


# %%
def linear_intensity(
    rows: int, d_in: int, d_out: int, weight_bytes: float = 2.0, activation_bytes: float = 2.0
) -> float:
    """Arithmetic intensity of a linear layer without bias, FLOP per byte. 2 points.

    It multiplies an input (rows, d_in) with a weight matrix (d_in, d_out): rows is the number of tokens that pass together,
    B in decode, B T in prefill. A weight takes `weight_bytes` (0.5 for 4 bits), a number of the input or output
    `activation_bytes`. Everything is read or written once. Hint: a multiplication and an addition are 2 FLOPs.
    """
    raise NotImplementedError("Return the layer's FLOPs divided by the bytes of its weights, its input and its output.")


# %%
def ridge(peak: float, bandwidth: float) -> float:
    """The intensity, FLOP per byte, from which on a machine can compute as fast as it is able to. 1 point.

    `peak` is in FLOP/s, `bandwidth` in bytes/s. Hint: at the ridge both limits take the same time.
    """
    raise NotImplementedError("Return the FLOP per byte at which compute and bandwidth take equally long.")


# %%
def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """The roofline itself: the FLOP/s that can be reached at an intensity in FLOP per byte. 1 point.

    Hint: a slope, and above the ridge a flat roof.
    """
    raise NotImplementedError("Return the FLOP/s that the lower of the two limits allows at this intensity.")


# %%
def binding_limit(flops: float, moved: float, operators: int, peak: float, bandwidth: float, overhead: float) -> str:
    """Which of three limits binds a phase: "compute", "memory" or "overhead". 2 points.

    The phase does `flops` FLOPs and moves `moved` bytes with `operators` operators, each of which costs `overhead` seconds to
    launch however little it does. `peak` is in FLOP/s, `bandwidth` in bytes/s.
    Hint: turn all three into seconds; the longest binds.
    """
    raise NotImplementedError("Return the name of the limit that asks for the most seconds.")


# %% [markdown]
# ## Predictions


# %%
def decode_seconds(config: ModelConfig, bandwidth: float, bytes_per_weight: float = 2.0) -> float:
    """Predict one decode step of one user at a short context, seconds. 3 points.

    Left of the ridge a step takes as long as reading its weights at `bandwidth` bytes/s. `config` is the model's shape: see
    `ModelConfig` for its properties. Within 2 % of what minillm counts, operator by operator.
    Hint: what lies in memory is not what is read: of the input embedding a step needs one row, unless it is the head as well.
    """
    raise NotImplementedError("Return the bytes of the weights that one step reads, divided by the bandwidth.")


# %%
def decode_guess_ms() -> float:
    """Before you run anything: the milliseconds of one decode step of Qwen3-8B on an A100 with 80 GB. 1 point.

    One user, a short context, 16-bit weights. Qwen3-8B has 8.19 billion parameters, of which its input embedding, which is
    not its head, takes 151936 x 4096; the A100 reads 2039 GB/s. Within 4 %. Then compare: minillm predict --model qwen3-8b
    --hardware a100-80 --stage kv_cache --context 16.
    """
    raise NotImplementedError("Return your estimate, a number of milliseconds worked out by hand.")


# %%
def step_intensity(config: ModelConfig, batch: int, context: int, element_bytes: float = 2.0) -> float:
    """Intensity of a whole decode step, FLOP per byte: `batch` users who attend over `context` tokens each. 2 points.

    With P = config.matmul_params, L = config.n_layers, and A = config.n_heads x config.head_dim, a token costs 2 P FLOPs in
    the linear layers and 4 A x context in the attention of each of the L layers. The step reads each of the P weights once,
    and for each user the keys and values of all its context: config.kv_bytes_per_token(...) bytes a token. Weights, keys and
    values take `element_bytes` each; leave the activations out. Hint: which of these grow with the batch?
    """
    raise NotImplementedError("Return the step's FLOPs divided by the bytes of its weights, keys and values.")


# %%
def step_intensity_limit(config: ModelConfig, context: int, element_bytes: float = 2.0) -> float:
    """What `step_intensity` comes near to as the batch grows without end, FLOP per byte. 2 points.

    However many users share the weights, nobody shares their keys and values: this limit, not the ridge, is how far batching
    goes at a context. Hint: divide by the batch above and below the line, then let it grow; the weights drop out.
    """
    raise NotImplementedError("Return the limit of the step's intensity for an endless batch.")
