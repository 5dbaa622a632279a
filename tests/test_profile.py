"""Where a step's time goes: each operator's own seconds, its prediction, what lies between operators, and the gap by name."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count as ticks
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_helpers import Run, assert_one_sentence
from helpers import one_thread  # noqa: F401

from minillm import generation
from minillm.checkpoint import random_model
from minillm.commands.profile import findings
from minillm.config import known_model
from minillm.errors import UsageError
from minillm.roofline import profile
from minillm.roofline.ceilings import CeilingMeter, Ceilings
from minillm.roofline.counting import Cost, Operator
from minillm.roofline.position import predict, predict_stage
from minillm.roofline.profile import Kind, PhaseProfile, describe, profile_step
from minillm.stages import STAGES, Stage

TINY = known_model("tiny")
CEILINGS = Ceilings("a machine", "fp32", bandwidth=100.0, peak=1000.0, overhead=0.5)
CPU = torch.device("cpu")


class Meter(CeilingMeter):
    """Counts its samples, and knows the ceilings."""

    def __init__(self) -> None:
        self.taken = 0

    def sample(self) -> None:
        self.taken += 1

    def ceilings(self) -> Ceilings:
        return CEILINGS


def kind(name: str, measured_s: float, predicted_s: float, **cost: int) -> Kind:
    op = Operator(name, "4x4", cost.get("flops", 0), cost.get("read", 0), 0, 0)
    return Kind(name, Cost(Counter({op: cost.get("calls", 1)})), measured_s, predicted_s)


@pytest.fixture
def second_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock for operators that goes on by a second at each look: an operator takes 1 s, whatever it does."""
    seconds: Iterator[int] = ticks()
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage.run is not None])
def test_the_operators_of_a_step_are_those_of_its_prediction_and_each_is_timed_once(
    name: str, batch: int, second_a_look: None
) -> None:
    stage, context = STAGES[name], 9
    model = stage.prepared(random_model(TINY))
    prefill, decode = profile_step(stage, model, Meter(), context, batch, rounds=2)
    expected = predict_stage(stage, TINY, CEILINGS, context, batch)
    assert [prefill.phase, decode.phase] == [position.phase for position in expected]
    for found, position in zip((prefill, decode), expected, strict=True):
        # The naive stage joins each token to the prefix once it has come: with the next one's work, or with nobody's.
        calls = [
            {op: n for op, n in cost if (name, op.name) != ("naive", "cat")} for cost in (found.cost, position.cost)
        ]
        assert calls[0] == calls[1]
        assert found.predicted_s == pytest.approx(predict(found.cost, CEILINGS))
        assert all(kind.measured_s == kind.cost.n_operators for kind in found.kinds)
        names = [kind.name for kind in found.kinds]
        assert len(names) == len(set(names))
        assert [kind.measured_s for kind in found.kinds] == sorted((k.measured_s for k in found.kinds), reverse=True)


