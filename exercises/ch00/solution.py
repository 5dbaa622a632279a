"""Chapter 0, exercises: the five numbers and the roofline.

Each function says what it is given, what it returns and in which units. Replace the line that raises NotImplementedError.
`minillm grade ch00` or `pytest exercises/ch00` shows what you have earned. Times are in seconds, rates in units a second.
"""

# %% [markdown] tags=["active-ipynb"]
# # Exercises to chapter 0: the five numbers and the roofline
# Fill in each function, run its cell, then run the check below it. Times are in seconds, rates in units a second. The outputs
# that you see first are those of right answers: `pytest --nbval` on this notebook names the cells that do not reach them yet.

# %%
from itertools import pairwise

from minillm.config import ModelConfig

# %% tags=["active-ipynb"]
# from minillm.grading import check

# %% [markdown]
# ## The five numbers, from timestamps
# A server stamps the moment at which a request was sent, `start`, and the moment at which each of its tokens was ready,
# `tokens`, in seconds on one clock. The clock does not begin at 0.


# %%
def ttft(start: float, tokens: list[float]) -> float:
    """Time to first token, seconds. 1 point.

    ttft(10.0, [10.5, 10.6]) is 0.5. Hint: how long does the reader look at an empty screen?
    """
    # BEGIN SOLUTION: Return the seconds from the moment the request was sent to its first token.
    return tokens[0] - start
    # END SOLUTION


# %%
def itl(tokens: list[float]) -> list[float]:
    """Inter-token latencies, seconds: the gap before each token but the first, in order. 1 point.

    itl([10.5, 10.6, 10.9]) is [0.1, 0.3]; one token has no gaps. Hint: n tokens have n - 1 gaps.
    """
    # BEGIN SOLUTION: Return the list of the gaps between one token and the next.
    return [after - before for before, after in pairwise(tokens)]
    # END SOLUTION


# %%
def tpot(start: float, tokens: list[float]) -> float | None:
    """Time per output token, seconds: what a token after the first takes on average; None for a single token. 1 point.

    tpot(10.0, [10.5, 10.6, 10.9]) is 0.2. Hint: the serving benchmarks leave the first token out, above and below the line.
    """
    # BEGIN SOLUTION: Return the mean seconds a token after the first, or None when there is only one token.
    if len(tokens) < 2:
        return None
    end_to_end, first = tokens[-1] - start, tokens[0] - start
    return (end_to_end - first) / (len(tokens) - 1)
    # END SOLUTION


# %%
def p99_interpolated(values: list[float]) -> float:
    """The 99th percentile as vLLM has it, in the unit of the values, which come in any order. 1 point.

    Number the n sorted values from 0 to n - 1. P99 stands at place 0.99 (n - 1); between two values, it lies between them in
    proportion. Of 1, 2, ..., 100 it is 99.01. Hint: the whole part of the place is an index, its fraction a weight.
    """
    # BEGIN SOLUTION: Return the value at place 0.99 (n - 1) of the sorted values, linear between neighbours.
    ordered = sorted(values)
    place = 0.99 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
    # END SOLUTION


