"""Chapter 2. The KV cache: keys and values of past tokens never change, so compute them once and keep them.

Generation becomes two phases. *Prefill* runs the prompt in one pass and gives the first new token; each *decode* step then
runs one token against the cache. Over n tokens, P weights, A = Hq D, L layers:

    2 P n + 2 A L n^2            O(n) in the linear layers, O(n^2) in attention

The price is memory, and a step whose arithmetic intensity is about one FLOP a byte (2-byte weights): every weight is read to
be used once. This cache takes attention at its word and keeps one key and value for each *query* head, 2 L Hq D elements a
token; chapter 3 keeps one for each KV head.

Invariant: the position of a new token is the number of tokens before it.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from minillm.errors import MinillmError
from minillm.generation import Generation, OnToken, Recorder, generate_alone
from minillm.model import Cache, Transformer
from minillm.sampling import SamplerLike, greedy
from minillm.stages.naive import causal_attention


class KVCache:
    """Keys and values of up to `capacity` tokens of each of B sequences, allocated once and filled from the left.

    The prompt may come whole or in chunks of any size. Raises `MinillmError` when it is asked to hold more than `capacity`,
    before anything is written: what is stored stays good.
    """

    def __init__(self, model: Transformer, capacity: int, batch: int = 1) -> None:
        config = model.config
        self.config = config
        self.device = model.device
        self.capacity = capacity
        self.length = 0  # S: tokens in the cache
        shape = (config.n_layers, batch, config.n_kv_heads, config.group_size, capacity, config.head_dim)
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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]  # (B, Hkv, G, capacity, D)
        new = slice(self.length - q.shape[2], self.length)
        keys[..., new, :] = k[:, :, None]  # one copy for each query head of the group
        values[..., new, :] = v[:, :, None]
        k = keys[..., : self.length, :].flatten(1, 2)  # (B, Hkv, G, S, D) -> (B, Hq, S, D), a view
        v = values[..., : self.length, :].flatten(1, 2)
        return causal_attention(q, k, v, self.config.sliding_window)


def prefill_and_decode(
    model: Transformer, cache: Cache, tokens: Tensor, max_new_tokens: int, sampler: SamplerLike, recorder: Recorder
) -> None:
    """Run B prompts of equal length, tokens (B, T), into an empty cache, then decode one token of each a step."""
    for _ in range(max_new_tokens):
        hidden = model.hidden(tokens, cache)  # (B, T, C) in prefill, (B, 1, C) in decode
        token = sampler(model.head(hidden[:, -1]))  # (B, V) -> (B,): only the last position is asked
        if recorder.add(token):
            break
        tokens = token[:, None]  # (B, 1)


def run(model: Transformer, tokens: Tensor, max_new_tokens: int, sampler: SamplerLike, recorder: Recorder) -> None:
    """Extend B prompts of equal length, tokens (B, T), by up to `max_new_tokens` each."""
    B, T = tokens.shape
    cache = KVCache(model, capacity=T + max_new_tokens - 1, batch=B)  # the last new token is never fed back
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
