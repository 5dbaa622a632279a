"""What the exercises of chapter 8 stand on: recordings of a call that are repeated, and kernels that may not be gradable."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minillm.grading import answer, manifest
from minillm.grading.capture import Captured, HostReads
from minillm.grading.engine import Grading
from minillm.stages.triton_kernels import triton_is_here

EXERCISES = Path(__file__).parents[1] / "exercises"
KERNELS = ("attend_split", "int4_row")


def test_a_recording_repeats_its_operators_with_new_numbers_on_the_same_memory() -> None:
    kept = torch.zeros(4)

    def step(x: Tensor, column: Tensor) -> Tensor:
        kept.index_copy_(0, column, 2 * x)
        return kept.cumsum(0)[1:] + 1

    recorded = Captured(step, [torch.tensor([1.0]), torch.tensor([0])])
    first = recorded(torch.tensor([1.0]), torch.tensor([0]))
    second = recorded(torch.tensor([5.0]), torch.tensor([2]))
    assert kept.tolist() == [2, 0, 10, 0]
    assert first.tolist() == [3, 3, 3]  # and not what the second replay left there
    assert second.tolist() == [3, 13, 13]


def test_what_python_knew_while_a_call_was_recorded_stays() -> None:
    kept, count = torch.zeros(3), [0]

    def step(x: Tensor) -> Tensor:
        kept[count[0]] = x[0]
        count[0] += 1
        return kept + 0

    recorded = Captured(step, [torch.tensor([1.0])])
    assert recorded(torch.tensor([7.0])).tolist() == [7, 0, 0]
    assert count == [1]


def test_a_tensor_that_is_made_anew_is_not_the_one_that_is_read_at_the_next_replay() -> None:
    class Cache:
        kept = torch.zeros(2)

    def step(x: Tensor, column: Tensor) -> Tensor:
        Cache.kept = Cache.kept.index_copy(0, column, x)
        return Cache.kept

    recorded = Captured(step, [torch.tensor([1.0]), torch.tensor([0])])
    assert recorded(torch.tensor([5.0]), torch.tensor([1])).tolist() == [0, 5]  # eager: 1, 5


def test_given_tensors_are_left_alone() -> None:
    x = torch.tensor([1.0])
    recorded = Captured(lambda y: y.add_(1), [x])
    recorded(x)
    assert x.tolist() == [1.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: int(x[0]),
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x + 1),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.clone().__setitem__(x > 0, torch.ones(2)),
        lambda x: x.index_put((x > 0,), torch.ones(2)),
    ],
)
def test_a_number_that_the_host_waits_for_ends_a_recording(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(HostReads, match="the host waits"):
        Captured(read, [torch.tensor([1.0, 2.0])])


def test_one_number_for_all_places_of_a_mask_is_recorded() -> None:
    def step(x: Tensor) -> Tensor:
        hidden = x.clone()
        hidden[x < 0] = -9.0
        return hidden

    assert Captured(step, [torch.tensor([1.0, -2.0])])(torch.tensor([-3.0, 4.0])).tolist() == [-9, 4]


@pytest.mark.parametrize("name", KERNELS)
def test_without_triton_a_kernel_is_not_graded_and_the_reason_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer.importlib.util, "find_spec", lambda package: None)
    with Grading(EXERCISES) as grading:
        result = grading.grade_one("ch08", name, EXERCISES / "ch08" / "solution.py")
    assert (result.status, result.earned, result.points) == ("not graded", 0, manifest.EXERCISES["ch08"][name])
    assert result.why.startswith("not graded, because ") and "triton" in result.why and "\n" not in result.why


@pytest.mark.parametrize("file", ["exercise.py", "solution.py"])
def test_without_triton_the_other_exercises_run(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # which the file changes
    path = EXERCISES / "ch08" / file
    space: dict[str, Callable[..., object]] = {}
    exec(compile(path.read_text("utf-8"), str(path), "exec"), space)
    if file == "solution.py":
        assert space["break_even"](0, 0.5, 0.25, 1.0) == 4


@pytest.mark.skipif(not triton_is_here(), reason="the package triton is not installed")
def test_kernels_are_interpreted_though_the_learner_does_not_ask_for_it(tmp_path: Path) -> None:
    text = (EXERCISES / "ch08" / "solution.py").read_text("utf-8")
    asks = next(line for line in text.splitlines() if line.startswith('os.environ["TRITON_INTERPRET"]'))
    path = tmp_path / "exercise.py"
    path.write_text(text.replace(asks, ""), "utf-8")
    with Grading(EXERCISES) as grading:
        assert grading.grade_one("ch08", "int4_row", path).status == "passed"
