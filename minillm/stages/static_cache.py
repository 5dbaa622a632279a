"""Chapter 8, the cache: keys and values where each decode step finds the same tensors, in the same shapes, at the same places.

A step that is captured or compiled is the same program at every token. What changes from token to token may only be *numbers in
tensors*: so the position is a tensor on the device, new keys go where it points (`index_copy_`), and a mask hides what is not
there yet. What is a number of the host, such as how many columns attention reads, is part of the program. So it grows by
buckets, 128, 256, 512 and so on, and there is one program for each bucket, not one for each length. The price: attention reads
hidden columns too, in the worst case as many as filled ones.

Each layer has tensors of its own. One tensor for all layers, written through views, is the form that a compiler turns into a
copy of the whole cache at each step.

Invariants: the token at position i lies in column i; all numbers in the cache are finite, so a hidden column counts nothing.
"""

import torch
from torch import Tensor

from minillm.errors import MinillmError
from minillm.model import Transformer
from minillm.stages.gqa import decode_attention
from minillm.stages.naive import causal_attention
from minillm.stages.triton_kernels import split_attention, triton_is_here

SMALLEST_BUCKET = 128


def bucket(n: int) -> int:
    """Columns that attention reads when n are filled: the next power of two, 128 at least."""
    return max(SMALLEST_BUCKET, 1 << (n - 1).bit_length())


class StaticKVCache:
    """Keys and values of up to `capacity` tokens of each of B sequences in lockstep, one for each KV head.

    The prompt may come whole or in chunks of any size. Raises `MinillmError` when it is asked to hold more than `capacity`,
    before anything is written: what is stored stays good.
    """

    def __init__(self, model: Transformer, capacity: int, batch: int = 1) -> None:
        config = model.config
        self.device = model.device
        self.capacity = capacity
        self.batch = batch
        self.window = config.sliding_window
        self.length = 0  # S: tokens in the cache
        columns = bucket(capacity)
        shape = (batch, config.n_kv_heads, columns, config.head_dim)
        self.layers = [LayerCache(self, shape, model.dtype) for _ in range(config.n_layers)]
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)  # of the token that is decoded
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=self.device)  # tokens each sequence sees
        self.has_kernel = self.device.type == "cuda" and triton_is_here()
        self._column = torch.arange(columns, device=self.device)
        self._seen = torch.zeros(columns, dtype=torch.bool, device=self.device)
        self.visible = self._seen.view(1, 1, 1, -1)  # (1, 1, 1, bucket): the columns that the token sees, of those read

    def positions(self, n_tokens: int) -> Tensor:
        start = self.length
        if start + n_tokens > self.capacity:
            raise MinillmError(
                f"The KV cache is full: it holds {start} of {self.capacity} tokens and was asked for {n_tokens} more."
            )
        self.length = start + n_tokens
        if n_tokens > 1:
            return self._column[None, start : self.length]  # (1, T), the same for every sequence
        # Not `position + 1`: the host knows the number, and a step that is repeated must not count twice.
        self.position.fill_(start)
        self.lengths.fill_(self.length)
        S = bucket(self.length)
        torch.le(self._column[:S], start, out=self._seen[:S])
        if self.window is not None:
            self._seen[: max(0, self.length - self.window)] = False  # a window counts the new token itself
        self.visible = self._seen[:S].view(1, 1, 1, S)
        return self.position[None]  # (1, 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layers[layer].attend(layer, q, k, v)

    def forget(self) -> None:
        """Empty the cache, for another text. What it holds is cleared: it may be NaN, and hidden columns are read too."""
        for layer in self.layers:
            layer.keys[:, :, : self.length] = layer.values[:, :, : self.length] = 0
        self.length = 0


class LayerCache:
    """The part of one layer, which is a cache of a model with one layer: the number of the layer does not matter to it."""

    def __init__(self, whole: StaticKVCache, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.whole = whole
        # Zeros, since attention reads hidden columns too: 0 times what fresh memory holds can be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=whole.device)  # (B, Hkv, columns, D)
        self.values = torch.zeros_like(self.keys)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole, keys, values = self.whole, self.keys, self.values
        if q.shape[2] > 1:  # a prompt, or a chunk of one, is never captured: what it needs is as long as it is
            new = slice(whole.length - q.shape[2], whole.length)
            keys[:, :, new], values[:, :, new] = k, v
            return causal_attention(q, keys[:, :, : whole.length], values[:, :, : whole.length], whole.window)
        keys.index_copy_(2, whole.position, k)
        values.index_copy_(2, whole.position, v)
        S = whole.visible.shape[-1]
        keys, values = keys[:, :, :S], values[:, :, :S]
        if whole.has_kernel:
            return split_attention(q, keys, values, whole.lengths, whole.window)
        return decode_attention(q, keys, values, whole.visible)
