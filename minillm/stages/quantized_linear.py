"""Chapter 5, the layers: linear layers with quantized weights, each in a readable form and in a fast one.

The readable form dequantizes the whole weight and multiplies, as eager PyTorch must: it defines the values, and is slower
than not quantizing at all, since it reads the codes, writes a full weight and reads that again. The fast form calls the
platform's own kernel, which turns codes into numbers in registers: only codes, scales and zeros come from memory. The kernels
multiply in bf16 and add up in float32, so a float32 model's activations are rounded to bf16 on their way in and out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.errors import MinillmError
from minillm.roofline.formulas import Formula, formula, touched, whole
from minillm.stages.quantizers import (
    absmax_fp8,
    absmax_int8,
    dequantize_fp8,
    dequantize_int4,
    dequantize_int8,
    group_int4,
    pack_nibbles,
    unpack_nibbles,
)

aten = torch.ops.aten


def over_the_same_memory(parameter: Tensor) -> nn.Parameter:
    """A parameter for another model: moving or casting a model changes its parameters in place, and those of no other."""
    return nn.Parameter(parameter.detach(), parameter.requires_grad)


class QuantizedLinear(nn.Module):
    """x W^T + b with a weight (N, K) that is stored in codes. Subclasses say how."""

    in_features: int  # K
    out_features: int  # N
    bias: Tensor | None

    def __init__(self, linear: "nn.Linear | QuantizedLinear") -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else over_the_same_memory(linear.bias)

    def dequantize(self) -> Tensor:
        """The weight (N, K) that the codes stand for, in float32."""
        raise NotImplementedError

    def as_seen(self, x: Tensor) -> Tensor:
        """The activations as the product sees them: rounded too, where a scheme does that."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.as_seen(x).to(x.dtype), self.dequantize().to(x.dtype), self.bias)

    def _rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.in_features).contiguous()  # (..., K) -> (M, K)

    def _finish(self, out: Tensor, x: Tensor) -> Tensor:
        """(M, N), perhaps with more columns, into the shape and the dtype that `x` asks for; adds the bias."""
        out = out[:, : self.out_features].reshape(*x.shape[:-1], -1).to(x.dtype)
        return out if self.bias is None else out + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedLinear":
        raise MinillmError("A quantized model stays where and as it is: load it anew there, and quantize that.")


class Int8Linear(QuantizedLinear):
    """Weight-only int8: a scale for each output channel."""

    codes: Tensor  # (N, K) int8
    scales: Tensor  # (N, 1) bf16

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        codes, scales = absmax_int8(linear.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def dequantize(self) -> Tensor:
        return dequantize_int8(self.codes, self.scales)


class FastInt8Linear(Int8Linear):
    """Weight-only int8 by `_weight_int8pack_mm`, for K divisible by 16: with others its bf16 kernel on the CPU reads beyond the
    row, and crashes or is silently wrong.

    The kernel unpacks the weight anew for every few rows, so with more than `MANY_ROWS` it pays to unpack it once: a piece at
    a time, since memory for the whole of a large head would be fetched from the system, and cleared by it, at each pass.
    """

    MANY_ROWS = 16
    PIECE = 4096  # rows of the weight

    def forward(self, x: Tensor) -> Tensor:
        rows = self._rows(x).bfloat16()
        if len(rows) > self.MANY_ROWS:  # codes are exact in bf16: the scales can come after the product
            products = [F.linear(rows, piece.bfloat16()) for piece in self.codes.split(self.PIECE)]
            return self._finish(torch.cat(products, dim=1) * self.scales.T, x)
        return self._finish(aten._weight_int8pack_mm(rows, self.codes, self.scales.squeeze(1)), x)


class Int4Linear(QuantizedLinear):
    """Weight-only int4: two codes a byte, a scale and a zero for each group of neighbours in a row."""

    packed: Tensor  # (N, K/2) uint8
    scales: Tensor  # (N, K/g) bf16
    zeros: Tensor  # (N, K/g) bf16

    def __init__(self, linear: nn.Linear, group_size: int) -> None:
        super().__init__(linear)
        codes, scales, zeros = group_int4(linear.weight, group_size)
        self.register_buffer("packed", pack_nibbles(codes))
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)

    def dequantize(self) -> Tensor:
        return dequantize_int4(unpack_nibbles(self.packed), self.scales, self.zeros)


