"""Which library multiplies float32 matrices on the CPU.

PyTorch carries two: MKL, which it always takes for float32, and oneDNN, which it takes for 16 bits. MKL is Intel's, and at home
on Intel's processors. On a 2-core AMD EPYC its matrix-vector product runs on one thread and reads weights at 15 of 45 GB/s, and
its large products reach 200 of 460 GFLOP/s: with oneDNN, prefill and decode take about half the time. So on processors that are
not Intel's, `load` exchanges the linear layers, from outside: same weights, same products, another order of summation.
"""

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from minillm.model import Transformer


class OneDNNLinear(nn.Linear):
    """x W^T + b by oneDNN while the weights are float32 on the CPU, and the plain layer after a move to elsewhere.

    Shares the parameters of the layer that it stands for.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if not _is_cpu_fp32(self.weight):
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def fastest_linear(linear: nn.Linear) -> nn.Linear:
    """The layer itself, or one of oneDNN with its weights: for float32 on a processor that MKL is not made for."""
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return OneDNNLinear(linear) if _is_cpu_fp32(linear.weight) and has_onednn and not _is_intel() else linear


def _is_cpu_fp32(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype is torch.float32


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
