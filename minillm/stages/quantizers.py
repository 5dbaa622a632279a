"""Chapter 5, the arithmetic: numbers into codes of few bits and back, and how far that can put them from where they were.

A row, or a group of neighbours in a row, shares a *scale* s: the distance between two neighbouring codes. Rounding to the
nearest code moves a number by at most half of it,

    |x - dequantize(quantize(x))| <= s/2

which holds here for every number, because scales and zeros are rounded to their 16 bits *first* and the codes are computed
from what is stored. (Codes from unrounded scales, as public code has them, break the law wherever a group lies far from 0.)
What float32 adds in computing the codes is below s / 65536. A scale below the smallest normal number is that number.

    int8   symmetric   s = max|x| / 127              x ~ s q             q from -127 to 127, a scale for each row
    int4   asymmetric  s = (max - min) / 15          x ~ s (q - 8) + z   q from 0 to 15, scale and zero z for each group
    fp8    e4m3        s = max|x| / 448              x ~ s q             q a float of 3 mantissa bits: error up to |x|/16

"Absmax" and "zero-point" in LLM.int8() (Dettmers et al., arXiv 2208.07339). z is the value of code 8, not an integer.
"""

import torch
from torch import Tensor

TINY = torch.finfo(torch.bfloat16).tiny  # the smallest normal number, the same in float32
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448


def absmax_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 (..., K) and scales bf16 (..., 1) of x (..., K). Rows may be output channels, tokens or heads."""
    scales = (x.abs().amax(-1, keepdim=True).float() / 127).clamp_min(TINY).bfloat16()
    # A scale that was rounded down, by 1 part in 257 at most, leaves max|x| / s below 127.5, which rounds to 127.
    return (x / scales.float()).round().to(torch.int8), scales


def dequantize_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """s q in float32, which is exact: 7 bits times 8."""
    return codes * scales.float()


def group_int4(w: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 (N, K) from 0 to 15, scales and zeros bf16 (N, K/group_size), of w (N, K), group_size a divisor of K."""
    groups = w.float().unflatten(-1, (-1, group_size))  # (N, K) -> (N, K/g, g)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    zeros = torch.lerp(low, high, 8 / 15).bfloat16()
    # From the rounded zero, 8 steps down must reach the smallest weight and 7 up the largest. A scale that was rounded down, by
    # 1 part in 257 at most, leaves them within 8.04 steps down and 7.03 up, which round to 8 and 7.
    scales = torch.maximum((zeros - low) / 8, (high - zeros) / 7).clamp_min(TINY).bfloat16()
    codes = ((groups - zeros.float()) / scales.float()).round() + 8
    return codes.to(torch.uint8).flatten(-2), scales.squeeze(-1), zeros.squeeze(-1)


def dequantize_int4(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """s (q - 8) + z in float32, (N, K)."""
    groups = codes.unflatten(-1, (scales.shape[-1], -1)).float() - 8  # (N, K) -> (N, K/g, g)
    return (groups * scales.float()[..., None] + zeros.float()[..., None]).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes of 4 bits in each byte, the even column in its upper half: (N, K) -> (N, K/2) uint8."""
    return codes[..., ::2] << 4 | codes[..., 1::2]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The codes again: (N, K/2) -> (N, K) uint8."""
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)


def absmax_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn (..., K) and scales float32 (..., 1) of x (..., K)."""
    scales = (x.abs().amax(-1, keepdim=True).float() / FP8_MAX).clamp_min(TINY)
    return (x / scales).to(FP8), scales


def dequantize_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """s q in float32."""
    return codes.float() * scales
