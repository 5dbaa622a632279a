"""What the measured parts of gpu.sh share: a result that is written after each measurement, and an end before time runs out.

A lease of a GPU is short, and it may end at any moment. So a part asks for the most important figure first, writes its JSON
after each one, and takes a measurement that fails for a line of the result and not for the end.
"""

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Parser, exact_device, positives
from machine import describe

from minillm.config import ModelConfig, known_model
from minillm.device import DTYPES, pick_dtype, wait_for
from minillm.errors import MinillmError
from minillm.files import check_writable, write_json
from minillm.model import Transformer
from minillm.report import make_console
from minillm.roofline.ceilings import CeilingMeter, Ceilings, seconds
from minillm.weights import random_model

ROUNDS = 7  # of a measurement on CUDA


class Part:
    """One part of gpu.sh: `measure` runs what is to be measured, unless the time is over, and keeps what it returns."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.path = Path(args.out) / f"{name}.json"
        check_writable(str(self.path))
        self.device = exact_device(args.device)
        self.dtype = pick_dtype(args.dtype, self.device)
        self.console = make_console()
        self.rows: list[dict[str, Any]] = []
        self.failed: list[dict[str, str]] = []
        self.left_out: list[str] = []
        self.extra: dict[str, Any] = {}
        self._start, self._limit, self._only = time.monotonic(), args.seconds, args.only
        self._about = describe(self.device) | {"part": name, "model": args.model, "dtype": args.dtype}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def measure(self, what: str, work: Callable[[], dict[str, Any]]) -> None:
        """Append the row that `work` gives; write the result, and a line of output, whatever comes of it."""
        if not self._only.search(what):
            return
        if self.elapsed > self._limit:
            self.left_out.append(what)
            return
        before = self.elapsed
        try:
            row = {"what": what, **work(), "seconds": self.elapsed - before}
            self.rows.append(row)
            line = ", ".join(f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float))
        except Exception as error:  # any at all: the others are still to be measured
            reason = (str(error).splitlines() or [""])[0]
            self.failed.append({"what": what, "why": f"{type(error).__name__}: {reason}"[:300]})
            line = f"failed, {self.failed[-1]['why']}"
        self.console.print(f"{self.elapsed:5.0f} s  {what}: {line}", soft_wrap=True, markup=False)
        release(self.device)
        self.write()

    def write(self) -> None:
        parts = {"rows": self.rows, "failed": self.failed, "left_out": self.left_out}
        write_json(self.path, self._about | {"seconds": self.elapsed} | self.extra | parts)

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes the result with its summary and tells what is missing. Raises `MinillmError` where nothing was measured."""
        self.extra |= summary
        self.write()
        for failure in self.failed:
            self.console.print(f"Failed: {failure['what']}: {failure['why']}", soft_wrap=True, markup=False)
        if self.left_out:
            self.console.print(f"Not tried any more: {len(self.left_out)} measurements, which {self.path} names.")
        need(bool(self.rows), "Nothing could be measured: see above.")


def release(device: torch.device) -> None:
    """Give back what a measurement has left, cycles and cached blocks too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- models and ceilings ----------------------------------------------------------------------------------------------


def config_of(name: str, positions: int, layers: int | None = None) -> ModelConfig:
    """The shape of a known model, "random:" or not, with room for `positions` and perhaps fewer layers."""
    config = known_model(name.removeprefix("random:"))
    return replace(
        config, max_positions=max(config.max_positions, positions), n_layers=layers or config.n_layers, name=name
    )


def make_model(part: Part, config: ModelConfig) -> Transformer:
    return random_model(config, device=part.device, dtype=part.dtype)


class MeasuredCeilings:
    """The ceilings so far, with one more sample each time they are asked for; the part's result has the last ones."""

    def __init__(self, part: Part, working_set: int) -> None:
        self._meter = CeilingMeter(part.device, part.dtype, working_set)
        self._part = part

    def __call__(self) -> Ceilings:
        self._meter.sample()
        ceilings = self._meter.ceilings()
        self._part.extra["ceilings"] = ceilings.as_json()
        return ceilings


# --- times ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def seconds_of_each(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of one call: a median over rounds that make all of them. On CUDA a graph leaves out the host's part.

    For figures of memory, let each call read memory of its own, more than the caches hold in all. Elsewhere than on CUDA this
    proves the script only: one round, no warm-up.
    """

    def work() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return seconds(work, device) / len(calls)
    replay = _captured(work, device)
    replay()  # warm-up
    return statistics.median(seconds(replay, device) for _ in range(ROUNDS)) / len(calls)


def _captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    wait_for(device)
    with torch.cuda.stream(side):
        work()
    wait_for(device)
    with torch.cuda.graph(graph, stream=side):
        work()
    return graph.replay


# --- the command ------------------------------------------------------------------------------------------------------


def make_parser(program: str, description: str) -> Parser:
    parser = Parser(prog=program, description=description)
    parser.add_argument("--model", default="random:llama-3-8b", help="a known shape, with random weights")
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--out", default=".", metavar="FOLDER", help="where the result goes")
    parser.add_argument(
        "--seconds", type=float, default=300.0, metavar="N", help="begin no measurement after N seconds"
    )
    parser.add_argument(
        "--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="measure what it finds"
    )
    parser.add_argument("--batches", type=positives, default=[1, 8, 64], metavar="A,B")
    parser.add_argument("--contexts", type=positives, default=[512, 4096, 32768], metavar="A,B", help="powers of two")
    return parser


def need(condition: bool, message: str) -> None:
    """Raise `MinillmError` with the message unless the condition holds: the measurement becomes a line of the result."""
    if not condition:
        raise MinillmError(message)
