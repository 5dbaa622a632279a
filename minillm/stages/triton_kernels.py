"""Chapter 8. Kernels of our own, in Triton: what PyTorch has no operator for.

    split_attention(q, k, v, lengths)        decode attention on splits of the cached tokens     triton_attention.py
    int8_linear(x, codes, scales)            linear layers that read codes, not weights          triton_linear.py
    int4_linear(x, packed, scales, zeros)
    with_triton_kernels(model)               a quantized model whose layers use the last two

This file imports without Triton. Each kernel is a custom operator of PyTorch: a dispatch mode sees one operator with a cost of
its own, `torch.compile` and CUDA graphs take it as it is, and on the `meta` device it has a shape and no work. It runs on CUDA.
On the CPU it runs in Triton's interpreter, thousands of times slower and for tests only, when TRITON_INTERPRET=1 is set before
this package is used.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from minillm.errors import MinillmError
from minillm.model import Transformer
from minillm.roofline.formulas import Formula, formula, touched, whole
from minillm.stages.quantization import with_layers
from minillm.stages.quantized_linear import (
    FastInt4Linear,
    FastInt8Linear,
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    quantized_product,
)
from minillm.stages.quantizers import pack_nibbles

MOST_ROWS = 16  # of activations: with more, the product binds and not the weight
SPLIT = 64  # columns: a split is this many, or a multiple
PROGRAMS = 512  # that fill a large GPU: a few for each of its hundred and more multiprocessors
MOST_SPLITS = 128  # the second kernel of attention holds all splits of a query head in registers


def triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


def check_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Raises `MinillmError` where the kernels do not run: without Triton, and on the CPU outside of its interpreter."""
    if device.type == "meta":
        return
    if not triton_is_here():
        raise MinillmError("The Triton kernels need the package triton, which is not installed: pip install triton.")
    if device.type == "cuda":
        return
    from minillm.stages.triton_linear import INTERPRETED

    if device.type != "cpu" or not INTERPRETED:
        raise MinillmError(
            f"The Triton kernels run on CUDA and not on {device.type}: use a plain layer or stage there, or set "
            "TRITON_INTERPRET=1 before Python starts to try them slowly on the CPU."
        )
    if dtype is torch.bfloat16:  # it multiplies the bit patterns as if they were whole numbers
        raise MinillmError("Triton's interpreter multiplies no bf16: use fp32 or fp16 to try a kernel on the CPU.")


# --- The operators ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("minillm::split_attention", mutates_args=())
def split_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None = None) -> Tensor:
    """Attention of one new token for each sequence over the first columns of its keys and values.

    q is (B, Hq, 1, D), k and v are (B, Hkv, S, D) in any layout whose last dimension has stride 1; query head h reads KV head
    h // G. Row b sees the columns below lengths[b], and of those the last `window`; `lengths` (B,) int64 or int32 is read
    on the device, by the kernel. Columns that are not seen may hold anything. Returns (B, Hq, 1, D); a row that sees no
    column gets 0. Raises `MinillmError` where the kernel does not run.
    """
    check_kernels(q.device, q.dtype)
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        raise MinillmError("split_attention wants queries, keys and values whose last dimension has stride 1.")
    from minillm.stages import triton_attention

    with torch.cuda.device_of(q):  # Triton launches on the current device
        return triton_attention.run(q, k, v, lengths, window, split_size(len(k), k.shape[1], k.shape[2]))