class FastInt4Linear(QuantizedLinear):
    """Weight-only int4 by the int4-pack kernels of the CPU and of CUDA, in the order of bytes that each wants.

    They take N divisible by 16: a weight of other N gets rows of zeros, which are cut off the product.
    """

    packed: Tensor  # the kernel's own layout of N K/2 bytes
    scales_zeros: Tensor  # (K/g, N, 2) bf16

    def __init__(self, linear: nn.Linear, group_size: int) -> None:
        super().__init__(linear)
        self.group_size = group_size
        codes, scales, zeros = group_int4(F.pad(linear.weight, (0, 0, 0, -linear.out_features % 16)), group_size)
        if codes.is_cuda:
            packed = aten._convert_weight_to_int4pack(pack_nibbles(codes), 2)
        else:
            packed = aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        self.register_buffer("packed", packed)
        self.register_buffer("scales_zeros", torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous())

    def _multiply(self, rows: Tensor, scales_zeros: Tensor) -> Tensor:
        multiply = aten._weight_int4pack_mm if rows.is_cuda else aten._weight_int4pack_mm_for_cpu
        return multiply(rows, self.packed, self.group_size, scales_zeros)

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes uint8 (N, K), scales and zeros bf16 (N, K/g), as `group_int4` made them."""
        # The kernel alone knows its layout. A product with the identity gives the weight, with scale 1 and zero 8 the codes.
        identity = torch.eye(self.in_features, dtype=torch.bfloat16, device=self.packed.device)
        plain = torch.ones_like(self.scales_zeros)
        plain[..., 1] = 8
        codes = self._multiply(identity, plain).T.to(torch.uint8)  # (K, N) -> (N, K), whole numbers: exact
        scales, zeros = self.scales_zeros.transpose(0, 1).unbind(-1)
        N = self.out_features
        return codes[:N], scales[:N], zeros[:N]

    def dequantize(self) -> Tensor:
        return dequantize_int4(*self.unpack())

    def forward(self, x: Tensor) -> Tensor:
        return self._finish(self._multiply(self._rows(x).bfloat16(), self.scales_zeros), x)


class W8A8Linear(Int8Linear):
    """int8 weights and int8 activations, with a scale for each token that is found at run time."""

    def as_seen(self, x: Tensor) -> Tensor:
        return dequantize_int8(*absmax_int8(x))


class FastW8A8Linear(W8A8Linear):
    """The product itself is one of whole numbers, exact in int32 (`_int_mm`); both scales come after it."""

    def forward(self, x: Tensor) -> Tensor:
        codes, scales = absmax_int8(self._rows(x))  # (M, K), (M, 1)
        M = len(codes)
        if codes.is_cuda and M <= 16:
            codes = F.pad(codes, (0, 0, 0, 17 - M))  # CUDA's product takes no fewer than 17 rows
        whole_numbers = torch._int_mm(codes, self.codes.T)[:M]
        return self._finish(whole_numbers * scales.float() * self.scales.T.float(), x)


class FP8Linear(QuantizedLinear):
    """fp8 weights and activations (e4m3), a scale for each output channel and, found at run time, for each token."""

    codes: Tensor  # (N, K) float8_e4m3fn
    scales: Tensor  # (N, 1) float32

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        codes, scales = absmax_fp8(linear.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def dequantize(self) -> Tensor:
        return dequantize_fp8(self.codes, self.scales)

    def as_seen(self, x: Tensor) -> Tensor:
        return dequantize_fp8(*absmax_fp8(x))


class FastFP8Linear(FP8Linear):
    """The product in fp8 itself (`_scaled_mm`), on GPUs of compute capability 8.9 and up, for N and K divisible by 16."""

    def forward(self, x: Tensor) -> Tensor:
        codes, scales = absmax_fp8(self._rows(x))
        out = torch._scaled_mm(codes, self.codes.T, scales, self.scales.T, out_dtype=torch.bfloat16)
        return self._finish(out, x)


# --- What the kernels cost --------------------------------------------------------------------------------------------


@formula(
    aten._weight_int8pack_mm.default, aten._weight_int4pack_mm.default, aten._weight_int4pack_mm_for_cpu.default,
    aten._int_mm.default, aten._scaled_mm.default,
)  # fmt: skip
def quantized_product(out: Tensor, x: Tensor, weight: Tensor, *others: Any, **_: Any) -> Formula:
    """2 M N K FLOPs, and codes, scales, zeros and activations read once each."""
    scales = [other for other in others if isinstance(other, Tensor)]
    return Formula(2 * out.numel() * x.shape[1], whole(x, weight, *scales), touched(out))
