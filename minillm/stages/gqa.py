"""Chapter 3. Grouped-query attention: the G = Hq / Hkv query heads of a group share one key and value, so keep and read one.

The model already computes k and v for Hkv heads only. What chapter 2 wasted was copying each for G query heads. This cache
stores 2 L Hkv D elements a token, and in decode the G queries of a group become the G rows of one matrix product, which loads
each key and value once for all of them. With S cached tokens and b bytes a number, attention of one decode step does

    4 Hq D S FLOPs over 2 Hkv D S b bytes:   intensity 2 G / b,  which is G in 16 bits, and 1 only where G is 1

G = 1 is multi-head attention (MHA), Hkv = 1 multi-query attention (MQA; Shazeer, arXiv 1911.02150), in between stands GQA
(Ainslie et al., arXiv 2305.13245). Copying the heads first (`repeat_interleave`) gives the same numbers and none of the gain.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.cpu import use_fastest_linear
from minillm.errors import MinillmError, UsageError
from minillm.generation import Generation, OnToken, Recorder, generate_alone
from minillm.model import Transformer
from minillm.sampling import SamplerLike, greedy
from minillm.stages.kv_cache import prefill_and_decode
from minillm.stages.naive import causal_attention
from minillm.weights import empty_model, named_parts


def decode_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attention of one new token for each sequence, each key and value loaded once for the query heads that share it.

    q is (B, Hq, 1, D), k and v are (B, Hkv, S, D); `visible` (B, 1, 1, S) is True where a sequence may see a key, None where it
    sees all. Query head h reads KV head h // G. Returns (B, Hq, 1, D).
    """
    B, Hq, _, D = q.shape
    G = Hq // k.shape[1]
    rows = q.reshape(B, -1, G, D)  # (B, Hq, 1, D) -> (B, Hkv, G, D): a group's queries are rows of one matrix
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=visible).reshape(B, Hq, 1, D)


# `positions` is that of `KVCache`, stands in `LatentCache` once more, and `StaticKVCache` begins so: each chapter's cache can
# be read by itself, without a base class in another file. What one of them learns, the others must.
class GroupedKVCache:
    """Keys and values of up to `capacity` tokens of each of B sequences, one for each *KV* head, filled from the left.

    The prompt may come whole or in chunks of any size. Raises `MinillmError` when it is asked to hold more than `capacity`,
    before anything is written: what is stored stays good.
    """

    def __init__(self, model: Transformer, capacity: int, batch: int = 1) -> None:
        config = model.config
        self.config = config
        self.device = model.device
        self.capacity = capacity
        self.length = 0  # S: tokens in the cache
        shape = (config.n_layers, batch, config.n_kv_heads, capacity, config.head_dim)
        self.keys = torch.empty(shape, dtype=model.dtype, device=model.device)  # never read beyond `length`
        self.values = torch.empty_like(self.keys)

    def positions(self, n_tokens: int) -> Tensor:
        start = self.length
        if start + n_tokens > self.capacity:
            raise MinillmError(
                f"The KV cache is full: it holds {start} of {self.capacity} tokens and was asked for {n_tokens} more."
            )
        self.length = start + n_tokens
        return torch.arange(start, self.length, device=self.device)[None]  # (1, T), the same for every sequence

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v (B, Hkv, T, D) of the new tokens; returns those of all S tokens so far, (B, Hkv, S, D), as views."""
        keys, values = self.keys[layer, :, :, : self.length], self.values[layer, :, :, : self.length]
        keys[:, :, -k.shape[2] :] = k
        values[:, :, -k.shape[2] :] = v
        return keys, values

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.store(layer, k, v)
        window = self.config.sliding_window
        if q.shape[2] > 1:
            return causal_attention(q, k, v, window)
        if window is not None:
            k, v = k[:, :, -window:], v[:, :, -window:]  # a window counts the new token itself
        return decode_attention(q, k, v)


def run(model: Transformer, tokens: Tensor, max_new_tokens: int, sampler: SamplerLike, recorder: Recorder) -> None:
    """Extend B prompts of equal length, tokens (B, T), by up to `max_new_tokens` each."""
    B, T = tokens.shape
    cache = GroupedKVCache(model, capacity=T + max_new_tokens - 1, batch=B)
    prefill_and_decode(model, cache, tokens, max_new_tokens, sampler, recorder)


def generate(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    sampler: SamplerLike = greedy,
    stop_tokens: Collection[int] = (),
    on_token: OnToken | None = None,
) -> Generation:
    """Generate up to `max_new_tokens` after the prompt. Raises `UsageError` for a prompt that cannot run."""
    return generate_alone(run, model, prompt, max_new_tokens, sampler, stop_tokens, on_token)


def with_kv_heads(model: Transformer, n_kv_heads: int) -> Transformer:
    """A copy of the model with another number of KV heads and every other weight as it is.

    Fewer heads are the *mean* of those that they replace, which is how the GQA paper (section 2.1) turns an MHA checkpoint into
    one to be trained a little further. More heads are copies of the head they come from: the same function, written as MHA
    would be. Raises `UsageError` unless one number of KV heads divides the other, and the query heads divide into the new one.
    """
    config, before = model.config, model.config.n_kv_heads
    divisors = [n for n in range(1, config.n_heads + 1) if config.n_heads % n == 0]
    possible = [n for n in divisors if before % n == 0 or n % before == 0]
    if n_kv_heads not in possible:
        raise UsageError(
            f"{config.name} has {config.n_heads} query heads on {before} KV heads, which cannot become {n_kv_heads}: "
            f"choose one of {', '.join(map(str, possible))}."
        )
    n_kv_heads = int(n_kv_heads)  # 2.0 and a NumPy 2 are 2
    new = empty_model(replace(config, n_kv_heads=n_kv_heads), model.device, model.dtype)
    sources = named_parts(model)
    for name, part in named_parts(new).items():
        source = sources[name]
        if ".k_proj." in name or ".v_proj." in name:
            heads = source.view(before, config.head_dim, -1)  # (Hkv, D, C), or (Hkv, D, 1) of a bias
            if n_kv_heads < before:
                heads = heads.view(n_kv_heads, before // n_kv_heads, config.head_dim, -1)
                exact = torch.promote_types(heads.dtype, torch.float32)  # 16 bits would round in the middle of the sum
                heads = heads.mean(dim=1, dtype=exact)
            else:
                heads = heads.repeat_interleave(n_kv_heads // before, dim=0)
            source = heads.reshape(part.shape)
        part.copy_(source)
    return use_fastest_linear(new)
