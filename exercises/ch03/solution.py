"""Chapter 3, exercises: shared keys and values.

Each function says what it is given, what it returns and in which shapes. Replace the lines that raise NotImplementedError.
`minillm grade ch03` or `pytest exercises/ch03` shows what you have earned. B sequences, T new tokens, S tokens in all, Hq query
heads, Hkv KV heads, G = Hq / Hkv, D numbers a head, C model width, L layers.
"""

# %% [markdown] tags=["active-ipynb"]
# # Exercises to chapter 3: shared keys and values
# Fill in the class and each function, run its cell, then run the checks below it. B sequences, T new tokens, S tokens in all,
# Hq query heads, Hkv KV heads, G = Hq / Hkv, D numbers a head, C model width, L layers. The outputs that you see first are
# those of right answers: `pytest --nbval` on this notebook names the cells that do not reach them yet.

# %%
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.config import ModelConfig
from minillm.roofline.counting import count

# %% tags=["active-ipynb"]
# from minillm.grading import check

# %% [markdown]
# ## Bytes are graded too
# `bytes_moved` is yours to use, and the graders count as it does.


# %%
def bytes_moved(function: Callable[..., object], *args: object) -> int:
    """Bytes that one call reads and writes, operator by operator, as minillm counts them. Of a cache, `attend` is called."""
    return count(lambda: getattr(function, "attend", function)(*args)).bytes


# %% [markdown]
# ## Query heads that share


