"""The engine of the exercises: commands, scorecards, pytest, notebooks, stubs, and values between two processes."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from minillm import cli
from minillm.config import KNOWN_MODELS
from minillm.grading import Answer, Wrong, check, judge_guesses, manifest, scorecard, stubs, wire
from minillm.grading.catalog import find_exercises, load_chapter, select
from minillm.grading.engine import Scorecard
from minillm.grading.mutants import Mutant, changed
from minillm.grading.notebook import verdict
from minillm.grading.stubs import generated, make_notebook, make_stub
from minillm.stages.triton_kernels import triton_is_here

EXERCISES = Path(__file__).parents[1] / "exercises"
POINTS = sum(sum(points.values()) for points in manifest.EXERCISES.values())
N = sum(map(len, manifest.EXERCISES.values()))
UNGRADED = () if triton_is_here() else ("attend_split", "int4_row")  # on this machine


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of the exercises, as a clone has them, and the current folder above it."""
    shutil.copytree(EXERCISES, tmp_path / "exercises", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for path, text in generated(tmp_path / "exercises"):
        path.write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "exercises"


def grade(*args: str) -> int:
    return cli.main(["grade", *args])


def fill(path: Path, name: str, body: str) -> None:
    """Put a body in place of the stub's exception in one function."""
    head, tail = path.read_text("utf-8").split(f"def {name}(", 1)
    before, after = tail.split("    raise NotImplementedError(", 1)
    rest = after.split(")\n", 1)[1]
    path.write_text(f"{head}def {name}({before}{body}{rest}", "utf-8")


RIGHT_TTFT = "    return tokens[0] - start\n"
WRONG_RIDGE = "    return bandwidth / peak\n"


# --- minillm grade


def test_fresh_checkout_scores_nothing_and_says_what_to_do(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grade("--json", "card.json") == 0
    card = json.loads(Path("card.json").read_text())
    assert list(card) == ["package", "exercises", "points", "earned"]
    assert card["package"].startswith("minillm ")
    assert (card["points"], card["earned"], len(card["exercises"])) == (POINTS, 0, N)
    for entry in card["exercises"]:
        assert list(entry) == ["chapter", "exercise", "points", "earned", "status", "why"]
        status = "not graded" if entry["exercise"] in UNGRADED else "not attempted"
        assert (entry["status"], entry["earned"]) == (status, 0)
        assert entry["why"].endswith(".") and "\n" not in entry["why"]
    out = capsys.readouterr().out
    assert (
        f"0 of {POINTS} points: 0 passed, 0 failed, {N - len(UNGRADED)} not attempted, {len(UNGRADED)} not graded."
        in out
    )
    assert str(course) in out and "minillm " in out


def test_solutions_score_everything(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grade("--solutions", "--json", "card.json") == 0
    card = json.loads(Path("card.json").read_text())
    assert card["points"] == POINTS
    for entry in card["exercises"]:
        status, earned = ("not graded", 0) if entry["exercise"] in UNGRADED else ("passed", entry["points"])
        assert (entry["status"], entry["earned"]) == (status, earned)
    assert "Your cache just ran" in capsys.readouterr().out


def test_scorecard_separates_the_statuses(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(course / "ch00/exercise.py", "ttft", RIGHT_TTFT)
    fill(course / "ch00/exercise.py", "ridge", WRONG_RIDGE)
    assert grade("ch00") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["1", "of", "1", "ch00/ttft", "passed"] for line in lines)
    assert any("0 of 1  ch00/ridge" in line and "failed: ridge(" in line for line in lines)
    assert any("upside down" in line for line in lines)
    assert lines[-1] == "1 of 20 points: 1 passed, 1 failed, 12 not attempted, 0 not graded."


@pytest.mark.parametrize(("pattern", "expected"), [("ch01", 8), ("1", 8), ("01", 8), ("ch02/positions", 1), (None, N)])
def test_select_chapter_or_exercise(pattern: str | None, expected: int) -> None:
    assert sum(map(len, select(pattern).values())) == expected


@pytest.mark.parametrize("pattern", ["ch77", "ch00/nothing", "x", "", "ch0"])
def test_unknown_exercise_is_a_wrong_command(course: Path, pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert grade(pattern) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_exercises_are_found_from_folders_below(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (course, course / "ch01", course.parent):
        monkeypatch.chdir(folder)
        assert find_exercises() == course
    assert find_exercises(course) == course


def test_elsewhere_the_packages_own_exercises_are_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_exercises() == EXERCISES


def test_no_exercises_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grade("--exercises", str(tmp_path)) == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minillm.__file__", str(tmp_path / "site-packages/minillm/__init__.py"))
    assert grade() == 1
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("name", ["test_exercise.py", "solution.py", "mutants.py", "../conftest.py"])
def test_changed_grader_is_noticed(course: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = course / "ch00" / name
    path.write_text(path.read_text("utf-8") + "\n# harmless\n", "utf-8")
    assert grade("ch00", "--json", "card.json") == 1
    entries = json.loads(Path("card.json").read_text())["exercises"]
    assert {(entry["status"], entry["earned"]) for entry in entries} == {("not graded", 0)}
    assert "was changed" in entries[0]["why"] and Path(name).name in entries[0]["why"]
    assert sum(entry["points"] for entry in entries) == 20


def test_changed_grader_costs_its_chapter_only(course: Path) -> None:
    (course / "ch00/test_exercise.py").unlink()
    fill(course / "ch01/exercise.py", "greedy", "    return logits.argmax(-1)\n")
    assert grade("--json", "card.json") == 1
    entries = json.loads(Path("card.json").read_text())["exercises"]
    assert {entry["status"] for entry in entries if entry["chapter"] == "ch00"} == {"not graded"}
    assert [entry["exercise"] for entry in entries if entry["status"] == "passed"] == ["greedy"]


def test_other_line_ends_are_no_change(course: Path) -> None:
    path = course / "ch00/test_exercise.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert grade("ch00/ttft") == 0


def test_folder_of_submissions_in_one_command(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    students = course.parent / "submissions"
    for name in ("ada", "bert", "cleo", "dora"):
        (students / name).mkdir(parents=True)
    (students / "ada" / "ch00").mkdir()
    shutil.copy(course / "ch00/solution.py", students / "ada" / "ch00" / "exercise.py")
    shutil.copy(course / "ch00/exercise.py", students / "bert" / "ch00.py")
    fill(students / "bert" / "ch00.py", "ttft", RIGHT_TTFT)
    (students / "cleo" / "ch00.py").write_text("import os\nos.abort()\n")
    (students / "notes.txt").write_text("no student")
    assert grade("ch00", "--submissions", str(students), "--json", "cards.json") == 0
    cards = json.loads(Path("cards.json").read_text())
    assert {name: card["earned"] for name, card in cards.items()} == {"ada": 20, "bert": 1, "cleo": 0, "dora": 0}
    for card in cards.values():
        assert list(card) == ["package", "exercises", "points", "earned"]
    assert {entry["status"] for entry in cards["dora"]["exercises"]} == {"not graded"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["student", "ada", "bert", "cleo", "dora"]
    assert "20 of 20" in lines[1] and "13 not attempted" in lines[2] and "14 not graded" in lines[3]


def test_the_table_of_submissions_says_why_nothing_was_graded(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    students = course.parent / "submissions"
    for name in ("ada", "bert", "cleo"):
        (students / name / "ch00").mkdir(parents=True)
    (students / "ada" / "ch00" / "exercise.py").write_text("def ttft(:\n")
    (students / "bert" / "exercise.py").write_text("")  # in no chapter's place
    shutil.copy(course / "ch00/notebook.ipynb", students / "cleo" / "ch00")
    assert grade("ch00", "--submissions", str(students)) == 0
    _, ada, bert, cleo = capsys.readouterr().out.splitlines()
    assert ada.endswith("  14 not graded: line 1 of exercise.py is not Python: invalid syntax")
    assert bert.endswith("  nothing handed in as chNN/exercise.py or chNN.py")
    assert cleo.endswith("  nothing handed in as chNN/exercise.py or chNN.py, only a notebook, which is not graded")
    assert grade("--submissions", str(students)) == 0
    _, ada, *_ = capsys.readouterr().out.splitlines()
    assert "14 not graded: line 1 of exercise.py is not Python: invalid syntax; nothing handed in for ch01, ch02" in ada


def test_submissions_as_csv(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    students = course.parent / "submissions"
    for name in ("ada, B.", "=1+1"):
        (students / name).mkdir(parents=True)
    shutil.copy(course / "ch00/exercise.py", students / "ada, B." / "ch00.py")
    fill(students / "ada, B." / "ch00.py", "ttft", RIGHT_TTFT)
    assert grade("ch00/ttft", "--submissions", str(students), "--csv", "points.csv") == 0
    # A name with a comma is quoted; one that a spreadsheet would compute begins with an apostrophe.
    text = 'student,ch00/ttft,earned,points\n\'=1+1,0,0,1\n"ada, B.",1,1,1\n'
    assert Path("points.csv").read_text() == text
    capsys.readouterr()
    assert grade("--csv", "points.csv") == 2
    assert "--submissions" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--submissions", "nowhere"], ["--submissions", "empty"], ["--time-limit", "0"]])
def test_wrong_arguments_are_one_sentence(course: Path, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (course.parent / "empty").mkdir()
    try:
        status = grade(*args)
    except SystemExit as exit:  # from argparse
        status = int(exit.code or 0)
    assert status == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- pytest exercises


def run_pytest(folder: Path, *args: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-ra", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def test_pytest_shows_the_scorecard_and_no_traceback(course: Path) -> None:
    fill(course / "ch00/exercise.py", "ttft", RIGHT_TTFT)
    fill(course / "ch00/exercise.py", "ridge", WRONG_RIDGE)
    (course / "ch01/exercise.py").write_text("def rope(:\n")
    out = run_pytest(course.parent, "exercises")
    assert (
        f"1 of {POINTS} points: 1 passed, 1 failed, {N - 10 - len(UNGRADED)} not attempted, {8 + len(UNGRADED)} not graded."
        in out
    )
    assert f"{9 + len(UNGRADED)} failed, 1 passed, {N - 10 - len(UNGRADED)} skipped" in out
    assert "upside down" in out and "line 1 of exercise.py is not Python" in out
    assert "Traceback" not in out and "engine.py" not in out and not re.search(r"test_exercise\.py:\d", out)
    assert "exercises/ch00/exercise.py" in out.replace("\\", "/")  # skips point at the learner's file


def test_pytest_runs_one_exercise(course: Path) -> None:
    fill(course / "ch00/exercise.py", "ttft", RIGHT_TTFT)
    out = run_pytest(course.parent, "exercises/ch00", "-k", "ttft")
    assert "1 of 1 points: 1 passed" in out and "1 passed" in out


# --- notebooks


def needs(chapter: str) -> dict[str, tuple[tuple[str, ...], int]]:
    return {item.name: (item.needs, item.points) for item in load_chapter(EXERCISES, chapter)}


def run_nbval(notebooks: list[Path], folder: Path) -> str:
    paths = [str(path) for path in notebooks]
    # Cells have an order, also where tests have none.
    options = ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "-p", "no:randomly", "-q", "-rA"]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def test_solved_notebooks_reach_their_stored_verdicts_anywhere_in_any_kernel(tmp_path: Path) -> None:
    notebooks = []
    for chapter in manifest.EXERCISES:
        text = make_notebook(
            (EXERCISES / chapter / "solution.py").read_text("utf-8"), chapter, needs(chapter), stub=False
        )
        notebook = json.loads(text)
        notebook["metadata"]["kernelspec"]["name"] = "a-kernel-of-another-name"
        notebooks.append(tmp_path / f"{chapter}.ipynb")  # far from any exercises folder
        notebooks[-1].write_text(json.dumps(notebook))
    if UNGRADED:
        notebooks = [path for path in notebooks if path.stem != "ch08"]
    out = run_nbval(notebooks, tmp_path)
    assert " failed" not in out, out[-3000:]
    assert " passed" in out


def test_stub_notebook_names_the_cells_that_are_to_do(course: Path) -> None:
    notebook = json.loads((course / "ch00/notebook.ipynb").read_text("utf-8"))
    checks = [cell for cell in notebook["cells"] if "".join(cell["source"]).startswith("check(")]
    stored = ["".join(cell["outputs"][0]["text"]) for cell in checks]
    assert len(checks) == len(manifest.EXERCISES["ch00"])
    assert all(": passed, " in text for text in stored)
    assert "return tokens[0]" not in json.dumps(notebook)  # verdicts are stored, answers are not
    out = run_nbval([course / "ch00/notebook.ipynb"], course.parent)
    assert f"{len(checks)} failed" in out
    assert "not attempted. Return the seconds" in out


def test_check_prints_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def ttft(start: float, tokens: list[float]) -> float:
        return tokens[0] - start

    check("ch00/ttft", ttft)
    assert capsys.readouterr().out == "ch00/ttft: passed, 1 of 1 point.\n"
    assert verdict("ch00/ttft", lambda start, tokens: tokens[0]).startswith("ch00/ttft: failed. ttft(10, ")


def endless(start: float, tokens: list[float]) -> float:
    while True:
        pass


def stub(start: float, tokens: list[float]) -> float:
    raise NotImplementedError("Return the seconds.")


def leaves(start: float, tokens: list[float]) -> float:
    sys.exit(0)


def mutates(start: float, tokens: list[float]) -> float:
    return tokens.pop(0) - start


def loud(start: float, tokens: list[float]) -> float:
    print("x" * 100_000)
    return 0.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (endless, "never ends"),
        (stub, "not attempted. Return the seconds."),
        (leaves, "sys.exit"),
        (mutates, "copy"),
        (loud, "should give"),
        (None, "NoneType"),
        (5, "int"),
    ],
)
def test_check_of_a_bad_function_is_one_sentence(
    function: Callable[..., object] | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check("ch00/ttft", function, time_limit=1)
    out = capsys.readouterr().out
    assert says in out and out.count("\n") == 1 and "passed" not in out and len(out) < 400


@pytest.mark.parametrize(
    ("name", "objects", "says"),
    [
        ("ch00/nothing", (stub,), "ch00 has ttft"),
        ("ch00", (stub,), "name one exercise"),
        ("ch99/x", (stub,), "choose one of"),
        ("ch00/ttft", (), "check('ch00/ttft', ttft)"),
        ("ch00/ttft", (stub, stub), "check('ch00/ttft', ttft)"),
    ],
)
def test_check_called_wrongly_says_so(name: str, objects: tuple[object, ...], says: str) -> None:
    sentence = verdict(name, *objects)
    assert says in sentence and "not graded" in sentence and "\n" not in sentence


# --- stubs and mutants

SOLUTION = '''"""Two functions."""

# %%
import math


# %%
def double(x):
    """Twice x."""
    # BEGIN SOLUTION: Return twice x.
    y = x + x
    return y
    # END SOLUTION


# %% tags=["active-ipynb"]
# print(double(2))
'''


def test_stub_keeps_all_but_the_solution() -> None:
    stub = make_stub(SOLUTION)
    assert stub == (
        '"""Two functions."""\n\n# %%\nimport math\n\n\n# %%\ndef double(x):\n    """Twice x."""\n'
        '    raise NotImplementedError("Return twice x.")\n'
    )


def test_notebook_has_a_check_after_each_definition_and_the_verdict_of_a_right_answer() -> None:
    notebook = json.loads(make_notebook(SOLUTION, "ch09", {"double": (("double",), 3)}, stub=True))
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    assert sources[1].endswith('raise NotImplementedError("Return twice x.")')
    assert sources[2:] == ['check("ch09/double", double)', "print(double(2))"]
    assert notebook["cells"][2]["outputs"][0]["text"] == ["ch09/double: passed, 3 of 3 points.\n"]
    assert len({cell["id"] for cell in notebook["cells"]}) == len(sources)


@pytest.mark.parametrize("mark", ["    # BEGIN SOLUTION: Return twice x.\n", "    # END SOLUTION\n"])
def test_mark_without_a_partner_is_an_error(mark: str) -> None:
    with pytest.raises(ValueError, match="partner"):
        make_stub(SOLUTION.replace(mark, ""))


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with one chapter, of which nothing is generated yet."""
    (tmp_path / "ch00").mkdir()
    for name in ("conftest.py", "ch00/solution.py", "ch00/test_exercise.py", "ch00/mutants.py"):
        shutil.copy(EXERCISES / name, tmp_path / name)
    monkeypatch.setattr(stubs, "EXERCISES", tmp_path)
    monkeypatch.setattr(stubs, "MANIFEST", tmp_path / "manifest.py")
    return tmp_path


def test_files_are_generated_and_what_a_learner_wrote_is_kept_unless_forced(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exercise, stub = clone / "ch00" / "exercise.py", make_stub((EXERCISES / "ch00" / "solution.py").read_text("utf-8"))
    assert stubs.main([]) == 0
    assert exercise.read_text("utf-8") == stub
    assert (clone / "manifest.py").read_text("utf-8") == stubs.manifest_text(clone)
    assert '"ttft": 1' in (clone / "manifest.py").read_text("utf-8")
    exercise.write_text("mine = True\n")
    assert stubs.main([]) == 1
    assert exercise.read_text("utf-8") == "mine = True\n"
    assert capsys.readouterr().err == f"Kept: {exercise} (--force overwrites it)\n"
    assert stubs.main(["--force"]) == 0
    assert exercise.read_text("utf-8") == stub


def test_where_there_are_no_solutions_nothing_is_generated(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clone / "ch00" / "solution.py").unlink()
    assert stubs.main(["--force"]) == 1
    assert capsys.readouterr().err == f"No solutions in {clone}: run this in a clone of the course.\n"
    assert not (clone / "manifest.py").exists()


def test_a_chapter_that_is_not_whole_is_named_before_anything_is_written(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (clone / "ch00" / "mutants.py").unlink()
    assert stubs.main(["--force"]) == 1
    assert capsys.readouterr().err.startswith(f"{clone / 'ch00' / 'mutants.py'} is missing: ")
    assert not (clone / "ch00" / "exercise.py").exists()


def test_generated_notebooks_are_valid() -> None:
    nbformat = pytest.importorskip("nbformat")
    for path, text in generated(EXERCISES):
        if path.suffix == ".ipynb":
            nbformat.validate(nbformat.reads(text, as_version=4))


def test_solutions_are_what_jupytext_reads() -> None:
    jupytext = pytest.importorskip("jupytext")
    for chapter in manifest.EXERCISES:
        text = (EXERCISES / chapter / "solution.py").read_text("utf-8")
        notebook = jupytext.reads(text, fmt="py:percent")
        assert sum(cell.cell_type == "markdown" for cell in notebook.cells) == text.count("# %% [markdown]")


@pytest.mark.parametrize("change", [("x + x", "2 * x"), ("y = x + z", ""), ("x", "z"), ("math", "os")])
def test_mutant_changes_one_place_of_its_function_or_is_an_error(change: tuple[str, str]) -> None:
    mutant = Mutant("double", "Is wrong.", change)
    if change[0] == "x + x":
        assert mutant.apply(SOLUTION, ["double"]) == SOLUTION.replace(*change)
    else:
        with pytest.raises(ValueError, match="not once"):
            mutant.apply(SOLUTION, ["double"])


def test_answer_of_another_build_is_changed_in_one_place_or_is_an_error() -> None:
    assert changed("a + b", ("a", "c"), ("b", "a")) == "c + a"
    for old in ("a", "z"):
        with pytest.raises(ValueError, match="not once"):
            changed("a + a", (old, "b"))


@pytest.mark.parametrize(
    ("guesses", "says"),
    [
        ([9.0, 22.0], ""),
        (torch.tensor([11.0, 18.0]), ""),
        ([8.9, 20.0], "On the CPU minillm counts another number than 8.9; think again: too low."),
        ([10, 10**400], r"On the GPU minillm counts another number than 1e\+09; think again: too high."),
        ([-(10**400), 20.0], r"On the CPU minillm counts another number than -1e\+09; think again: too low."),
        ([10.0], "must return two numbers"),
        ([10.0, float("nan")], "must return two numbers"),
        ([10.0, True], "must return two numbers"),
        (10.0, "must return two numbers"),
    ],
)
def test_guess_must_lie_within_a_share_of_what_is_counted(guesses: object, says: str) -> None:
    def judge() -> list[float]:
        reasons = [(f"On the {where}", "too low", "too high") for where in ("CPU", "GPU")]
        return judge_guesses(Answer("guesses()", guesses), (10.0, 20.0), 0.1, "two numbers", reasons)

    if says:
        with pytest.raises(Wrong, match=says):
            judge()
    else:
        assert judge() == [float(guess) for guess in guesses]  # type: ignore[attr-defined]


# --- values between two processes


def special(value: object) -> dict[str, object]:
    return {"object": 7, "type": type(value).__name__}


def resolve(value: dict[str, object]) -> object:
    return ("resolved", value["object"], value["type"])


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**70),
        1.5,
        float("inf"),
        "text\n\u00e9",
        [1, [2.0, None]],
        (1, ("a",)),
        {"a": [1], 2: "b"},
        {1, 2},
        [],
        (),
    ],
)
def test_plain_values_arrive_as_they_were(value: object) -> None:
    arrived = wire.unpack(wire.pack({"x": value}, special), resolve)["x"]
    assert arrived == value and type(arrived) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_tensors_arrive_as_they_were(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.arange(24)[: int(np.prod(shape))].reshape(shape) % 5).to(dtype)
    first, second = wire.unpack(wire.pack({"x": [x, x.T if x.dim() == 2 else x]}, special), resolve)["x"]
    assert first.dtype == dtype and torch.equal(first, x) and torch.equal(second, x)


def test_numbers_of_other_kinds_arrive_as_plain_ones() -> None:
    class Odd(float):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    arrived = wire.unpack(wire.pack({"x": [np.float32(0.5), np.int64(3), np.bool_(True), Odd(2.0)]}, special), resolve)[
        "x"
    ]
    assert [type(x) for x in arrived] == [float, int, bool, float]
    assert arrived == [0.5, 3, True, 2.0]


def test_arrays_configurations_and_objects_arrive() -> None:
    config = KNOWN_MODELS["llama-3.2-1b"]
    message = wire.pack({"a": np.eye(2), "c": config, "o": object()}, special)
    arrived = wire.unpack(message, resolve)
    assert torch.equal(arrived["a"], torch.eye(2, dtype=torch.float64))
    assert arrived["c"] == config and arrived["o"] == ("resolved", 7, "object")


def message(header: str, blobs: bytes = b"") -> bytes:
    return len(header).to_bytes(4, "big") + header.encode() + blobs


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "unpack_from requires"),
        (message("{}")[:5], "cut off"),
        (b"\xff\xff\xff\xff{}", "cut off"),
        (message("null"), "no attribute 'items'"),
        (message("[" * 100_000), "recursion"),
        (message('{"x": {"tensor": ["float32", [9], [0]]}}', bytes(35)), "without its numbers"),
        (message('{"x": {"tensor": ["float32", [-1], [0]]}}'), "a shape that is none"),
        (message('{"x": {"tensor": ["float32", [1], [1]]}}', bytes(4)), "a shape that is none"),
        (message('{"x": {"tensor": ["object", [1], [0]]}}', bytes(4)), "object"),
        (message('{"x": {"set": [[1]]}}'), "unhashable"),
        (message('{"x": {}}'), "object"),
    ],
)
def test_damaged_message_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(wire.Unreadable, match=says):
        wire.unpack(data, resolve)


def test_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((1 << 40).to_bytes(8, "big"))
        with pytest.raises(wire.Unreadable):
            wire.receive(ours)


def test_scorecard_of_nothing_is_empty() -> None:
    card = Scorecard("nowhere")
    assert card.as_json() == {"package": card.package, "exercises": [], "points": 0, "earned": 0}
    assert list(scorecard.lines(card)) == [
        f"Scorecard of {card.package}, nowhere",
        "0 of 0 points: 0 passed, 0 failed, 0 not attempted, 0 not graded.",
    ]


def test_readme_lists_every_exercise_with_its_points() -> None:
    text = (EXERCISES / "README.md").read_text("utf-8")
    for chapter, points in manifest.EXERCISES.items():
        for name, number in points.items():
            assert f"| `{chapter}/{name}` | {number} |" in text, name


def test_docstrings_state_the_points_that_are_given() -> None:
    for chapter, points in manifest.EXERCISES.items():
        solution = (EXERCISES / chapter / "solution.py").read_text("utf-8")
        for name, number in points.items():
            word = f"{number} point{'s' if number > 1 else ''}"
            if f"\ndef {name}(" in solution:
                body = solution.split(f"def {name}(")[1].split('"""')[1]
                assert f"{word}.\n" in body, name
            else:
                assert f"        {name:<12}   {word}:" in solution, name


def test_importing_the_grading_does_not_import_pytest() -> None:
    code = "import sys, minillm.grading; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0
