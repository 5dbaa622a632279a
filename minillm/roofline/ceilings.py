"""The three ceilings of a device, measured on the device at hand.

    bandwidth   bytes/s read from a working set as large as the workload's: a smaller one would be served by the caches
    peak        FLOP/s of a large square matrix product in the workload's dtype
    overhead    seconds that one more operator costs, however little it does: Python, dispatch and, on a GPU, the launch

On a shared machine they drift by half within the hour. So a `CeilingMeter` takes one sample of each between the runs of a
workload, and reports medians. Datasheet figures stand beside these, never in their place.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from minillm.config import KNOWN_MODELS
from minillm.cpu import fastest_linear, processor_name, use_fastest_linear
from minillm.device import DTYPE_NAMES, wait_for
from minillm.generation import Clock
from minillm.model import Transformer
from minillm.roofline.counting import count
from minillm.stages.kv_cache import KVCache

BYTES_READ = {"cpu": 2**26, "cuda": 2**31}  # by a sample of the bandwidth: a small buffer is read again and again,
MOST_READS = 100  # but no more often than this
LARGEST_BUFFER = 8 * 2**30  # bytes, however large the working set
OPERATORS_TIMED = 2_000  # tiny ones, in a sample of the overhead: some milliseconds
MATRIX_SIZE = {"cpu": 1024, "cuda": 8192, "mps": 2048}  # rows and columns of the product that gives the peak


@dataclass(frozen=True)
class Ceilings:
    """What binds on one device in one dtype. `source` says where the figures come from."""

    device: str
    dtype: str
    bandwidth: float  # bytes/s
    peak: float  # FLOP/s
    overhead: float  # seconds an operator
    source: str = "measured"

    @property
    def ridge(self) -> float:
        """The intensity, FLOP/byte, below which bandwidth binds and above which compute does."""
        return self.peak / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """The roofline: FLOP/s within reach at an arithmetic intensity (Williams, Waterman and Patterson, CACM 2009)."""
        return min(self.peak, intensity * self.bandwidth)

    def as_json(self) -> dict[str, float]:
        """What `--json` writes of them, in SI units."""
        return {
            "bandwidth_bytes_per_s": self.bandwidth,
            "peak_flop_per_s": self.peak,
            "overhead_s": self.overhead,
            "ridge_flop_per_byte": self.ridge,
        }


def device_name(device: torch.device) -> str:
    """What the hardware calls itself: the GPU's name, or the processor's with the threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' if threads > 1 else ''}"


def seconds(fn: Callable[[], object], device: torch.device) -> float:
    """Seconds of `fn()`, from an idle device until it is idle again, by the clock that times generations."""
    wait_for(device)
    clock = Clock(device)
    fn()
    clock.mark()
    return clock.seconds()[0]


class CeilingMeter:
    """Takes samples of the three ceilings; `ceilings()` gives their medians so far.

    `working_set` is in bytes. Call `sample()` between the runs of the workload that the ceilings are to be compared with.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, working_set: int) -> None:
        self.device, self.dtype = device, dtype
        elements = max(1, min(working_set, _room(device)) // 4)
        self._buffer = torch.ones(elements, device=device)
        n = MATRIX_SIZE.get(device.type, 1024)
        self._matrix = torch.full((n, n), 0.5, dtype=dtype, device=device)
        self._product = fastest_linear(nn.Linear(n, n, bias=False, dtype=dtype, device=device).requires_grad_(False))
        self._tiny, self._tiny_cost = _tiny_step(device, dtype)
        self._samples: list[tuple[float, float, float]] = []
        self._measure()  # the first run of each pays for pages, plans and compilation: not a sample

    def sample(self) -> None:
        self._samples.append(self._measure())

    @torch.inference_mode()
    def _measure(self) -> tuple[float, float, float]:
        reads = min(MOST_READS, -(-BYTES_READ.get(self.device.type, 2**31) // self._buffer.nbytes))
        read = seconds(lambda: [self._buffer.sum() for _ in range(reads)], self.device) / reads
        product = seconds(lambda: self._product(self._matrix), self.device)
        steps = -(-OPERATORS_TIMED // self._tiny_cost)
        tiny = seconds(lambda: [self._tiny() for _ in range(steps)], self.device)
        n = len(self._matrix)
        return self._buffer.nbytes / read, 2 * n**3 / product, tiny / (steps * self._tiny_cost)

    def ceilings(self) -> Ceilings:
        """Medians over the samples taken. Takes one if there is none."""
        if not self._samples:
            self.sample()
        bandwidth, peak, overhead = (statistics.median(column) for column in zip(*self._samples, strict=True))
        return Ceilings(device_name(self.device), DTYPE_NAMES[self.dtype], bandwidth, peak, overhead)


def _tiny_step(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """A decode step of a model so narrow that nothing but overhead is left of it, and how many operators it calls."""
    with torch.device(device):
        model = use_fastest_linear(Transformer(replace(KNOWN_MODELS["tiny"], n_layers=4)).to(dtype))
        token = torch.zeros(1, 1, dtype=torch.int64)

    def step() -> torch.Tensor:
        return model(token, KVCache(model, capacity=1))

    return step, count(step).n_operators


def _room(device: torch.device) -> int:
    """Bytes that the buffer may take: of a GPU's memory half of what is free."""
    if device.type == "cuda":
        return min(LARGEST_BUFFER, torch.cuda.mem_get_info(device)[0] // 2)
    return LARGEST_BUFFER
