"""The proof of the graders: every reference passes, every stub fails, every mutant fails, each with one sentence."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_answers import OTHER_ANSWERS

from minillm.grading import manifest
from minillm.grading.catalog import Exercise, digest, load_chapter
from minillm.grading.engine import Grading, Result
from minillm.grading.mutants import Mutant, load_mutants
from minillm.grading.process import Workers
from minillm.grading.stubs import generated, make_stub, manifest_text
from minillm.stages.triton_kernels import triton_is_here

EXERCISES = Path(__file__).parents[1] / "exercises"
CHAPTERS = list(manifest.EXERCISES)
ITEMS: list[Exercise] = [item for chapter in CHAPTERS for item in load_chapter(EXERCISES, chapter)]
MUTANTS: list[tuple[Exercise, Mutant]] = [
    (item, mutant) for item in ITEMS for mutant in load_mutants(EXERCISES, item.chapter) if mutant.exercise == item.name
]
NEEDS_TRITON = {item.id for item in ITEMS if "needs_triton" in item.grader.__code__.co_names}
ran = dict.fromkeys(("references", "stubs", "mutants"), 0)
proved = dict.fromkeys(ran, 0)


@pytest.fixture(scope="module")
def grading() -> Iterator[Grading]:
    with Workers() as workers:
        yield Grading(EXERCISES, workers, time_limit=60)


@pytest.fixture(autouse=True)
def gradable(request: pytest.FixtureRequest) -> None:
    """Skips an exercise that cannot be graded on this machine."""
    item = getattr(request.node, "callspec", None) and request.node.callspec.params.get("item")
    if item and item.id in NEEDS_TRITON and not triton_is_here():
        pytest.skip("the package triton is not installed")


def solution_of(chapter: str) -> str:
    return (EXERCISES / chapter / "solution.py").read_text("utf-8")


def grade_text(grading: Grading, item: Exercise, text: str, folder: Path) -> Result:
    path = folder / "exercise.py"
    path.write_text(text, "utf-8")
    return grading.grade_one(item.chapter, item.name, path)


def is_one_sentence(why: str) -> bool:
    return "\n" not in why and why.endswith((".", "?", '"')) and 15 < len(why) < 600 and "Traceback" not in why


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.id)
def test_reference_earns_all_points(grading: Grading, item: Exercise) -> None:
    ran["references"] += 1
    result = grading.grade_one(item.chapter, item.name, EXERCISES / item.chapter / "solution.py")
    assert (result.status, result.earned) == ("passed", item.points), result.why
    proved["references"] += 1


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.id)
def test_stub_earns_nothing_and_says_what_to_do(grading: Grading, item: Exercise, tmp_path: Path) -> None:
    ran["stubs"] += 1
    result = grade_text(grading, item, make_stub(solution_of(item.chapter)), tmp_path)
    assert (result.status, result.earned) == ("not attempted", 0)
    assert is_one_sentence(result.why)
    proved["stubs"] += 1


@pytest.mark.parametrize(("item", "mutant"), MUTANTS, ids=lambda value: value.id if isinstance(value, Exercise) else "")
def test_mutant_fails(grading: Grading, item: Exercise, mutant: Mutant, tmp_path: Path) -> None:
    ran["mutants"] += 1
    wrong = mutant.apply(solution_of(item.chapter), item.needs)
    compile(wrong, "mutant", "exec")
    result = grade_text(grading, item, wrong, tmp_path)
    assert result.status == "failed", f"{mutant.mistake} {result.why}"
    assert is_one_sentence(result.why), result.why
    assert mutant.says in result.why, f"{mutant.mistake} {result.why}"
    proved["mutants"] += 1


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.id)
def test_right_answers_of_other_kinds_pass(grading: Grading, item: Exercise, tmp_path: Path) -> None:
    for text in OTHER_ANSWERS[item.chapter]:
        result = grade_text(grading, item, text, tmp_path)
        assert result.status == "passed", result.why


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_mutants_are_of_exercises_and_enough(chapter: str) -> None:
    mutants = load_mutants(EXERCISES, chapter)
    names = list(manifest.EXERCISES[chapter])
    assert {mutant.exercise for mutant in mutants} <= set(names)
    for name in names:
        enough = 5 if name.startswith("cache_") else 3
        assert sum(mutant.exercise == name for mutant in mutants) >= enough, name


def test_generated_files_are_what_the_solutions_give() -> None:
    """A file that a learner has filled in is no fault of ours; the CI works on a fresh checkout, where none is."""
    filled = [path for path, text in generated(EXERCISES) if path.read_text("utf-8") != text]
    if filled and not os.environ.get("CI"):
        pytest.skip(f"filled in, or out of step (python -m minillm.grading --force): {', '.join(map(str, filled))}")
    assert not filled, "run python -m minillm.grading --force"


def test_manifest_is_in_step() -> None:
    assert Path(manifest.__file__).read_text("utf-8") == manifest_text(EXERCISES), "run python -m minillm.grading"
    for name, expected in manifest.DIGESTS.items():
        assert digest(EXERCISES / name) == expected


def test_proof(capsys: pytest.CaptureFixture[str]) -> None:
    """Last in this file: what the tests above have shown, in one line."""
    n = len(ITEMS)
    line = (
        f"{n} exercises, {proved['references']} references pass, {proved['stubs']} stubs fail, "
        f"{proved['mutants']} of {len(MUTANTS)} mutants fail"
    )
    with capsys.disabled():
        print(f"\n{line}")
    if ran != {"references": n, "stubs": n, "mutants": len(MUTANTS)}:
        pytest.skip("a part of the tests above did not run")
    assert line == f"{n} exercises, {n} references pass, {n} stubs fail, {len(MUTANTS)} of {len(MUTANTS)} mutants fail"
