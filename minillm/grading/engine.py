"""Which exercises there are, grading them one by one, and the scorecard.

A chapter's grader file `test_exercise.py` has one function an exercise. `@exercise(points=2)` declares its points; the names of
its parameters are what it needs from the learner's file; it returns nothing, or a remark for a learner who passed:

    @exercise(points=1)
    def test_ttft(ttft):
        ask(ttft, 2.0, [2.5, 2.6]).number(0.5)
"""

import ast
import hashlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import minillm
from minillm.errors import MinillmError, UsageError
from minillm.grading import manifest
from minillm.grading.channel import TIME_LIMIT, Channel, ProcessChannel, Remote, Workers
from minillm.grading.errors import NotGraded, NotWritten, Wrong

Status = Literal["passed", "failed", "not attempted", "not graded"]
Grader = Callable[..., str | None]
LOUD = 10_000  # characters printed, from which on the scorecard mentions it


def exercise(points: int) -> Callable[[Grader], Grader]:
    """Mark a function of a grader file as the grader of one exercise."""

    def mark(function: Grader) -> Grader:
        function.points = points  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class Exercise:
    """One exercise: its chapter, its name, its points, its grader, and what that needs from the learner's file."""

    chapter: str
    name: str
    points: int
    grader: Grader
    needs: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.chapter}/{self.name}"


@dataclass(frozen=True)
class Result:
    """What became of one exercise. `why` is one sentence; empty where there is nothing to say."""

    chapter: str
    exercise: str
    points: int
    earned: int
    status: Status
    why: str

    @property
    def id(self) -> str:
        return f"{self.chapter}/{self.exercise}"


@dataclass
class Scorecard:
    """All results, and the package and folder that they are about."""

    folder: str
    results: list[Result] = field(default_factory=list)

    @property
    def package(self) -> str:
        return f"minillm {minillm.__version__}"

    @property
    def points(self) -> int:
        return sum(result.points for result in self.results)

    @property
    def earned(self) -> int:
        return sum(result.earned for result in self.results)

    def count(self, status: Status) -> int:
        return sum(result.status == status for result in self.results)

    def as_json(self) -> dict[str, object]:
        return {
            "package": self.package,
            "exercises": [asdict(result) for result in self.results],
            "points": self.points,
            "earned": self.earned,
        }


# --- the exercises folder


def find_exercises(folder: str | Path | None = None) -> Path:
    """The exercises folder: the one that is named, or in this folder or one above it, or beside the package.

    Raises `UsageError` where the named one is none, `MinillmError` where there is none.
    """
    if folder is not None:
        path = Path(folder).resolve()
        if not _holds_exercises(path):
            raise UsageError(f"{folder} is no exercises folder: it needs ch00/test_exercise.py.")
        return path
    here = Path.cwd().resolve()
    above = [here, *here.parents]
    candidates = [*above, *(path / "exercises" for path in above), Path(minillm.__file__).parents[1] / "exercises"]
    for path in candidates:
        if _holds_exercises(path):
            return path
    raise MinillmError(
        "No exercises here: run this inside a clone of the course, or name the folder (--exercises DIR)."
    )


def _holds_exercises(path: Path) -> bool:
    return any((path / chapter / "test_exercise.py").is_file() for chapter in manifest.EXERCISES)


def digest(path: Path) -> str:
    """SHA-256 of a text file, whatever its line ends."""
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def check_chapter(folder: Path, chapter: str) -> None:
    """Raise `NotGraded` unless the grader files of a chapter are the ones that this package came with."""
    for name, expected in manifest.DIGESTS.items():
        if name.startswith(chapter) or "/" not in name:
            path = folder / name
            if not path.is_file():
                raise NotGraded(f"not graded, because {path.name} of {chapter} is missing: git checkout {path}.")
            if digest(path) != expected:
                raise NotGraded(f"not graded, because {name} was changed: restore it (git checkout {path}).")


def load_chapter(folder: Path, chapter: str) -> list[Exercise]:
    """The exercises of one chapter's grader file, in its order."""
    path = folder / chapter / "test_exercise.py"
    module = types.ModuleType(f"{chapter}_grader")
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return [
        Exercise(chapter, name.removeprefix("test_"), value.points, value, tuple(inspect.signature(value).parameters))
        for name, value in vars(module).items()
        if name.startswith("test_") and hasattr(value, "points")
    ]


