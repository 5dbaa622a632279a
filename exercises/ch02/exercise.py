"""Chapter 2, exercises: the KV cache.

Each function says what it is given, what it returns and in which shapes. Replace the lines that raise NotImplementedError.
`minillm grade ch02` or `pytest exercises/ch02` shows what you have earned. B sequences, T new tokens, S tokens in all, Hq query
heads, Hkv KV heads, D numbers a head, L layers.
"""

# %%
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.config import ModelConfig

# %% [markdown]
# ## The cache


# %%
class KVCache:
    """Keys and values of the tokens so far, for B sequences of one length. Four exercises, 11 points in all.

    A model asks it twice: `positions` once a forward pass, before anything else; then `attend` once for each layer, in order. A
    pass may bring a whole prompt, a chunk of one, or a single token. How keys and values are laid out is up to you.
        positions      2 points: the positions that it gives
        cache_decode   4 points: a prompt in one pass, then token after token
        cache_chunks   3 points: a prompt in chunks of any size
        cache_full     2 points: what happens when there is no room
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        """An empty cache for up to `capacity` tokens of each sequence.

        `config` has n_layers, n_heads (Hq), n_kv_heads (Hkv) and head_dim (D). Hint: each layer has keys and values of its own.
        """
        raise NotImplementedError(
            "Prepare an empty cache: a place for the keys and values of each layer, and a length of 0."
        )

    def positions(self, n_tokens: int) -> Tensor:
        """The positions (1, T) of the T = n_tokens tokens that this pass brings, int64.

        Invariant: the position of a new token is the number of tokens before it. When the new tokens do not fit, raise a
        ValueError before anything changes: what is stored stays good, and a shorter pass may still follow.
        """
        raise NotImplementedError(
            "Return the positions that follow the tokens so far, or raise a ValueError when the cache is full."
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep k and v, both (B, Hkv, T, D), of one layer; return the attention (B, Hq, T, D) of q over all tokens so far.

        Query head h reads KV head h // G, G = Hq / Hkv. New token i sees all tokens before this pass and the new ones up to i.
        Hint: F.scaled_dot_product_attention takes attn_mask, True where a query sees a key; its is_causal=True would align the
        triangle with the first key, which is wrong as soon as something is cached.
        """
        raise NotImplementedError(
            "Append k and v to what this layer has, and attend over all of it with the right mask."
        )


# %% [markdown]
# ## What it takes


# %%
def kv_bytes_per_token(config: ModelConfig, element_bytes: float = 2.0) -> float:
    """Bytes that one cached token takes in a cache that stores each KV head once. 1 point.

    A number takes `element_bytes`. Hint: a key and a value, in each layer, for each KV head.
    """
    raise NotImplementedError("Return the bytes of a token's keys and values in all layers.")


# %%
def largest_batch(
    config: ModelConfig, memory: float, context: int, weight_bytes: float = 2.0, element_bytes: float = 2.0
) -> int:
    """How many users with `context` tokens each fit into `memory` bytes, beside the weights. 2 points.

    All parameters (config.parameter_count) stay in memory at `weight_bytes` each, keys and values at `element_bytes`. Leave
    activations out. 0 where not even one user fits, or the weights alone do not. Hint: users are whole.
    """
    raise NotImplementedError("Return the whole number of users whose keys and values fit into what the weights leave.")


# %% [markdown]
# ## What it gains


# %%
def predict_speedup(config: ModelConfig, n: int, peak: float, bandwidth: float, element_bytes: float = 2.0) -> float:
    """Predict how many times faster n tokens come with a cache than without, from an empty prompt. 3 points.

    `peak` is in FLOP/s, `bandwidth` in bytes/s. Each step takes the longer of FLOPs / peak and bytes / bandwidth. With P =
    config.matmul_params, A = config.n_heads x config.head_dim and L = config.n_layers, the step to token i (1 to n) is
        without   a pass over i tokens: 2 P i + 4 A L i^2 FLOPs, and it reads the P weights
        with      a pass over one: 2 P + 4 A L i FLOPs, and it reads the P weights and the keys and values of i tokens
    each of them at `element_bytes`. Within 1 %. Hint: add up the seconds of all steps on both sides, then divide.
    """
    raise NotImplementedError(
        "Return the seconds of all steps without a cache divided by the seconds of all steps with one."
    )


# %%
def speedup_guesses() -> tuple[float, float]:
    """Before you run anything: that ratio, two times. 2 points.

    1. SmolLM2-135M in float32 on a laptop's CPU with 100 GFLOP/s and 20 GB/s, 512 tokens.
    2. Llama-3-8B in bfloat16 on an H100 with 989 TFLOP/s and 3350 GB/s, 200 tokens.
    Each within a quarter of what minillm predicts operator by operator. Hint: how many tokens does a pass need before the
    machine takes longer to compute than to read the weights?
    """
    raise NotImplementedError("Return your two estimates, (on the CPU, on the H100).")