# %%
def p99_nearest(values: list[float]) -> float:
    """The 99th percentile as MLPerf has it, in the unit of the values, which come in any order. 1 point.

    Number the n sorted values from 0: P99 is the one whose number is 0.99 n, rounded down. Of 1, 2, ..., 100 it is 100.
    Hint: no interpolation, so the result is always a value that occurred.
    """
    # BEGIN SOLUTION: Return the sorted value whose number, counted from 0, is 0.99 n rounded down.
    ordered = sorted(values)
    return ordered[len(ordered) * 99 // 100]
    # END SOLUTION


# %%
def usd_per_million(price_per_hour: float, tokens_per_s: float, busy: float = 1.0) -> float:
    """Dollars per million output tokens. 1 point.

    The machine costs `price_per_hour` dollars an hour whether it works or not. While it works, all its users together get
    `tokens_per_s`; it works for the fraction `busy` of the time. usd_per_million(3.6, 1000) is 1.0.
    Hint: how many tokens leave it in an hour?
    """
    # BEGIN SOLUTION: Return the dollars that a million output tokens cost on a machine paid by the hour.
    tokens_per_hour = tokens_per_s * busy * 3600
    return price_per_hour / tokens_per_hour * 1e6
    # END SOLUTION


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
    # BEGIN SOLUTION: Return the layer's FLOPs divided by the bytes of its weights, its input and its output.
    flops = 2 * rows * d_in * d_out
    moved = d_in * d_out * weight_bytes + rows * (d_in + d_out) * activation_bytes
    return flops / moved
    # END SOLUTION


# %%
def ridge(peak: float, bandwidth: float) -> float:
    """The intensity, FLOP per byte, from which on a machine can compute as fast as it is able to. 1 point.

    `peak` is in FLOP/s, `bandwidth` in bytes/s. Hint: at the ridge both limits take the same time.
    """
    # BEGIN SOLUTION: Return the FLOP per byte at which compute and bandwidth take equally long.
    return peak / bandwidth
    # END SOLUTION


# %%
def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """The roofline itself: the FLOP/s that can be reached at an intensity in FLOP per byte. 1 point.

    Hint: a slope, and above the ridge a flat roof.
    """
    # BEGIN SOLUTION: Return the FLOP/s that the lower of the two limits allows at this intensity.
    return min(peak, intensity * bandwidth)
    # END SOLUTION


# %%
def binding_limit(flops: float, moved: float, operators: int, peak: float, bandwidth: float, overhead: float) -> str:
    """Which of three limits binds a phase: "compute", "memory" or "overhead". 2 points.

    The phase does `flops` FLOPs and moves `moved` bytes with `operators` operators, each of which costs `overhead` seconds to
    launch however little it does. `peak` is in FLOP/s, `bandwidth` in bytes/s.
    Hint: turn all three into seconds; the longest binds.
    """
    # BEGIN SOLUTION: Return the name of the limit that asks for the most seconds.
    seconds = {"compute": flops / peak, "memory": moved / bandwidth, "overhead": operators * overhead}
    return max(seconds, key=seconds.__getitem__)
    # END SOLUTION


# %% [markdown]
# ## Predictions


# %%
def decode_seconds(config: ModelConfig, bandwidth: float, bytes_per_weight: float = 2.0) -> float:
    """Predict one decode step of one user at a short context, seconds. 3 points.

    Left of the ridge a step takes as long as reading its weights at `bandwidth` bytes/s. `config` is the model's shape: see
    `ModelConfig` for its properties. Within 2 % of what minillm counts, operator by operator.
    Hint: what lies in memory is not what is read: of the input embedding a step needs one row, unless it is the head as well.
    """
    # BEGIN SOLUTION: Return the bytes of the weights that one step reads, divided by the bandwidth.
    return config.streamed_params * bytes_per_weight / bandwidth
    # END SOLUTION


# %%
def decode_guess_ms() -> float:
    """Before you run anything: the milliseconds of one decode step of Qwen3-8B on an A100 with 80 GB. 1 point.

    One user, a short context, 16-bit weights. Qwen3-8B has 8.19 billion parameters, of which its input embedding, which is
    not its head, takes 151936 x 4096; the A100 reads 2039 GB/s. Within 4 %. Then compare: minillm predict --model qwen3-8b
    --hardware a100-80 --stage kv_cache --context 16.
    """
    # BEGIN SOLUTION: Return your estimate, a number of milliseconds worked out by hand.
    return (8.19e9 - 151936 * 4096) * 2 / 2039e9 * 1e3
    # END SOLUTION


# %%
def step_intensity(config: ModelConfig, batch: int, context: int, element_bytes: float = 2.0) -> float:
    """Intensity of a whole decode step, FLOP per byte: `batch` users who attend over `context` tokens each. 2 points.

    With P = config.matmul_params, L = config.n_layers, and A = config.n_heads x config.head_dim, a token costs 2 P FLOPs in
    the linear layers and 4 A x context in the attention of each of the L layers. The step reads each of the P weights once,
    and for each user the keys and values of all its context: config.kv_bytes_per_token(...) bytes a token. Weights, keys and
    values take `element_bytes` each; leave the activations out. Hint: which of these grow with the batch?
    """
    # BEGIN SOLUTION: Return the step's FLOPs divided by the bytes of its weights, keys and values.
    P, L, A = config.matmul_params, config.n_layers, config.n_heads * config.head_dim
    flops = batch * (2 * P + 4 * A * L * context)
    keys_and_values = 2 * L * config.n_kv_heads * config.head_dim * element_bytes
    return flops / (P * element_bytes + batch * context * keys_and_values)
    # END SOLUTION


# %%
def step_intensity_limit(config: ModelConfig, context: int, element_bytes: float = 2.0) -> float:
    """What `step_intensity` comes near to as the batch grows without end, FLOP per byte. 2 points.

    However many users share the weights, nobody shares their keys and values: this limit, not the ridge, is how far batching
    goes at a context. Hint: divide by the batch above and below the line, then let it grow; the weights drop out.
    """
    # BEGIN SOLUTION: Return the limit of the step's intensity for an endless batch.
    P, L, A = config.matmul_params, config.n_layers, config.n_heads * config.head_dim
    keys_and_values = 2 * L * config.n_kv_heads * config.head_dim * element_bytes
    return (2 * P + 4 * A * L * context) / (context * keys_and_values)
    # END SOLUTION
