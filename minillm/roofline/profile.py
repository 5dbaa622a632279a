"""Where a phase's time goes, operator by operator, and in words where it differs from the prediction."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from minillm.device import wait_for
from minillm.errors import UsageError
from minillm.generation import Recorder, Run
from minillm.model import Transformer
from minillm.roofline.ceilings import CeilingMeter, Ceilings
from minillm.roofline.counting import Cost, CountingMode, Operator
from minillm.roofline.plot import si
from minillm.roofline.position import PHASES, bound, phase_costs_of_run, predict
from minillm.sampling import greedy
from minillm.stages import Stage

# What was done, and the seconds that all calls of each operator took.
Timed: TypeAlias = tuple[Cost, dict[Operator, float]]


@dataclass
class Kind:
    """All calls of operators of one name: what they cost, and their seconds measured and predicted."""

    name: str
    cost: Cost
    measured_s: float
    predicted_s: float

    @property
    def gap_s(self) -> float:
        """Seconds over the prediction; below 0 where the operators were faster."""
        return self.measured_s - self.predicted_s


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
    def measured(part: Cost) -> float:
        return sum(calls * timed.seconds[op] / timed.cost.calls[op] for op, calls in part)

    return _slowest_first(
        Kind(name, part, measured(part), predict(part, ceilings)) for name, part in _by_name(cost).items()
    )


def _by_name(cost: Cost) -> dict[str, Cost]:
    costs: dict[str, Cost] = defaultdict(Cost)
    for op, calls in cost:
        costs[op.name].calls[op] += calls
    return costs


def _slowest_first(kinds: Iterable[Kind]) -> list[Kind]:
    return sorted(kinds, key=lambda kind: -kind.measured_s)


def explain(kinds: Sequence[Kind], ceilings: Ceilings) -> str:
    """One sentence on the kind of operator that misses its prediction by most seconds."""
    worst = max(kinds, key=lambda kind: abs(kind.gap_s))
    return describe(worst, sum(kind.measured_s for kind in kinds), ceilings)


def describe(kind: Kind, operators_s: float, ceilings: Ceilings) -> str:
    """One sentence: what a kind of operator takes of the operators' time, and what it reaches of the limit that binds it."""
    cost, calls = kind.cost, kind.cost.n_operators
    limit = bound(cost, ceilings)
    if limit == "compute":
        rate = f"{si(cost.flops / kind.measured_s)}FLOP/s, where a large product reaches {si(ceilings.peak)}FLOP/s"
    elif limit == "memory":
        rate = f"{si(cost.bytes / kind.measured_s)}B/s, where a plain read reaches {si(ceilings.bandwidth)}B/s"
    else:
        rate = f"{si(kind.measured_s / calls)}s a call, where a tiny operator takes {si(ceilings.overhead)}s"
    share, times = kind.measured_s / operators_s, kind.measured_s / kind.predicted_s
    return f"{kind.name} takes {share:.0%} of the operators' time, {times:.2g} times its prediction: {rate}."


# --- One step of a stage, and what its operators leave out ------------------------------------------------------------


@dataclass
class PhaseProfile:
    """A phase by kinds of operator, and what it takes when they are not timed. Seconds, medians of several runs."""

    phase: str
    kinds: list[Kind]  # slowest first
    undisturbed_s: float

    @property
    def cost(self) -> Cost:
        return sum((kind.cost for kind in self.kinds), Cost())

    @property
    def operators_s(self) -> float:
        """All operators, each timed by itself."""
        return sum(kind.measured_s for kind in self.kinds)

    @property
    def predicted_s(self) -> float:
        return sum(kind.predicted_s for kind in self.kinds)

    @property
    def left_out_s(self) -> float:
        """What passes between operators: Python, and waiting. Below 0 where to time each of them costs more than that."""
        return self.undisturbed_s - self.operators_s

    def makers_of_the_gap(self, most: float = 0.8) -> list[Kind]:
        """The kinds that are most seconds over their predictions: the fewest that make up `most` of all such seconds."""
        over = sorted((kind for kind in self.kinds if kind.gap_s > 0), key=lambda kind: -kind.gap_s)
        sums = list(accumulate(kind.gap_s for kind in over))
        return over[: 1 + sum(seconds < most * sums[-1] for seconds in sums)]


class _Snapshots(Recorder):
    """Notes, as each token comes, what had been done and timed until then."""

    def __init__(self, mode: _TimingMode, device: torch.device) -> None:
        super().__init__(device)
        self._mode = mode
        self.taken: list[Timed] = [(Cost(), {})]

    def add(self, token: Tensor, value: int | None = None) -> bool:
        self.taken.append((self._mode.cost.copy(), dict(self._mode.seconds)))
        return super().add(token, value)


def profile_step(
    stage: Stage, model: Transformer, meter: CeilingMeter, context: int, batch: int, rounds: int
) -> list[PhaseProfile]:
    """Prefill of `context` tokens, and the decode step that attends over `context`, for `batch` sequences of equal length.

    `model` is what the stage runs: its `prepared` one. A round takes a sample of the ceilings, runs each phase undisturbed, and
    runs it again with every operator timed. Raises `UsageError` for a stage of which only a run tells what there is to do.
    """
    run = stage.run
    if run is None:
        raise UsageError(
            "What this stage does depends on the tokens it finds, so it has no step that could be repeated: see minillm tour."
        )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (batch, context), generator=generator).to(model.device)
    requests = {"prefill": (tokens, 1), "decode": (tokens[:, 1:], 2)}  # of each, the last token is the phase
    undisturbed: dict[str, list[float]] = {phase: [] for phase in PHASES}
    timed: dict[str, list[Timed]] = {phase: [] for phase in PHASES}
    for i in range(rounds + 1):
        meter.sample()
        for phase, request in requests.items():
            seconds, operators = _last_token(run, model, *request), _last_token_timed(run, model, *request)
            if i > 0:  # the first run pays for memory and plans
                undisturbed[phase].append(seconds)
                timed[phase].append(operators)
    ceilings = meter.ceilings()
    return [
        PhaseProfile(phase, _median_kinds(timed[phase], ceilings), statistics.median(undisturbed[phase]))
        for phase in PHASES
    ]


@torch.inference_mode()
def _last_token(run: Run, model: Transformer, tokens: Tensor, new_tokens: int) -> float:
    recorder = Recorder(model.device)
    run(model, tokens, new_tokens, greedy, recorder)
    before, after = [0.0, *recorder.finish().times][-2:]
    return after - before


@torch.inference_mode()
def _last_token_timed(run: Run, model: Transformer, tokens: Tensor, new_tokens: int) -> Timed:
    """What the last token costs, and the seconds of all calls of each operator for it."""
    mode = _TimingMode(model.device)
    recorder = _Snapshots(mode, model.device)
    with mode:
        run(model, tokens, new_tokens, greedy, recorder)
    (cost_before, before), (cost, after) = recorder.taken[-2:]
    return cost - cost_before, {op: seconds - before.get(op, 0.0) for op, seconds in after.items()}


def _median_kinds(runs: Sequence[Timed], ceilings: Ceilings) -> list[Kind]:
    def measured(part: Cost) -> float:
        return statistics.median(sum(seconds[op] for op, _ in part) for _, seconds in runs)

    parts = _by_name(runs[0][0])  # every run does the same
    return _slowest_first(Kind(name, part, measured(part), predict(part, ceilings)) for name, part in parts.items())