@torch.library.custom_op("minillm::int8_linear", mutates_args=())
def int8_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x W^T (M, N) in the dtype of x (M, K), W being codes (N, K) int8 times scales (N, 1); M up to 16.

    Raises `MinillmError` for more rows, and where the kernel does not run.
    """
    _check_product(x)
    from minillm.stages import triton_linear

    with torch.cuda.device_of(x):
        return triton_linear.run_int8(x.contiguous(), codes.contiguous(), scales.contiguous())


@torch.library.custom_op("minillm::int4_linear", mutates_args=())
def int4_linear(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """x W^T (M, N) in the dtype of x (M, K), W being packed (N, K/2) uint8 with scales and zeros (N, K/g); M up to 16.

    Packed as `pack_nibbles` does it, and W as `dequantize_int4` has it; g is a power of two from 32 on. Raises `MinillmError`
    for more rows, and where the kernel does not run.
    """
    _check_product(x)
    from minillm.stages import triton_linear

    with torch.cuda.device_of(x):
        given = (x, packed, scales, zeros)
        return triton_linear.run_int4(*(tensor.contiguous() for tensor in given))


def _check_product(x: Tensor) -> None:
    check_kernels(x.device, x.dtype)
    if len(x) > MOST_ROWS:
        raise MinillmError(f"The kernels of linear layers take up to {MOST_ROWS} rows and were given {len(x)}.")


def split_size(B: int, Hkv: int, S: int) -> int:
    """Columns of a split: so many that sequences, KV heads and splits together make about `PROGRAMS` programs.

    From shapes alone: a captured graph has as many programs at each replay, and nobody waits for the lengths to be known.
    """
    blocks = -(-S // SPLIT)
    wanted = min(blocks, MOST_SPLITS, -(-PROGRAMS // (B * Hkv)))
    return SPLIT * -(-blocks // wanted)


# --- What they return, and what they cost -----------------------------------------------------------------------------


@split_attention.register_fake
def _like_queries(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


@int8_linear.register_fake
@int4_linear.register_fake
def _like_rows(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(len(x), len(weight))


ops = torch.ops.minillm
formula(ops.int8_linear.default, ops.int4_linear.default)(quantized_product)


@formula(ops.split_attention.default)
def _split_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None = None
) -> Formula:
    """As attention over all S columns, or the window's: which of them a row sees, only the device knows. And the splits'
    partial results, D + 2 numbers in float32 for each query head, which are written and read again."""
    B, Hq, _, D = q.shape
    Hkv, S = k.shape[1], k.shape[2]
    partial = 4 * B * Hq * -(-S // split_size(B, Hkv, S)) * (D + 2)
    seen = S if window is None else min(S, window)
    reads = [(x, touched(x[:, :, :seen])) for x in (k, v)]
    return Formula(4 * B * Hq * seen * D, [*whole(q, lengths), *reads, (q, partial)], touched(out) + partial)


# --- The layers -------------------------------------------------------------------------------------------------------


class TritonInt8Linear(Int8Linear):
    """Weight-only int8 by `int8_linear`, of a layer that is quantized already."""

    def __init__(self, layer: Int8Linear) -> None:
        QuantizedLinear.__init__(self, layer)
        self.register_buffer("codes", layer.codes)
        self.register_buffer("scales", layer.scales)

    def forward(self, x: Tensor) -> Tensor:
        rows = self._rows(x)
        if len(rows) > MOST_ROWS:
            return super().forward(x)  # the weight is dequantized once, for all of them
        return self._finish(int8_linear(rows, self.codes, self.scales), x)


class TritonInt4Linear(Int4Linear):
    """Weight-only int4 by `int4_linear`, of a layer that is quantized already."""

    def __init__(self, layer: Int4Linear | FastInt4Linear) -> None:
        QuantizedLinear.__init__(self, layer)
        if isinstance(layer, Int4Linear):
            packed, scales, zeros = layer.packed, layer.scales, layer.zeros
        else:
            codes, scales, zeros = layer.unpack()
            packed = pack_nibbles(codes)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)

    def forward(self, x: Tensor) -> Tensor:
        rows = self._rows(x)
        if len(rows) > MOST_ROWS:
            return super().forward(x)
        return self._finish(int4_linear(rows, self.packed, self.scales, self.zeros), x)


# Exactly these: w8a8 has codes of int8 too, and quantizes the activations besides.
_LAYERS: dict[type[QuantizedLinear], Any] = {
    Int8Linear: TritonInt8Linear,
    FastInt8Linear: TritonInt8Linear,
    Int4Linear: TritonInt4Linear,
    FastInt4Linear: TritonInt4Linear,
}


def with_triton_kernels(model: Transformer) -> Transformer:
    """A copy of a model quantized to int8 or int4 whose layers use the kernels: same codes, in fp16 too.

    A model without such layers is returned as it is. Raises `MinillmError` where the kernels do not run.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear) and type(layer) in _LAYERS]
    if not layers:
        return model
    check_kernels(model.device, model.dtype)
    return with_layers(model, {layer: _LAYERS[type(layer)](layer) for layer in layers})
