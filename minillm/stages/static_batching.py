"""Chapter 4, first half. Static batching: one padded batch, run until its longest answer is done.

A decode step reads every weight; B sequences that step together share that reading. While a step is bound by memory, B tokens
cost little more than one, and the intensity of the linear layers is about B times as high. Keys and values are not shared:
each sequence reads its own, and they set the limit that the whole step's intensity tends to as B grows:

    (2 P + 4 S A L) / (KV bytes a token x S)      P weights, A = Hq D, L layers, S tokens a sequence

Prompts of different lengths are padded *on the left*, so that all last tokens stand in one column. Two things keep a row equal
to the same prompt alone: its positions count from its own first token, and no token of it sees a pad. A row that has ended
is frozen: it is still computed, as the batch is one tensor, and nothing of it is kept. That waste the second half mends.

Invariant: the token of row b in slot j has position j - pads[b], and sees the slots pads[b] to j.
"""

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.batch import OnBatchToken, Request, Row, check_max_batch, choose, record, requests_of, rows_of
from minillm.generation import Generation
from minillm.model import Transformer
from minillm.sampling import SamplerLike, greedy
from minillm.stages import gqa
from minillm.stages.gqa import GroupedKVCache, decode_attention


class PaddedCache(GroupedKVCache):
    """A cache of B sequences whose first `pads[b]` slots hold padding that nothing sees. `pads` is (B,), int64."""

    def __init__(self, model: Transformer, capacity: int, pads: Tensor) -> None:
        super().__init__(model, capacity, batch=len(pads))
        self.pads = pads
        self._visible: Tensor  # (B, 1, T, S), the same in all layers of a pass

    def positions(self, n_tokens: int) -> Tensor:
        """The positions (B, T) of the new tokens; also makes the mask that all layers of this pass use."""
        slots = super().positions(n_tokens)  # (1, T)
        queries = slots[0, :, None]  # (T, 1)
        keys = torch.arange(self.length, device=self.device)  # (S,)
        visible = keys <= queries
        if self.config.sliding_window is not None:
            visible &= keys > queries - self.config.sliding_window
        visible = visible & (keys >= self.pads[:, None, None])  # (T, S) -> (B, T, S)
        # A pad sees itself: of a row that sees nothing, softmax makes NaN.
        self._visible = (visible | (keys == queries))[:, None]
        return (slots - self.pads[:, None]).clamp_min(0)  # (B, T)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.store(layer, k, v)  # (B, Hkv, S, D)
        if q.shape[2] == 1:
            return decode_attention(q, k, v, self._visible)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._visible, enable_gqa=True)


def _pad_on_the_left(model: Transformer, rows: Sequence[Row]) -> tuple[Tensor, GroupedKVCache]:
    """The prompts as one tensor (B, T), padded on the left where their lengths differ, and a cache for them."""
    T = max(len(row.prompt) for row in rows)
    capacity = T + max(row.remaining for row in rows) - 1
    pads = [T - len(row.prompt) for row in rows]
    # A pad is one more copy of the first token, at the same position and seeing itself alone. So it computes what that token
    # does, and is finite where the row alone is: no pad is seen, but 0 times a NaN would be.
    padded = [row.prompt[:1] * pad + row.prompt for row, pad in zip(rows, pads, strict=True)]
    tokens = torch.tensor(padded, device=model.device)
    if not any(pads):
        return tokens, GroupedKVCache(model, capacity, batch=len(rows))
    return tokens, PaddedCache(model, capacity, torch.tensor(pads, device=model.device))


run = gqa.run  # in lockstep, with prompts of one length and one limit, there is nothing to pad and nothing to freeze


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    max_new_tokens: int | Sequence[int] = 0,
    *,
    max_batch: int | None = None,
    sampler: SamplerLike = greedy,
    stop_tokens: Collection[int] = (),
    on_token: OnBatchToken | None = None,
) -> list[Generation]:
    """Answer the prompts in batches of `max_batch` in their order (None: all at once), each until its longest answer ends.

    `max_new_tokens` is one limit or one a prompt, `on_token` is called with the index of a prompt and its token; a `Request`
    among the prompts has settings of its own, so where all are `Request`s the limit is left out. Times count from this call.
    Raises `UsageError` for a request that cannot run, before any runs.
    """
    rows = rows_of(model, requests_of(prompts, max_new_tokens, sampler, stop_tokens, on_token))
    size = len(rows) if max_batch is None else max_batch
    check_max_batch(size)
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        tokens, cache = _pad_on_the_left(model, batch)  # (B, T)
        while not all(row.finished for row in batch):
            token = choose(batch, model.head(model.hidden(tokens, cache)[:, -1]))  # (B, V) -> (B,)
            record(batch, token)  # a row that has ended takes nothing more
            tokens = token[:, None]  # (B, 1)
    return [row.generation() for row in rows]
