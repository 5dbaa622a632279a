"""Chapter 2, exercises: the KV cache.

Each function says what it is given, what it returns and in which shapes. Replace the lines that raise NotImplementedError.
`minillm grade ch02` or `pytest exercises/ch02` shows what you have earned. B sequences, T new tokens, S tokens in all, Hq query
heads, Hkv KV heads, D numbers a head, L layers.
"""

# %% [markdown] tags=["active-ipynb"]
# # Exercises to chapter 2: the KV cache
# Fill in the class and each function, run its cell, then run the checks below it. B sequences, T new tokens, S tokens in all,
# Hq query heads, Hkv KV heads, D numbers a head, L layers. The outputs that you see first are those of right answers:
# `pytest --nbval` on this notebook names the cells that do not reach them yet.

# %%
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.config import ModelConfig

# %% tags=["active-ipynb"]
# from minillm.grading import check

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
        # BEGIN SOLUTION: Prepare an empty cache: a place for the keys and values of each layer, and a length of 0.
        self.config = config
        self.capacity = capacity
        self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        # END SOLUTION

    def positions(self, n_tokens: int) -> Tensor:
        """The positions (1, T) of the T = n_tokens tokens that this pass brings, int64.

        Invariant: the position of a new token is the number of tokens before it. When the new tokens do not fit, raise a
        ValueError before anything changes: what is stored stays good, and a shorter pass may still follow.
        """
        # BEGIN SOLUTION: Return the positions that follow the tokens so far, or raise a ValueError when the cache is full.
        if self.length + n_tokens > self.capacity:
            raise ValueError(f"the cache holds {self.length} of {self.capacity} tokens, and {n_tokens} more do not fit")
        start, self.length = self.length, self.length + n_tokens
        return torch.arange(start, self.length)[None]
        # END SOLUTION

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep k and v, both (B, Hkv, T, D), of one layer; return the attention (B, Hq, T, D) of q over all tokens so far.

        Query head h reads KV head h // G, G = Hq / Hkv. New token i sees all tokens before this pass and the new ones up to i.
        Hint: F.scaled_dot_product_attention takes attn_mask, True where a query sees a key; its is_causal=True would align the
        triangle with the first key, which is wrong as soon as something is cached.
        """
        # BEGIN SOLUTION: Append k and v to what this layer has, and attend over all of it with the right mask.
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], k], dim=2)  # (B, Hkv, S, D)
            self.values[layer] = torch.cat([self.values[layer], v], dim=2)
        T, S, G = q.shape[2], self.length, q.shape[1] // k.shape[1]
        keys = self.keys[layer].repeat_interleave(G, dim=1)  # (B, Hkv, S, D) -> (B, Hq, S, D)
        values = self.values[layer].repeat_interleave(G, dim=1)
        visible = torch.arange(S) <= torch.arange(S - T, S)[:, None]  # (T, S)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
        # END SOLUTION


# %% tags=["active-ipynb", "nbval-ignore-output"]
# from minillm.grading import PROMPT, example_model
#
# model, tokenizer, which = example_model()  # the real model, if it is on this machine
# cache, tokens = KVCache(model.config, 64), torch.tensor([tokenizer.encode(PROMPT)])
# print(f"Your cache in {which}: {PROMPT}", end="")
# for _ in range(16):
#     tokens = model(tokens, cache)[:, -1:].argmax(-1)
#     print(tokenizer.decode(tokens[0].tolist()), end="")

# %% [markdown]
# ## What it takes


# %%
def kv_bytes_per_token(config: ModelConfig, element_bytes: float = 2.0) -> float:
    """Bytes that one cached token takes in a cache that stores each KV head once. 1 point.

    A number takes `element_bytes`. Hint: a key and a value, in each layer, for each KV head.
    """
    # BEGIN SOLUTION: Return the bytes of a token's keys and values in all layers.
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * element_bytes
    # END SOLUTION


# %%
def largest_batch(
    config: ModelConfig, memory: float, context: int, weight_bytes: float = 2.0, element_bytes: float = 2.0
) -> int:
    """How many users with `context` tokens each fit into `memory` bytes, beside the weights. 2 points.

    All parameters (config.parameter_count) stay in memory at `weight_bytes` each, keys and values at `element_bytes`. Leave
    activations out. 0 where not even one user fits, or the weights alone do not. Hint: users are whole.
    """
    # BEGIN SOLUTION: Return the whole number of users whose keys and values fit into what the weights leave.
    free = memory - config.parameter_count * weight_bytes
    a_user = context * 2 * config.n_layers * config.n_kv_heads * config.head_dim * element_bytes
    return max(0, int(free // a_user))
    # END SOLUTION


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
    # BEGIN SOLUTION: Return the seconds of all steps without a cache divided by the seconds of all steps with one.
    P, A, L = config.matmul_params, config.n_heads * config.head_dim, config.n_layers
    a_token = 2 * L * config.n_kv_heads * config.head_dim * element_bytes
    weights = P * element_bytes
    naive = cached = 0.0
    for i in range(1, n + 1):
        naive += max((2 * P * i + 4 * A * L * i * i) / peak, weights / bandwidth)
        cached += max((2 * P + 4 * A * L * i) / peak, (weights + a_token * i) / bandwidth)
    return naive / cached
    # END SOLUTION


# %%
def speedup_guesses() -> tuple[float, float]:
    """Before you run anything: that ratio, two times. 2 points.

    1. SmolLM2-135M in float32 on a laptop's CPU with 100 GFLOP/s and 20 GB/s, 512 tokens.
    2. Llama-3-8B in bfloat16 on an H100 with 989 TFLOP/s and 3350 GB/s, 200 tokens.
    Each within a quarter of what minillm predicts operator by operator. Hint: how many tokens does a pass need before the
    machine takes longer to compute than to read the weights?
    """
    # BEGIN SOLUTION: Return your two estimates, (on the CPU, on the H100).
    return 27.0, 1.0
    # END SOLUTION
