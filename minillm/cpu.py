"""Which library multiplies matrices on the CPU, and in which order of bytes it finds the weights.

PyTorch carries two: MKL, which it always takes for float32, and oneDNN, which it takes for 16 bits. MKL is Intel's, and at home
on Intel's processors; on a 2-core AMD EPYC its products take twice as long as oneDNN's. So on processors that are not Intel's,
load exchanges the linear layers, from outside: same weights, same products, another order of summation.

oneDNN wants a weight in blocks that fill its registers. Of one in rows, a product of one row is computed by a kernel for older
processors in float32, and in bf16 by turning the whole weight into blocks first, at each call. So while there is room, the
layers keep a second copy that is *packed* once. On two threads of that machine a product of 16 rows then takes 0.75 (float32)
and 0.81 (bf16) of the time, one of 1 row 0.97 and 0.85, and a large one 0.93 to 0.95 (`benchmarks/linear.py`, and its result).
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minillm.limits import free_memory
from minillm.model import Transformer

# Rows of the product that the blocks are made for: 16 or 512 give the same blocks, and 1 gives worse ones.
PACKED_ROWS = 64
RESERVE = 4 * 2**30  # bytes of memory that packed copies leave free for caches, activations and other programs


class OneDNNLinear(nn.Linear):
    """x W^T + b by oneDNN while the weights are float32 or bf16 on the CPU, and the plain layer after a move to elsewhere.

    Shares the parameters of the layer that it stands for. Where it can, it makes a packed copy of its weight at its first
    product, which serves as long as the weight is what it was packed from: a weight that is exchanged or changed in place is
    read itself. A model that is loaded only to be quantized is never packed.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._choose()

    def _choose(self) -> None:
        # The overload is looked up here, once, and not at each of a step's hundred calls.
        self._onednn = torch.ops.mkldnn._linear_pointwise.default if _onednn_takes(self.weight) else None
        self._packed: tuple[Tensor | None, Tensor, int] | None = None  # the copy, of which weight, at which version

    def _apply(self, fn: Any, recurse: bool = True) -> "OneDNNLinear":
        super()._apply(fn, recurse)
        self._choose()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A packed tensor can be neither copied nor pickled: the copy of a layer packs its own.
        return self.__dict__ | {"_onednn": None, "_packed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._choose()

    def forward(self, x: Tensor) -> Tensor:
        # A compiler sees through neither oneDNN nor packed weights.
        if self._onednn is None or torch.compiler.is_compiling():
            return super().forward(x)
        weight: Tensor = self.weight
        if self._packed is None:
            self._packed = _pack(weight)
        packed, source, version = self._packed
        if packed is not None and weight is source and weight._version == version:
            weight = packed
        return self._onednn(x, weight, self.bias, "none", [], "")


def fastest_linear(linear: nn.Linear) -> nn.Linear:
    """The layer itself, or one of oneDNN with its weights: in bf16, and in float32 where MKL is not at home."""
    if not _onednn_takes(linear.weight) or (linear.weight.dtype is torch.float32 and _is_intel()):
        return linear
    return OneDNNLinear(linear)


def _onednn_takes(weight: Tensor) -> bool:
    if not weight.is_cpu or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    return _has_onednn(weight.dtype)


@cache
def _has_onednn(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _pack(weight: Tensor) -> tuple[Tensor | None, Tensor, int]:
    """The weight in oneDNN's blocks, the weight itself, and at which of its versions it was packed.

    Instead of the blocks None where they are not known to pay, or would take too much of the free memory.
    """
    if not _can_pack() or weight.is_inference():  # which has no version to tell that it was changed
        return None, weight, 0
    free = free_memory()
    if free is None or free - weight.nbytes < RESERVE:
        return None, weight, 0
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS), weight, weight._version


@cache
def _can_pack() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def use_fastest_linear(model: Transformer) -> Transformer:
    """Exchange all linear layers of a model for the fastest here. Returns the model."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, fastest_linear(child))
    return model


@cache  # asked for once a layer, and on a large machine the file is long
def processor_name() -> str:
    """What the processor calls itself, or its architecture where that cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _is_intel() -> bool:
    name = processor_name()
    return "Intel" in name or name == "i386"  # macOS on Intel says i386
