"""Chapter 5, the cache: keys and values in int8, with one scale for each token and head.

    bytes of a token = 2 L Hkv (D + 2)      codes and a 16-bit scale each; 2 L Hkv 2 D in bf16

Half the memory of a bf16 cache, a quarter of a float32 one: room for as many more tokens or sequences. What it does not give
here is time. PyTorch has no attention kernel that reads codes, so attention gets a copy in full precision, made anew at each
step: the step moves *more* bytes than before. Engines with a kernel for it move fewer.

Which numbers share a scale matters more, the fewer the bits. KIVI (Liu et al., arXiv 2402.02750) finds that keys have a few
channels that are large in every token, so that a scale for each *channel* suits them, and that values want one for each
*token*, so that an error stays with its token. `RoundedKVCache` repeats that experiment.
"""

import torch
from torch import Tensor

from minillm.errors import UsageError
from minillm.model import Transformer
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.quantizers import absmax_int8, dequantize_int8

AXES = {"token": -1, "channel": -2}  # of (B, Hkv, S, D): the numbers along it share a scale


class QuantizedKVCache(GroupedKVCache):
    """A `GroupedKVCache` in a quarter to a half of its memory. What a token's key and value lose is fixed when it comes."""

    def __init__(self, model: Transformer, capacity: int, batch: int = 1) -> None:
        super().__init__(model, 0, batch)  # which allocates nothing
        self.capacity = capacity
        self.dtype = model.dtype
        config = model.config
        shape = (2, config.n_layers, batch, config.n_kv_heads, capacity)  # keys and values
        self.codes = torch.empty(*shape, config.head_dim, dtype=torch.int8, device=model.device)
        self.scales = torch.empty(*shape, 1, dtype=torch.bfloat16, device=model.device)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the cache takes."""
        return self.codes.nbytes + self.scales.nbytes

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep codes of k and v (B, Hkv, T, D); returns all S keys and values so far, (B, Hkv, S, D), dequantized."""
        new = slice(self.length - k.shape[2], self.length)
        seen = []
        for part, x in enumerate((k, v)):
            codes, scales = self.codes[part, layer], self.scales[part, layer]  # (B, Hkv, capacity, D or 1)
            codes[:, :, new], scales[:, :, new] = absmax_int8(x)
            seen.append(dequantize_int8(codes[:, :, : self.length], scales[:, :, : self.length]).to(self.dtype))
        return seen[0], seen[1]


def round_along(x: Tensor, bits: int, axis: str) -> Tensor:
    """x (..., S, D) rounded to 2^bits evenly spaced values, between the least and the largest along "token" or "channel".

    "token" has the D numbers of a token share a scale, "channel" the S numbers of a channel.
    """
    low, high = x.float().aminmax(dim=AXES[axis], keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    return (((x - low) / step).round() * step + low).to(x.dtype)


def relative_error(x: Tensor, bits: int, axis: str) -> float:
    """|x - rounded| / |x|, the norms over all elements."""
    return float((x - round_along(x, bits, axis)).norm() / x.norm())


class RoundedKVCache(GroupedKVCache):
    """KIVI's experiment: attention sees keys or values, or both, rounded to `bits`, with scales along an axis of AXES or None.

    It stores full precision and rounds what is there at each pass, so feed it a text in one pass. Raises `UsageError` for an
    unknown axis or fewer bits than 1.
    """

    def __init__(
        self, model: Transformer, capacity: int, *, bits: int, keys: str | None = None, values: str | None = None
    ) -> None:
        super().__init__(model, capacity)
        for axis in (keys, values):
            if axis is not None and axis not in AXES:
                raise UsageError(f"Unknown axis {axis!r}: choose one of {', '.join(AXES)}.")
        if bits < 1:
            raise UsageError(f"bits is {bits}; it must be at least 1.")
        self.bits, self.axes = bits, (keys, values)

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        stored = super().store(layer, k, v)
        k, v = (
            x if axis is None else round_along(x, self.bits, axis) for x, axis in zip(stored, self.axes, strict=True)
        )
        return k, v
