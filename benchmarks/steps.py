"""A decode step beside its prediction, in rounds: what batching.py and decode.py share."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common import spread
from machine import Neighbours, worst
from rich.console import Console
from torch import Tensor

from minillm.model import Transformer
from minillm.report import duration
from minillm.roofline.ceilings import CeilingMeter, Ceilings
from minillm.roofline.counting import Cost
from minillm.roofline.position import bound, predict
from minillm.stages.quantization import weight_bytes
from minillm.tour import CLOSE


@dataclass
class Rounds:
    """Counts rounds, says that they are done, and keeps what other processes took in the worst of them."""

    number: int
    console: Console
    others_busy_cores: float | None = None

    def of(self, what: str) -> Iterator[None]:
        for i in range(self.number):
            neighbours = Neighbours()
            yield
            self.others_busy_cores = worst(self.others_busy_cores, neighbours.busy_cores())
            self.console.print(f"{what}: round {i + 1} of {self.number} done", style="dim")


def step_figures(cost: Cost, steps: int, ceilings: Ceilings, seconds_a_step: Sequence[float]) -> dict[str, Any]:
    """One decode step: `cost` is that of all `steps` together. `ratio` is measured over predicted."""
    predicted, measured = predict(cost, ceilings) / steps, spread(seconds_a_step)
    return {
        "flops": cost.flops / steps,
        "bytes": cost.bytes / steps,
        "intensity": cost.intensity,
        "bound": bound(cost, ceilings),
        "predicted_s": predicted,
        "measured_s": measured,
        "ratio": measured["median"] / predicted,
    }


def make_meter(model: Transformer) -> CeilingMeter:
    """Ceilings for a model: in the dtype of its activations, over as many bytes as its weights have."""
    return CeilingMeter(model.device, model.dtype, weight_bytes(model))


def fill(*memories: Tensor) -> None:
    """Random keys and values in place of a prompt's, so small that all tokens have a share of attention and none stands out."""
    for memory in memories:
        memory.normal_(std=0.02)


# --- what is shown ----------------------------------------------------------------------------------------------------


def step_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Of a table: the measured step, the predicted one, and the first over the second."""
    return duration(row["measured_s"]["median"]), duration(row["predicted_s"]), f"{row['ratio']:.2f}"


def is_far(row: dict[str, Any]) -> bool:
    return not 1 / CLOSE <= row["ratio"] <= CLOSE


def far_from_predicted(steps: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """A sentence for each step, given with its name, whose prediction is not close."""
    return [
        f"Not within 15 % of the prediction: {what} takes {row['ratio']:.2f} times as long as predicted."
        for what, row in steps
        if is_far(row)
    ]
