"""What the parts of decode.py collect: comparisons, agreement of tokens, and who disturbed them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import spread
from engines import Engine
from machine import worst
from rich.console import Console
from turns import Request, Sample, measure, times_as_fast

from minillm.roofline.ceilings import CeilingMeter


@dataclass
class Bench:
    """How long to measure, and what all parts found."""

    console: Console
    rounds: int
    patience: float
    ratios: list[dict[str, Any]] = field(default_factory=list)
    agreement: list[dict[str, Any]] = field(default_factory=list)
    others_busy_cores: float | None = None
    disturbed_rounds: int = 0

    def turns(
        self, what: str, engines: Sequence[Engine], request: Request, meters: Iterable[CeilingMeter] = ()
    ) -> list[list[Sample]]:
        """For each engine its samples, one a round; ceilings are sampled between rounds."""

        def between(text: str) -> None:
            for meter in meters:
                meter.sample()
            self.console.print(f"{what}: {text}", style="dim")

        measured = measure(engines, request, self.rounds, self.patience, between)
        self.note_others(measured.others_busy_cores)
        self.disturbed_rounds += measured.disturbed_rounds
        return measured.samples

    def note_others(self, cores: float | None) -> None:
        self.others_busy_cores = worst(self.others_busy_cores, cores)

    def compare(
        self, phase: str, ours: tuple[str, Sequence[Sample]], theirs: tuple[str, Sequence[Sample]], target: float | None
    ) -> dict[str, Any]:
        """Note how many times as fast the first is, and what it should be."""
        (what, our_samples), (beside, their_samples) = ours, theirs
        times = spread(times_as_fast(our_samples, their_samples)[phase])
        self.ratios.append({"phase": phase, "what": what, "beside": beside, "times_as_fast": times, "target": target})
        return times