def test_times_are_medians_of_the_rounds_and_of_the_last_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token takes 5 s, the second 2, 30 and 4 s in three rounds, after one that does not count."""
    clock, meter, runs = SimpleNamespace(now=0.0), Meter(), []
    looks = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(generation, "time", looks)
    monkeypatch.setattr(profile, "time", looks)

    def loop(model: Any, tokens: torch.Tensor, n: int, sampler: Any, recorder: Any) -> None:
        runs.append((tuple(tokens.shape), n))
        step = [1000.0, 2.0, 30.0, 4.0][meter.taken - 1]
        for seconds in [5.0, step][:n]:
            clock.now += seconds
            recorder.add(torch.zeros(1))

    prefill, decode = profile_step(Stage(loop, loop), random_model(TINY), meter, 7, 2, rounds=3)  # type: ignore[arg-type]
    assert (prefill.undisturbed_s, decode.undisturbed_s) == (5.0, 4.0)
    assert meter.taken == 4
    assert runs == 4 * [((2, 7), 1), ((2, 7), 1), ((2, 6), 2), ((2, 6), 2)]  # each undisturbed, then timed


def test_what_operators_leave_out_is_the_rest_of_the_undisturbed_time() -> None:
    phase = PhaseProfile("decode", [kind("linear", 3.0, 2.0), kind("add", 1.0, 0.5)], undisturbed_s=5.0)
    assert (phase.operators_s, phase.predicted_s, phase.left_out_s) == (4.0, 2.5, 1.0)
    assert "take 4 s: the other 1 s pass between them" in findings(phase, CEILINGS)[0]
    phase.undisturbed_s = 3.5
    assert "take 4 s: 500 ms more than the whole" in findings(phase, CEILINGS)[0]


def test_the_gap_is_made_by_the_fewest_kinds_that_are_most_of_it() -> None:
    kinds = [kind("a", 9, 8), kind("b", 8, 1), kind("c", 5, 3), kind("d", 1, 4)]  # over by 1, 7 and 2; d is faster
    phase = PhaseProfile("decode", kinds, 20.0)
    for most, names in ((0.5, "b"), (0.7, "b"), (0.8, "bc"), (0.9, "bc"), (0.95, "bca")):
        assert [kind.name for kind in phase.makers_of_the_gap(most)] == list(names)
    assert PhaseProfile("decode", [kind("d", 1, 4)], 1.0).makers_of_the_gap() == []


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({"flops": 4000, "read": 10}, "500 FLOP/s, where a large product reaches 1 kFLOP/s"),
        ({"flops": 40, "read": 400}, "50 B/s, where a plain read reaches 100 B/s"),
        ({"flops": 400, "read": 4, "calls": 4}, "2 s a call, where a tiny operator takes 500 ms"),
    ],
    ids=["compute", "memory", "overhead"],
)
def test_a_kind_is_described_by_the_limit_that_binds_it(cost: dict[str, int], words: str) -> None:
    """The last one has an intensity beyond the ridge, and so little work that overhead binds all the same."""
    sentence = describe(kind("mm", 8.0, 4.0, **cost), 32.0, CEILINGS)
    assert sentence == f"mm takes 25% of the operators' time, 2 times its prediction: {words}."


def test_a_stage_without_a_step_is_refused() -> None:
    with pytest.raises(UsageError, match="no step that could be repeated"):
        profile_step(STAGES["speculative"], random_model(TINY), Meter(), 4, 1, rounds=1)


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_shows_and_writes_both_phases(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    status, output, error = run(
        "profile", "gqa", "--model", "tiny", "--device", "cpu", "--context", "12", "--batch", "2", "--json", str(path)
    )
    assert (status, error) == (0, "")
    data = json.loads(path.read_text())
    assert {key: data[key] for key in ("model", "stage", "batch", "context", "device", "dtype")} == {
        "model": "tiny", "stage": "gqa", "batch": 2, "context": 12, "device": "cpu", "dtype": "fp32",
    }  # fmt: skip
    assert data["versions"]["torch"] == torch.__version__
    assert data["hardware"].endswith("1 thread")
    words = " ".join(output.split())
    for phase, what in zip(data["phases"], ("prefill of 12 tokens", "one decode step at context 12"), strict=True):
        assert f"gqa on tiny: {what}, batch 2" in words
        for total, part in (("operators_s", "measured_s"), ("predicted_s", "predicted_s")):
            assert sum(op[part] for op in phase["operators"]) == pytest.approx(phase[total])
        assert {op["bound"] for op in phase["operators"]} <= {"compute", "memory", "overhead"}
        assert all(f" {op['operator']} " in words and op["calls"] > 0 for op in phase["operators"])
        assert all(sentence in words for sentence in phase["findings"])
    position = predict_stage(STAGES["gqa"], TINY, CEILINGS, 12, 2)[1]
    assert sum(op["bytes"] for op in data["phases"][1]["operators"]) == position.cost.bytes
    assert sum(op["flops"] for op in data["phases"][1]["operators"]) == position.cost.flops


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["warp"], "Unknown stage 'warp'"),
        (["speculative"], "has no step to profile: see minillm tour"),
        (["gqa", "--context", "1"], "context is 1"),
        (["gqa", "--context", "9999"], "context is 9999"),  # tiny has 256 positions
        (["gqa", "--batch", "0"], "batch is 0"),
        (["gqa", "--dtype", "fp64"], "Unknown dtype 'fp64'"),
        (["quantization", "--dtype", "fp16"], "take fp32 and bf16"),
    ],
)
def test_a_wrong_command_is_one_sentence(arguments: list[str], words: str, run: Run) -> None:
    status, output, error = run("profile", *arguments, "--model", "tiny", "--device", "cpu")
    assert (status, output) == (2, "")
    assert_one_sentence(error)
    assert words in error


def test_what_cannot_be_written_is_told_before_anything_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.commands.profile.load", None)
    status, _, error = run("profile", "gqa", "--json", str(tmp_path))
    assert (status, "name a file, not a folder" in error) == (1, True)
    assert_one_sentence(error)
