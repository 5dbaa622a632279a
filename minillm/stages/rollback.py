"""Chapter 6, the cache: it can take tokens back, as a drafter and its target must while they guess.

Speculation writes keys and values of tokens that may be refused a moment later. Nothing needs to be erased: a sequence is
shortened by forgetting how long it was, and the next tokens overwrite what stands behind its end. With several sequences each
is shortened by a number of its own, so each has a length of its own, and a pass brings a rectangle of T tokens for every one.

Where a sequence has fewer than T new tokens, it repeats its last one *at the same place*: the same key and value are written
there again, and the last column of the rectangle is every sequence's last token. So no pad has a position, a key or a logit.

Invariants: the token at index i of a sequence is cached in column i, at position i; a cache that is rolled back to length n is
the cache that never saw more than n tokens. Every column is kept, also where a model attends through a sliding window: a cache
that drops old tokens could not take new ones back.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.errors import MinillmError
from minillm.model import Transformer
from minillm.stages.gqa import decode_attention
from minillm.stages.naive import causal_attention


class RollbackCache:
    """Keys and values of B sequences with lengths of their own, filled from the left, of up to `capacity` tokens each."""

    def __init__(self, model: Transformer, capacity: int, batch: int = 1) -> None:
        config = model.config
        self.config = config
        self.device = model.device
        self.capacity = capacity
        self.lengths = [0] * batch  # S of each sequence
        shape = (config.n_layers, batch, config.n_kv_heads, capacity, config.head_dim)
        # Zeros, since attention reads the columns behind a short sequence too: 0 times what fresh memory holds can be NaN.
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        self._rows = torch.arange(batch, device=model.device)[:, None]  # (B, 1)

    def roll_back(self, lengths: Sequence[int]) -> None:
        """Forget what each sequence holds beyond its number of `lengths`; one that holds less stays as it is."""
        self.lengths = [min(held, length) for held, length in zip(self.lengths, lengths, strict=True)]

    def extend(self, new: Sequence[int]) -> None:
        """Announce a pass that brings `new[b]` tokens of sequence b, in a rectangle as wide as the largest number.

        One that brings none repeats its last token, so it must hold one. Raises `MinillmError` for more than the capacity.
        """
        starts, ends = self.lengths, [length + n for length, n in zip(self.lengths, new, strict=True)]
        if max(ends) > self.capacity:
            raise MinillmError(f"The cache holds {self.capacity} tokens a sequence and was asked to hold {max(ends)}.")
        T = max(1, max(new))
        columns = [[min(start + j, end - 1) for j in range(T)] for start, end in zip(starts, ends, strict=True)]
        self.lengths = ends
        self._columns = send(columns, self.device)  # (B, T): where each token goes, and its position
        # A prompt that comes whole, or one token of each of equal length: no mask of our own is needed.
        window, S = self.config.sliding_window, max(ends)
        alike = len(set(ends)) == 1 and len(set(new)) == 1
        self._plain = alike and (T == S or (T == 1 and (window is None or S <= window)))
        if not self._plain:
            self._mask = self._causal_mask(S)

    def _causal_mask(self, S: int) -> Tensor:
        """(B, 1, G*T, S): 0 where a token sees a key, -inf where not; the same for all layers, so made once a pass."""
        keys, columns = torch.arange(S, device=self.device), self._columns[:, :, None]
        hidden = keys > columns  # (B, T, S)
        if self.config.sliding_window is not None:
            hidden |= keys <= columns - self.config.sliding_window
        hidden = hidden[:, None].repeat(1, 1, self.config.group_size, 1)
        return torch.zeros(hidden.shape, dtype=self.keys.dtype, device=self.device).masked_fill_(hidden, -torch.inf)

    def feed(self, contexts: Sequence[list[int]], drafts: Tensor | None = None, counts: Sequence[int] = ()) -> Tensor:
        """Roll back to what the contexts confirm, and announce all tokens that follow: those are returned, (B, T).

        What is cached of a context stays, its last token excepted: what follows that one is asked now. Behind it come the first
        `counts[b]` of the drafted tokens (B, k); then no more than that last token may be missing.
        """
        self.roll_back([len(context) - 1 for context in contexts])
        fed = [context[length:] for context, length in zip(contexts, self.lengths, strict=True)]
        T = max(map(len, fed))
        tokens = send([[*part, *part[-1:] * (T - len(part))] for part in fed], self.device)  # (B, T)
        if drafts is None:
            self.extend([len(part) for part in fed])
            return tokens
        self.extend([len(part) + count for part, count in zip(fed, counts, strict=True)])
        places = self._columns - self._columns[:, :1]  # a repeated token stands where it stood first
        return torch.cat([tokens, drafts], dim=1).gather(1, places)

    def positions(self, n_tokens: int) -> Tensor:
        return self._columns  # (B, T)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, Hq, T, D = q.shape
        keys, values = self.keys[layer], self.values[layer]  # (B, Hkv, capacity, D)
        if k.dtype == torch.float16 and not self._plain:
            # A guess can overflow in fp16 and be refused; where a mask hides it, 0 times infinity would still be NaN.
            k, v = k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)
        keys[self._rows, :, self._columns] = k.transpose(1, 2)  # (B, Hkv, T, D) -> (B, T, Hkv, D)
        values[self._rows, :, self._columns] = v.transpose(1, 2)
        S = max(self.lengths)
        keys, values = keys[:, :, :S], values[:, :, :S]
        if self._plain and T == 1:
            return decode_attention(q, keys, values)
        if self._plain:
            return causal_attention(q, keys, values, self.config.sliding_window)
        # As in decode, a key is loaded once for the G query heads that share it, here for T tokens of each.
        rows = q.reshape(B, -1, self.config.group_size * T, D)  # (B, Hq, T, D) -> (B, Hkv, G*T, D)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=self._mask)
        return out.reshape(B, Hq, T, D)


def send(values: Any, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on the device, sent without waiting for what a GPU is still to do."""
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)