def select(pattern: str | None) -> dict[str, list[str]]:
    """Names of exercises by chapter: all, those of "ch01" (or "1"), or the one called "ch01/rope". Raises `UsageError`."""
    known = {chapter: list(points) for chapter, points in manifest.EXERCISES.items()}
    if pattern is None:
        return known
    chapter, _, name = pattern.partition("/")
    if chapter.isdigit():
        chapter = f"ch{int(chapter):02d}"
    if chapter not in known:
        raise UsageError(f"Unknown chapter {pattern!r}: choose one of {', '.join(known)}.")
    if name and name not in known[chapter]:
        raise UsageError(f"Unknown exercise {pattern!r}: {chapter} has {', '.join(known[chapter])}.")
    return {chapter: [name] if name else known[chapter]}


# --- grading


class Grading:
    """Grades exercises of one folder. Use it in a `with` statement: it keeps a process warm."""

    def __init__(self, folder: Path, workers: Workers | None = None, time_limit: float = TIME_LIMIT) -> None:
        self.folder = folder
        self._workers = workers or Workers()
        self._owned = workers is None
        self._time_limit = time_limit
        self._chapters: dict[str, dict[str, Exercise]] = {}
        self._refused: dict[str, str] = {}  # why nothing of a learner's file can be graded
        self._damaged: dict[str, str] = {}  # why nothing of a chapter can

    def __enter__(self) -> "Grading":
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            self._workers.close()

    @property
    def damaged(self) -> list[str]:
        """One sentence for each chapter whose graders are missing or were changed."""
        return list(self._damaged.values())

    def grade(self, names: Mapping[str, Iterable[str]], file_of: Callable[[str], Path]) -> Iterator[Result]:
        """The result of each exercise, `file_of(chapter)` being the learner's file."""
        for chapter, exercises in names.items():
            for name in exercises:
                yield self.grade_one(chapter, name, file_of(chapter))

    def grade_one(self, chapter: str, name: str, path: Path) -> Result:
        """Grade one exercise of the learner's file at `path`, in a process of its own."""
        points = manifest.EXERCISES[chapter][name]
        try:
            grader = self._exercise(chapter, name)
            status, why = self._run(grader, path)
        except NotGraded as error:
            status, why = "not graded", str(error)
            if error.whole_file:
                self._refused[str(path)] = why
        return Result(chapter, name, points, points if status == "passed" else 0, status, why)

    def _exercise(self, chapter: str, name: str) -> Exercise:
        if chapter in self._damaged:
            raise NotGraded(self._damaged[chapter])
        if chapter not in self._chapters:
            try:
                check_chapter(self.folder, chapter)
            except NotGraded as error:
                self._damaged[chapter] = str(error)
                raise
            self._chapters[chapter] = {item.name: item for item in load_chapter(self.folder, chapter)}
        return self._chapters[chapter][name]

    def _run(self, item: Exercise, path: Path) -> tuple[Status, str]:
        if str(path) in self._refused:
            raise NotGraded(self._refused[str(path)])
        if not path.is_file():
            raise NotGraded(f"not graded, because there is no {path.parent.name}/{path.name}.", whole_file=True)
        with ProcessChannel(self._workers, path, self._time_limit) as channel:
            channel.load()
            try:
                return run_grader(item, channel, [channel.get(name) for name in item.needs])
            except Wrong as error:  # a name that the file lacks
                return "failed", str(error)
            except NotWritten as error:
                if is_untouched(path, self.folder / item.chapter / "solution.py", item.needs):
                    return "not attempted", str(error)
                return "failed", f"A part is still to be written: {error}"


def run_grader(item: Exercise, channel: Channel, objects: list[Remote]) -> tuple[Status, str]:
    """Run one grader on the learner's objects. Raises `NotWritten` where a stub is left, `NotGraded`."""
    try:
        remark = item.grader(*objects)
    except Wrong as error:
        return "failed", str(error)
    except (NotWritten, NotGraded):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise NotGraded(f"not graded, because its grader failed ({problem}): please report it.") from error
    loud = f"It printed {channel.printed:,} characters: take the print out." if channel.printed > LOUD else ""
    return "passed", " ".join(filter(None, [remark, loud]))


def is_untouched(path: Path, solution: Path, names: Iterable[str]) -> bool:
    """Whether the definitions of `names` in the learner's file are still the stub's. That file is not parsed, only searched."""
    from minillm.grading.stubs import make_stub

    stub = definitions(make_stub(solution.read_text("utf-8")))
    text = path.read_text("utf-8", "replace").replace("\r\n", "\n")
    return all(stub[name] in text for name in names)


@cache
def definitions(source: str) -> dict[str, str]:
    """The functions and classes at the top of a source text, by name."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {node.name: ast.get_source_segment(source, node) or "" for node in nodes}
