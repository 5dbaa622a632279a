"""Which library multiplies matrices on the CPU.

PyTorch carries two: MKL, which it always takes for float32, and oneDNN, which it takes for 16 bits. MKL is Intel's, and at home
on Intel's processors. On a 2-core AMD EPYC its matrix-vector product reads weights at 15 GB/s where oneDNN's reads 34, and its
large products reach 200 GFLOP/s where oneDNN's reach 450 (`benchmarks/linear.py`). So on processors that are not Intel's, load
exchanges the linear layers, from outside: same weights, same products, another order of summation. In bf16 it is oneDNN either
way, and calling it directly saves a step or two on the way there.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minillm.model import Transformer


class OneDNNLinear(nn.Linear):
    """x W^T + b by oneDNN while the weights are float32 or bf16 on the CPU, and the plain layer after a move to elsewhere.

    Shares the parameters of the layer that it stands for.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._choose()

    def _choose(self) -> None:
        # The overload is looked up here, once, and not at each of a step's hundred calls.
        self._onednn = torch.ops.mkldnn._linear_pointwise.default if _onednn_takes(self.weight) else None

    def _apply(self, fn: Any, recurse: bool = True) -> "OneDNNLinear":
        super()._apply(fn, recurse)
        self._choose()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self._onednn is None:
            return super().forward(x)
        return self._onednn(x, self.weight, self.bias, "none", [], "")


def fastest_linear(linear: nn.Linear) -> nn.Linear:
    """The layer itself, or one of oneDNN with its weights on a processor that MKL is not made for."""
    return OneDNNLinear(linear) if _onednn_takes(linear.weight) and not _is_intel() else linear


def _onednn_takes(weight: Tensor) -> bool:
    if not weight.is_cpu or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    return _has_onednn(weight.dtype)


@cache
def _has_onednn(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


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
