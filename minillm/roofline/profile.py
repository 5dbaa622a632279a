"""Where a phase's time goes, operator by operator, and in words where it differs from the prediction."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minillm.device import wait_for
from minillm.generation import Recorder, Run
from minillm.model import Transformer
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.counting import Cost, CountingMode, Operator
from minillm.roofline.plot import si
from minillm.roofline.position import phase_costs_of_run, predict
from minillm.sampling import greedy
from minillm.stages import Stage


@dataclass
class Kind:
    """All calls of operators of one name: what they cost, and their seconds measured and predicted."""

    name: str
    cost: Cost
    measured_s: float
    predicted_s: float


class _TimingMode(CountingMode):
    """Also times each operator. On a GPU it waits for each, so their sum exceeds what an undisturbed run takes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.seconds: dict[Operator, float] = defaultdict(float)
        self._wait = partial(wait_for, device)
        self._last = 0.0

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._wait()
        start = time.perf_counter()
        result = super().call(func, args, kwargs)
        self._wait()
        self._last = time.perf_counter() - start
        return result

    def record(self, op: Operator) -> None:
        super().record(op)
        self.seconds[op] += self._last


def profile_phases(
    stage: Stage, model: Transformer, prompt: Sequence[int], new_tokens: int, ceilings: Ceilings, batch: int = 1
) -> dict[str, list[Kind]]:
    """Run a stage on `batch` copies of a prompt with every operator timed. By phase, the kinds of operator, slowest first."""
    if stage.run is None:
        timed = _TimingMode(model.device)
        costs = phase_costs_of_run(timed, stage, model, prompt, new_tokens)
        return {phase: _by_kind(cost, timed, ceilings) for phase, cost in costs.items()}
    prefill, run = (_run_timed(stage.run, model, prompt, n, batch) for n in (1, new_tokens))
    kinds = {"prefill": _by_kind(prefill.cost, prefill, ceilings)}
    if new_tokens > 1:
        kinds["decode"] = _by_kind(run.cost - prefill.cost, run, ceilings)
    return kinds


def _run_timed(run: Run, model: Transformer, prompt: Sequence[int], new_tokens: int, batch: int) -> _TimingMode:
    tokens = torch.tensor([list(prompt)] * batch, device=model.device)
    with torch.inference_mode(), _TimingMode(model.device) as mode:
        run(model, tokens, new_tokens, greedy, Recorder(model.device))
    return mode


def _by_kind(cost: Cost, timed: _TimingMode, ceilings: Ceilings) -> list[Kind]:
    costs: dict[str, Cost] = defaultdict(Cost)
    measured: dict[str, float] = defaultdict(float)
    for op, calls in cost:
        costs[op.name].calls[op] += calls
        measured[op.name] += calls * timed.seconds[op] / timed.cost.calls[op]
    kinds = [Kind(name, costs[name], measured[name], predict(costs[name], ceilings)) for name in costs]
    return sorted(kinds, key=lambda kind: -kind.measured_s)


def explain(kinds: Sequence[Kind], ceilings: Ceilings) -> str:
    """One sentence on the kind of operator that misses its prediction by most seconds."""
    worst = max(kinds, key=lambda kind: abs(kind.measured_s - kind.predicted_s))
    share = worst.measured_s / sum(kind.measured_s for kind in kinds)
    cost, calls = worst.cost, worst.cost.n_operators
    if cost.intensity > ceilings.ridge:
        rate = f"{si(cost.flops / worst.measured_s)}FLOP/s, where a large product reaches {si(ceilings.peak)}FLOP/s"
    elif cost.bytes / calls > ceilings.overhead * ceilings.bandwidth:
        rate = f"{si(cost.bytes / worst.measured_s)}B/s, where a plain read reaches {si(ceilings.bandwidth)}B/s"
    else:
        rate = f"{si(worst.measured_s / calls)}s a call, where a tiny operator takes {si(ceilings.overhead)}s"
    times = worst.measured_s / worst.predicted_s
    return f"{worst.name} takes {share:.0%} of the operators' time, {times:.2g} times its prediction: {rate}."
