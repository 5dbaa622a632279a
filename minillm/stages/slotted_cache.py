"""Chapter 4: the cache of continuous batching, in which every request has a slot and a length of its own.

A pass brings the tokens of n requests *packed* into one row (1, N): several tokens of a request whose prompt is run, one of a
request that decodes. The linear layers do not care whose a token is. Here, each token is written to its slot, and attention is
told apart again: one query for each request that decodes, all together; the queries of a prompt for themselves.

Invariants: a token's position is its place in its slot; of a slot, nothing beyond its length is ever seen; every column up to
the longest slot is finite.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from minillm.errors import MinillmError
from minillm.model import Transformer
from minillm.stages.gqa import decode_attention
from minillm.stages.naive import causal_attention

BLOCK = 64  # columns that are made ready at a time


class SlottedCache:
    """Keys and values of up to `slots` sequences with lengths of their own, each filled from the left of its slot.

    Before a pass, `pack` says how many tokens of which slot it brings. Slots that are not in use, however many, cost memory and
    no time: attention reads the slots of running requests, up to the longest of them. Raises `MinillmError` where the device
    has no room for them.
    """

    def __init__(self, model: Transformer, slots: int, capacity: int) -> None:
        config = model.config
        self.config = config
        self.device = model.device
        self.capacity = capacity  # tokens that a slot holds
        blocks = -(-capacity // BLOCK)
        shape = (config.n_layers, slots, config.n_kv_heads, blocks * BLOCK, config.head_dim)
        try:
            self.keys = torch.empty(shape, dtype=model.dtype, device=model.device)
            self.values = torch.empty_like(self.keys)
        except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is a RuntimeError
            size = 2 * math.prod(shape) * model.dtype.itemsize / 1e9
            raise MinillmError(
                f"A cache of {slots} slots of {capacity} tokens takes {size:.1f} GB, which {model.device} does not have free: "
                "run fewer or shorter requests at a time."
            ) from None
        self._finite = 0  # columns that were set to 0 in all slots
        # S of each slot twice: for the host, which cuts tensors by it, and for the device, which a decode step asks nothing of.
        self.lengths = [0] * slots
        self._next = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._slots = torch.arange(slots, device=self.device)
        # What `pack` says of the next pass, of N tokens for n slots:
        self._rows: Tensor  # (N,) slot of each token
        self._columns: Tensor  # (N,) its place there, which is its position
        self._last: Tensor  # (n,) where in the pass each slot's last token stands
        self._chunks: list[tuple[int, int, int]]  # slot, start and end in the pass, where a slot has several tokens
        self._visible: Tensor | None  # (n, 1, 1, S) what the last token of each slot sees, None where all see all

    def clear(self, slot: int) -> None:
        """Make a slot empty for another request."""
        self._shorten(slot, 0)
        self._next[slot : slot + 1].zero_()

    def move(self, source: int, target: int) -> None:
        """Put what slot `source` holds into slot `target`."""
        n = self.lengths[source]
        self._shorten(target, n)
        self.lengths[target] = n
        self.keys[:, target, :, :n] = self.keys[:, source, :, :n]
        self.values[:, target, :, :n] = self.values[:, source, :, :n]
        self._next[target] = self._next[source]

    def _shorten(self, slot: int, length: int) -> None:
        """Zero what a slot holds beyond `length`: its next request masks that, but see `_clean`."""
        if length < self.lengths[slot]:
            for memory in (self.keys, self.values):
                memory[:, slot, :, length : self.lengths[slot]].zero_()
            self.lengths[slot] = length

    def pack(self, new: Sequence[int]) -> Tensor:
        """Announce a pass that brings `new[i]` tokens of slot i, packed in that order.

        Returns (n,), the place of each slot's last token in the packed row. With one token for each slot, which is decoding,
        everything is known on the device already and nothing is sent there.
        """
        n = len(new)
        ends = list(accumulate(new))
        starts = [end - count for end, count in zip(ends, new, strict=True)]
        before = self.lengths[:n]
        after = [length + count for length, count in zip(before, new, strict=True)]
        if max(after) > self.capacity:
            raise MinillmError(f"A slot of the cache holds {self.capacity} tokens and was asked to hold {max(after)}.")
        self.lengths[:n] = after
        self._clean(max(after))
        self._chunks = [(slot, starts[slot], ends[slot]) for slot in range(n) if new[slot] > 1]
        if self._chunks:
            pairs = [(slot, before[slot] + i) for slot in range(n) for i in range(new[slot])]
            self._rows, self._columns = torch.tensor(pairs, device=self.device).unbind(1)  # (N,) each
            self._next[:n] = torch.tensor(after, device=self.device)
            self._last = torch.tensor(ends, device=self.device) - 1
        else:
            self._rows, self._columns, self._last = self._slots[:n], self._next[:n].clone(), self._slots[:n]
            self._next[:n].add_(1)
        self._visible = self._ragged_mask(after)
        return self._last

    def _clean(self, length: int) -> None:
        """Zero the columns that no slot has reached before, a block at a time.

        Attention reads all slots up to the longest, and masks what lies beyond the end of a shorter one: there a value counts 0
        times, and 0 times what fresh memory may hold, or an earlier request whose numbers overflowed, can be NaN.
        """
        while self._finite < length:
            for memory in (self.keys, self.values):
                memory[:, :, :, self._finite : self._finite + BLOCK].zero_()
            self._finite += BLOCK

    def _ragged_mask(self, lengths: Sequence[int]) -> Tensor | None:
        """(n, 1, 1, S), True where the last token of each slot sees a key; None where all see all."""
        n, S, window = len(lengths), max(lengths), self.config.sliding_window
        if min(lengths) == S and (window is None or S <= window):
            return None
        keys, length = torch.arange(S, device=self.device), self._next[:n, None]
        visible = keys < length
        if window is not None:
            visible &= keys >= length - window
        return visible[:, None, None]

    def positions(self, n_tokens: int) -> Tensor:
        return self._columns[None]  # (1, N)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = len(self._last)
        S = max(self.lengths[:n])
        keys, values = self.keys[layer, :n, :, :S], self.values[layer, :n, :, :S]  # (n, Hkv, S, D), views
        keys[self._rows, :, self._columns] = k[0].transpose(0, 1)  # (1, Hkv, N, D) -> (N, Hkv, D)
        values[self._rows, :, self._columns] = v[0].transpose(0, 1)
        # The last token of each request sees all of its slot: one query a request, whether its prompt came whole or long ago.
        # (Of a chunk, which brings several, this is computed twice: as a part of the chunk it is used.)
        last = q[:, :, self._last] if self._chunks else q  # (1, Hq, n, D)
        out = decode_attention(last.transpose(0, 2), keys, values, self._visible)
        if not self._chunks:
            return out.transpose(0, 2)  # (n, Hq, 1, D) -> (1, Hq, n, D)
        parts = list(out.split(1))  # (1, Hq, 1, D) each; a chunk puts all its queries in place of the last one
        for slot, start, end in self._chunks:
            seen = slice(0, self.lengths[slot])
            k, v = keys[slot : slot + 1, :, seen], values[slot : slot + 1, :, seen]  # (1, Hkv, S, D)
            parts[slot] = causal_attention(q[:, :, start:end], k, v, self.config.sliding_window)
        # Joined with the tokens first, as the model is about to merge the heads of each.
        return torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)  # (1, Hq, N, D)
