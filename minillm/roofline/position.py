"""Predict what a stage costs, and place it on the roofline.

A request has two phases: *prefill* gives the first token, *decode* all later ones. The cost of decode is that of n tokens minus
that of 1, counted by running the stage's own code on the `meta` device. From the counts and three ceilings follows

    prediction = sum over operators of max(FLOPs / peak, bytes / bandwidth, overhead)

for this machine or for one that is known from its datasheet only. Set beside a measured time, it gives the phase's position:
arithmetic intensity, achieved FLOP/s, the fraction of the roofline at that intensity, and which of the three limits binds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from minillm.config import ModelConfig
from minillm.device import DTYPES
from minillm.errors import UsageError
from minillm.generation import Recorder
from minillm.model import Transformer
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.counting import Cost, CountingMode, Operator, count
from minillm.sampling import greedy
from minillm.stages import Stage

PHASES = ("prefill", "decode")
MAX_CONTEXT, MAX_BATCH = 1_000_000, 100_000  # of a prediction: beyond these, sizes of tensors pass 64 bits


@dataclass(frozen=True)
class Position:
    """Where one phase of a stage stands. `measured_s` is None for a pure prediction. Times in seconds."""

    phase: str
    cost: Cost
    ceilings: Ceilings
    measured_s: float | None = None

    @property
    def predicted_s(self) -> float:
        return predict(self.cost, self.ceilings)

    @property
    def bound(self) -> str:
        return bound(self.cost, self.ceilings)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted seconds; None without a measurement."""
        return None if self.measured_s is None else self.measured_s / self.predicted_s

    @property
    def achieved(self) -> float:
        """FLOP/s, of the measured time or, without one, of the predicted."""
        return self.cost.flops / (self.measured_s or self.predicted_s)

    @property
    def fraction_of_roofline(self) -> float:
        """Achieved over attainable FLOP/s at this intensity: 1 on the roof. It can pass 1 where bytes come from a cache."""
        return self.achieved / self.ceilings.attainable(self.cost.intensity)

    def as_json(self) -> dict[str, object]:
        """What `--json` writes of a phase, in SI units; the last three keys only where it was measured."""
        prediction = {
            "phase": self.phase,
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "ideal_bytes": self.cost.ideal_bytes,
            "intensity": self.cost.intensity,
            "predicted_s": self.predicted_s,
            "bound": self.bound,
        }
        if self.measured_s is None:
            return prediction
        return prediction | {
            "measured_s": self.measured_s,
            "achieved_flop_per_s": self.achieved,
            "fraction_of_roofline": self.fraction_of_roofline,
        }


def limits(op: Operator, ceilings: Ceilings) -> dict[str, float]:
    """Seconds that each of the three limits asks for one call of an operator. The largest binds."""
    return {
        "compute": op.flops / ceilings.peak,
        "memory": op.bytes / ceilings.bandwidth,
        "overhead": ceilings.overhead,
    }


def predict(cost: Cost, ceilings: Ceilings) -> float:
    """Seconds: the sum over operators of the limit that binds each."""
    return sum(n * max(limits(op, ceilings).values()) for op, n in cost)


def bound(cost: Cost, ceilings: Ceilings) -> str:
    """Which limit takes most of the predicted time: "compute", "memory" or "overhead"."""
    seconds = {"compute": 0.0, "memory": 0.0, "overhead": 0.0}
    for op, n in cost:
        by_limit = limits(op, ceilings)
        binding = max(by_limit, key=by_limit.__getitem__)
        seconds[binding] += n * by_limit[binding]
    return max(seconds, key=seconds.__getitem__)


def meta_twin(config: ModelConfig, dtype: torch.dtype, positions: int = 1) -> Transformer:
    """A model of shapes alone, that takes no memory; of at least `positions` positions."""
    with torch.device("meta"):
        model = Transformer(replace(config, max_positions=max(config.max_positions, positions)))
    return model.to(dtype)


def count_run(stage: Stage, model: Transformer, prompt_tokens: int, new_tokens: int, batch: int = 1) -> Cost:
    """The cost of a stage generating `new_tokens` for `batch` prompts of one length, on the model's device.

    `model` is what the stage runs: its `prepared` one. Raises `UsageError` for a stage that must really run to be counted.
    """
    run = stage.run
    if run is None:
        raise UsageError(
            "What this stage does depends on the tokens it finds, so it cannot be predicted alone: see minillm tour."
        )
    tokens = torch.zeros(batch, prompt_tokens, dtype=torch.int64, device=model.device)
    return count(lambda: run(model, tokens, new_tokens, greedy, Recorder(model.device)))


def phase_costs(
    stage: Stage, model: Transformer, prompt_tokens: int, new_tokens: int, batch: int = 1
) -> dict[str, Cost]:
    """Cost of prefill, and of decode (absent when only one token is generated), for `batch` prompts of one length."""
    costs = {"prefill": count_run(stage, model, prompt_tokens, 1, batch)}
    if new_tokens > 1:
        costs["decode"] = count_run(stage, model, prompt_tokens, new_tokens, batch) - costs["prefill"]
    return costs


def phase_costs_of_run(
    mode: CountingMode, stage: Stage, model: Transformer, prompt: Sequence[int], new_tokens: int
) -> dict[str, Cost]:
    """The same of a stage that really runs, under a mode that counts: prefill is all that was done up to the first token."""
    costs: dict[str, Cost] = {}

    def note_prefill(token: int) -> None:
        costs.setdefault("prefill", mode.cost.copy())

    with torch.inference_mode(), mode:
        stage.generate(model, prompt, new_tokens, on_token=note_prefill)
    if new_tokens > 1:
        costs["decode"] = mode.cost - costs["prefill"]
    return costs


def ceilings_of(stage: Stage, phase: str, ceilings: Ceilings) -> Ceilings:
    """What binds a phase of a stage: of a decode step that is compiled or captured, no operator's overhead."""
    launched = phase == "decode" and getattr(stage, "launched", False)  # a stage's module may stand for it
    return replace(ceilings, overhead=0.0) if launched else ceilings


def phase_seconds(times: Sequence[float]) -> dict[str, float]:
    """Measured seconds of each phase, from a generation's times."""
    measured = {"prefill": times[0]}
    if len(times) > 1:
        measured["decode"] = times[-1] - times[0]
    return measured


def predict_stage(
    stage: Stage, config: ModelConfig, ceilings: Ceilings, context: int, batch: int = 1
) -> list[Position]:
    """Prefill of `context` tokens, and one decode step that attends over `context` tokens, for `batch` sequences.

    Raises `UsageError` for a context below 2 (a token of prompt and the one that is decoded), a batch below 1, or either
    beyond what can be counted.
    """
    if not 2 <= context <= MAX_CONTEXT:
        raise UsageError(
            f"The context is {context}; it must lie between 2, a token of prompt and the one decoded, and {MAX_CONTEXT:,}."
        )
    if not 1 <= batch <= MAX_BATCH:
        raise UsageError(f"The batch is {batch}; it must lie between 1 and {MAX_BATCH:,}.")
    model = meta_twin(config, DTYPES[ceilings.dtype], positions=context)
    if prepare := getattr(stage, "prepare", None):  # a stage's module, which has `run` as well, may stand for it
        model = prepare(model)
    prefill = count_run(stage, model, context, 1, batch)
    step = count_run(stage, model, context - 1, 2, batch) - count_run(stage, model, context - 1, 1, batch)
    return [
        Position(phase, cost, ceilings_of(stage, phase, ceilings))
        for phase, cost in (("prefill", prefill), ("decode", step))
    ]
