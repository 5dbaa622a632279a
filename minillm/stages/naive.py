"""Chapter 1. Naive generation: run the whole prefix through the model again for every new token.

Token number i costs a forward pass over i tokens: 2 P i FLOPs in the linear layers (P weights) and 4 A i^2 in each of the L
attention layers (A = Hq D). Over n tokens that is

    P n^2 + (4/3) A L n^3        O(n^2) in the linear layers, O(n^3) in attention

where a cache needs 2 P n + 2 A L n^2. Nothing is remembered between tokens, so nothing can go stale: this is the stage that
all later ones are tested against. Source for the orders: "How to Scale Your Model", the chapter on inference.
"""

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.generation import Generation, OnToken, Recorder, generate_alone
from minillm.model import Transformer
from minillm.sampling import SamplerLike, greedy


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where a query sees no key after itself.

    q is (B, H, T, D), k and v are (B, H, S, D), and the T queries are the *last* T of the S positions: query i stands at
    position S-T+i. With a window W it sees keys S-T+i-W+1 to S-T+i. Returns (B, H, T, D). Where k and v have fewer heads,
    each serves a group of neighbouring query heads.
    """
    T, S, grouped = q.shape[2], k.shape[2], k.shape[1] < q.shape[1]
    windowed = window is not None and S > window
    if not windowed and T in (1, S):
        # One query sees every key. A whole prefix is the square case, the only one that `is_causal` means rightly:
        # it aligns its triangle with the upper left corner.
        return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, enable_gqa=grouped)
    visible = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    if windowed:
        visible = visible.triu(S - T - window + 1)  # type: ignore[operator]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped)


class NoCache:
    """Keeps nothing: the tokens of this pass are all there is."""

    def __init__(self, model: Transformer) -> None:
        self.config = model.config
        self.device = model.device

    def positions(self, n_tokens: int) -> Tensor:
        return torch.arange(n_tokens, device=self.device)[None]  # (1, T), the same for every sequence

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Query head h reads KV head h // G: each KV head is copied for the G query heads that share it.
        k = k.repeat_interleave(self.config.group_size, dim=1)  # (B, Hkv, T, D) -> (B, Hq, T, D)
        v = v.repeat_interleave(self.config.group_size, dim=1)
        return causal_attention(q, k, v, self.config.sliding_window)


def run(model: Transformer, tokens: Tensor, max_new_tokens: int, sampler: SamplerLike, recorder: Recorder) -> None:
    """Extend B prompts of equal length, tokens (B, T), by up to `max_new_tokens` each, recomputing everything for each."""
    for _ in range(max_new_tokens):
        logits = model(tokens, NoCache(model))  # (B, T, V), of which the last row is needed
        token = sampler(logits[:, -1])  # (B,)
        if recorder.add(token):
            break
        tokens = torch.cat([tokens, token[:, None]], dim=1)  # (B, T) -> (B, T+1)


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
