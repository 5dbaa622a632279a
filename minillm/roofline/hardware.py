"""Datasheet figures of common hardware: *dense* peaks with fp32 accumulation, nominal bandwidth.

Public tables mix these up, so know what is not meant here: the doubled figures for 2:4 sparsity (H100 1979 TFLOP/s) or for fp16
accumulation on GeForce cards, fp16 outside the tensor cores (RTX 3090 35.6), gigabytes (10^9) against gibibytes (2^30).
And nobody reaches a nominal bandwidth: about 83 % of it is read on an A100, 91 % on an RTX 3090.

Sources: vendors' datasheets as collected by glennklockwood.com (H100, B200), Lightning's `throughput.py` (T4, L4, H100 PCIe),
LLM-Viewer's `hardware_params.py` (A100), baseten.co (A10G is not an A10), waredb.com (RTX 4090).
"""

from dataclasses import dataclass

from minillm.errors import UsageError
from minillm.roofline.ceilings import Ceilings


@dataclass(frozen=True)
class Hardware:
    """One device: TFLOP/s by dtype (dense), GB/s, GB. `device_names` are what CUDA calls it."""

    name: str
    title: str
    tflops: dict[str, float]
    bandwidth_gb_per_s: float
    memory_gb: float | None = None
    device_names: tuple[str, ...] = ()

    def ceilings(self, dtype: str, overhead: float = 0.0) -> Ceilings:
        """Its ceilings in one dtype, in SI units. A datasheet knows no overhead: it is 0 unless given, in seconds.

        Raises `UsageError` for a dtype that the hardware has no arithmetic for.
        """
        if dtype not in self.tflops:
            raise UsageError(f"{self.title} has no {dtype} arithmetic: choose {' or '.join(self.tflops)}.")
        return Ceilings(
            self.title, dtype, self.bandwidth_gb_per_s * 1e9, self.tflops[dtype] * 1e12, overhead, source="datasheet"
        )


def _gpu(fp16: float, fp32: float, bf16: bool = True) -> dict[str, float]:
    return {"bf16": fp16, "fp16": fp16, "fp32": fp32} if bf16 else {"fp16": fp16, "fp32": fp32}


_TABLE = [
    Hardware("t4", "NVIDIA T4", _gpu(65, 8.1, bf16=False), 320, 16, ("Tesla T4",)),
    Hardware("a10", "NVIDIA A10", _gpu(125, 31.2), 600, 24, ("NVIDIA A10",)),
    Hardware("a10g", "NVIDIA A10G", _gpu(70, 35), 600, 24, ("NVIDIA A10G",)),
    Hardware("l4", "NVIDIA L4", _gpu(121, 30.3), 300, 24, ("NVIDIA L4",)),
    Hardware("rtx-3090", "GeForce RTX 3090", _gpu(71, 35.6), 936, 24, ("NVIDIA GeForce RTX 3090",)),
    Hardware("rtx-4090", "GeForce RTX 4090", _gpu(165.2, 82.6), 1008, 24, ("NVIDIA GeForce RTX 4090",)),
    Hardware("a100-40", "NVIDIA A100 SXM 40 GB", _gpu(312, 19.5), 1555, 40, ("NVIDIA A100-SXM4-40GB",)),
    Hardware("a100-80", "NVIDIA A100 SXM 80 GB", _gpu(312, 19.5), 2039, 80, ("NVIDIA A100-SXM4-80GB",)),
    Hardware("h100-pcie", "NVIDIA H100 PCIe", _gpu(756, 51), 2000, 80, ("NVIDIA H100 PCIe",)),
    Hardware("h100-sxm", "NVIDIA H100 SXM", _gpu(989.4, 66.9), 3350, 80, ("NVIDIA H100 80GB HBM3",)),
    Hardware("h200", "NVIDIA H200 SXM", _gpu(989.4, 66.9), 4800, 141, ("NVIDIA H200",)),
    Hardware("b200", "NVIDIA B200", _gpu(2250, 80), 8000, 180, ("NVIDIA B200",)),
    Hardware("m1", "Apple M1", {"fp32": 2.6}, 68),
    Hardware("m1-pro", "Apple M1 Pro", {"fp32": 5.2}, 200),
    Hardware("m1-max", "Apple M1 Max", {"fp32": 10.4}, 400),
    Hardware("m1-ultra", "Apple M1 Ultra", {"fp32": 20.8}, 800),
    Hardware("epyc-9654", "AMD EPYC 9654 (96 cores)", {"fp32": 7.4}, 460.8),
    Hardware("xeon-8480", "Intel Xeon 8480+ (56 cores)", {"fp32": 7.2, "bf16": 229}, 307.2),
]
HARDWARE = {hardware.name: hardware for hardware in _TABLE}


def known_hardware(name: str) -> Hardware:
    """The datasheet of a device in the table, by name. Raises `UsageError` for any other name."""
    try:
        return HARDWARE[name]
    except KeyError:
        raise UsageError(f"Unknown hardware {name!r}: choose one of {', '.join(HARDWARE)}.") from None


def datasheet_ceilings(measured: Ceilings) -> Ceilings | None:
    """The datasheet's figures for the device and dtype of measured ceilings, if the table has them."""
    for hardware in _TABLE:
        if measured.device in hardware.device_names and measured.dtype in hardware.tflops:
            return hardware.ceilings(measured.dtype)
    return None