# %%
def head_map(n_heads: int, n_kv_heads: int) -> list[int]:
    """Which KV head each of the Hq = n_heads query heads reads, in the order of the query heads. 1 point.

    Hint: neighbours share. The first G query heads read KV head 0.
    """
    # BEGIN SOLUTION: Return a list with the number of a KV head for each query head.
    return [h * n_kv_heads // n_heads for h in range(n_heads)]
    # END SOLUTION


# %%
def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q (B, Hq, T, D) over k and v (B, Hkv, S, D), none of which is copied. 4 points.

    The T queries are the last T of the S positions: query i sees keys 0 to S - T + i. Returns (B, Hq, T, D), of the dtype of q.
    Graded by its values and by `bytes_moved`, which may not reach 1.9 times the bytes of k and v with one new token, and 4
    times with four: each key and value is loaded once for all query heads that share it. What you give to
    F.scaled_dot_product_attention must have four dimensions.
    Hint: the queries of a group, G x T of them, are the rows of one matrix, and each row needs a row of the mask. Broadcasting
    in a matrix product copies, too: count it.
    """
    # BEGIN SOLUTION: Return the attention, with the queries of each group as the rows of one matrix.
    (B, Hq, T, D), (Hkv, S) = q.shape, k.shape[1:3]
    rows = q.reshape(B, Hkv, -1, D)  # (B, Hq, T, D) -> (B, Hkv, G*T, D)
    visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)  # (T, S)
    visible = visible.repeat(Hq // Hkv, 1)  # (G*T, S), the rows of the first query head, then those of the next
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=visible).reshape(B, Hq, T, D)
    # END SOLUTION


# %% tags=["active-ipynb", "nbval-ignore-output"]
# q, k, v = torch.randn(1, 16, 1, 64), torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64)  # G = 8, decode
# print(f"k and v have {(k.nbytes + v.nbytes) / 1e6:.2f} MB")
# print(f"yours moves  {bytes_moved(grouped_attention, q, k, v) / 1e6:.2f} MB")


# %%
class GroupedKVCache:
    """Keys and values of the tokens so far, one for each KV head, for B sequences of one length.

    As in chapter 2, a model asks it twice: `positions` once a forward pass, which is written already, then `attend` once for
    each layer, in order. A pass may bring a whole prompt, a chunk of one, or a single token, of any dtype.
        grouped_cache   3 points: the logits of models that run on it, and the bytes that `attend` moves in decode
    These may not reach six times the bytes of the keys and values of all tokens so far, one for each KV head.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        """An empty cache for up to `capacity` tokens. `config` has n_layers, n_heads, n_kv_heads and head_dim."""
        self.config = config
        self.capacity = capacity
        self.length = 0  # tokens in the cache, those of this pass included
        self.keys: Tensor | None = None  # how these are laid out is up to you
        self.values: Tensor | None = None

    def positions(self, n_tokens: int) -> Tensor:
        if self.length + n_tokens > self.capacity:
            raise ValueError(f"the cache holds {self.length} of {self.capacity} tokens, and {n_tokens} more do not fit")
        self.length += n_tokens
        return torch.arange(self.length - n_tokens, self.length)[None]  # (1, T)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep k and v, both (B, Hkv, T, D), of one layer; return the attention (B, Hq, T, D) of q over all tokens so far.

        Hint: memory that is allocated once, in the first pass, need not be copied when a token comes. `grouped_attention`
        does the rest.
        """
        # BEGIN SOLUTION: Keep k and v behind the tokens before them, and attend over all tokens so far.
        if self.keys is None:
            B, Hkv, _, D = k.shape
            self.keys = torch.empty(self.config.n_layers, B, Hkv, self.capacity, D, dtype=k.dtype)
            self.values = torch.empty_like(self.keys)
        start, S = self.length - k.shape[2], self.length
        self.keys[layer, :, :, start:S] = k
        self.values[layer, :, :, start:S] = v
        return grouped_attention(q, self.keys[layer, :, :, :S], self.values[layer, :, :, :S])
        # END SOLUTION


# %% tags=["active-ipynb", "nbval-ignore-output"]
# from minillm.grading import PROMPT, example_model
#
# model, tokenizer, which = example_model()  # the real model, if it is on this machine
# cache, tokens = GroupedKVCache(model.config, 64), torch.tensor([tokenizer.encode(PROMPT)])
# print(f"Your cache in {which}: {PROMPT}", end="")
# for _ in range(16):
#     tokens = model(tokens, cache)[:, -1:].argmax(-1)
#     print(tokenizer.decode(tokens[0].tolist()), end="")

# %% [markdown]
# ## Fewer heads


# %%
def pool_heads(weight: Tensor, head_dim: int, n_kv_heads: int) -> Tensor:
    """Turn the weight of a k or v projection into one of fewer KV heads, each the mean of those that it replaces. 2 points.

    `weight` is (H*D, C), or a bias (H*D,), with D = head_dim: rows 0 to D - 1 belong to head 0. Returns (n_kv_heads*D, C), or
    (n_kv_heads*D,), of the same dtype. Raises ValueError where n_kv_heads does not divide H. Hint: heads that share a new head
    are neighbours, because query head h reads KV head h // G, before and after.
    """
    # BEGIN SOLUTION: Return the mean of each group of neighbouring heads, or raise a ValueError.
    H = weight.shape[0] // head_dim
    if H % n_kv_heads:
        raise ValueError(f"{H} KV heads cannot become {n_kv_heads}")
    heads = weight.reshape(n_kv_heads, H // n_kv_heads, head_dim, *weight.shape[1:])  # (Hkv, H/Hkv, D, C)
    return heads.mean(dim=1).flatten(0, 1)
    # END SOLUTION


# %%
def tokens_that_fit(config: dict[str, int], memory: float, element_bytes: float = 2.0) -> int:
    """How many tokens of keys and values fit into `memory` bytes, from a model's config.json. 2 points.

    `config` has num_hidden_layers, num_attention_heads and hidden_size. head_dim may be missing: it is then hidden_size /
    num_attention_heads. num_key_value_heads may be missing: each query head then has keys and values of its own. A model with
    kv_lora_rank is one with MLA, whatever else it says: it keeps a latent of that many numbers, and one rotated key of
    qk_rope_head_dim numbers for all heads. A number takes `element_bytes`. Tokens are whole.
    """
    # BEGIN SOLUTION: Return the whole number of tokens whose keys and values, or latents, fit.
    if "kv_lora_rank" in config:
        numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        Hq = config["num_attention_heads"]
        D = config.get("head_dim", config["hidden_size"] // Hq)
        numbers = 2 * config.get("num_key_value_heads", Hq) * D
    return int(memory // (config["num_hidden_layers"] * numbers * element_bytes))
    # END SOLUTION


# %% [markdown]
# ## Intensity


# %%
def attention_intensity(
    n_heads: int, n_kv_heads: int, context: int, new_tokens: int = 1, element_bytes: float = 2.0
) -> float:
    """Intensity of attention, FLOP per byte: T = new_tokens queries a head over S = context keys. 2 points.

    Count 4 D S FLOPs for each query, masked keys included. Each key and value is read once, each query read and each result
    written, all at `element_bytes`. Exact, so the queries and results count. Hint: the head size D drops out. In decode over a
    long context it should come near to 2 G / element_bytes.
    """
    # BEGIN SOLUTION: Return the FLOPs of all query heads divided by the bytes of k, v, q and the result.
    flops = 4 * n_heads * context * new_tokens
    return flops / ((2 * n_kv_heads * context + 2 * n_heads * new_tokens) * element_bytes)
    # END SOLUTION


# %% [markdown]
# ## Latents


# %%
def absorbed_mla(q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """One decode step of multi-head latent attention, without making keys or values. 3 points.

    Given are the query of the new token, q_nope (B, Hq, d_nope) and q_rope (B, Hq, d_r), rotated already; what is cached of
    all S tokens, latents (B, S, d_c) and rotated keys k_rope (B, S, d_r), the same for all heads; and the up-projections w_uk
    (Hq, d_nope, d_c) and w_uv (Hq, d_v, d_c). Head h would have the keys w_uk[h] @ c + the rotated ones, and the values
    w_uv[h] @ c. Its score is q_nope . key + q_rope . k_rope, over the root of d_nope + d_r. Returns (B, Hq, d_v).
    Graded by its values and by `bytes_moved`, which may not reach six times the bytes of what is cached.
    Hint: q . (W c) = (W^T q) . c, and the sum of p W c over all tokens is W times the sum of p c. torch.einsum, in this order.
    """
    # BEGIN SOLUTION: Return the attention, with w_uk applied to the query and w_uv to the weighted sum of latents.
    scale = (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5
    q_latent = torch.einsum("bhn,hnc->bhc", q_nope, w_uk)
    scores = q_latent @ latents.transpose(1, 2) + q_rope @ k_rope.transpose(1, 2)  # (B, Hq, S)
    mixed = (scores * scale).softmax(-1) @ latents  # (B, Hq, d_c)
    return torch.einsum("bhc,hvc->bhv", mixed, w_uv)
    # END SOLUTION


# %% [markdown]
# ## What it gains


# %%
def sharing_guesses() -> tuple[float, float, float]:
    """Before you run anything: how much faster SmolLM2-135M decodes in float32 with gqa than with kv_cache. 1 point.

    It has 134.5 million weights, 30 layers, 9 query heads on 3 KV heads of 64. One user, and reading is what takes the time.
    1. How many times faster is a step over 256 tokens?      2. And over 8,192?
    3. From how many tokens on is a step 1.5 times as fast?
    Each within 3 % of what minillm counts, operator by operator. Hint: both read the weights once; kv_cache reads the keys and
    values G times.
    """
    # BEGIN SOLUTION: Return your three estimates: two ratios and a number of tokens.
    return 1.043, 1.825, 3900.0
    # END SOLUTION
