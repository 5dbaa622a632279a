"""Which exercises there are, and whether their graders are the ones that this package came with.

A chapter's grader file `test_exercise.py` has one function an exercise. `@exercise(points=2)` declares its points; the names of
its parameters are what it needs from the learner's file; it returns nothing, or a remark for a learner who passed:

    @exercise(points=1)
    def test_ttft(ttft):
        ask(ttft, 2.0, [2.5, 2.6]).number(0.5)
"""

import hashlib
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import minillm
from minillm.errors import MinillmError, UsageError
from minillm.grading import manifest
from minillm.grading.errors import NotGraded

Grader = Callable[..., str | None]


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
