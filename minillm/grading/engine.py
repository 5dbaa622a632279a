"""Grading exercises one by one, and the scorecard that comes of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import minillm
from minillm.grading import manifest
from minillm.grading.catalog import Exercise, check_chapter, is_untouched, load_chapter
from minillm.grading.channel import TIME_LIMIT, Channel, Remote
from minillm.grading.errors import NotGraded, NotWritten, Wrong
from minillm.grading.process import ProcessChannel, Workers

Status = Literal["passed", "failed", "not attempted", "not graded"]
LOUD = 10_000  # characters printed, from which on the scorecard mentions it


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
