"""Grading exercises one by one, and the scorecard that comes of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import minillm
from minillm.grading import manifest
from minillm.grading.catalog import Exercise, check_chapter, load_chapter
from minillm.grading.channel import TIME_LIMIT, Channel, Remote
from minillm.grading.errors import NotGraded, NotWritten, Wrong, sentence
from minillm.grading.fence import ANSWERS
from minillm.grading.process import ProcessChannel, Workers
from minillm.grading.stubs import is_untouched

Status = Literal["passed", "failed", "not attempted", "not graded"]
MAX_SOURCE = 1 << 20  # bytes of a learner's file
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

    def grade(
        self, names: Mapping[str, Iterable[str]], file_of: Callable[[str], Path], within: Path | None = None
    ) -> Iterator[Result]:
        """The result of each exercise, `file_of(chapter)` being the learner's file, which must lie in the folder `within`."""
        for chapter, exercises in names.items():
            for name in exercises:
                yield self.grade_one(chapter, name, file_of(chapter), within)

    def grade_one(self, chapter: str, name: str, path: Path, within: Path | None = None) -> Result:
        """Grade one exercise of the learner's file at `path`, in a process of its own."""
        points = manifest.EXERCISES[chapter][name]
        try:
            grader = self._exercise(chapter, name)
            status, why = self._run(grader, path, within)
        except NotGraded as error:
            status, why = "not graded", str(error)
            if error.whole_file:
                self._refused[str(path)] = why
        return Result(chapter, name, points, points if status == "passed" else 0, status, sentence(why))

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

    def _run(self, item: Exercise, path: Path, within: Path | None) -> tuple[Status, str]:
        if str(path) in self._refused:
            raise NotGraded(self._refused[str(path)])
        text = self._source(path, within)  # read now: what runs below may put something else in its place
        with ProcessChannel(self._workers, path, self.folder, self._time_limit) as channel:
            channel.load()
            try:
                return run_grader(item, channel, [channel.get(name) for name in item.needs])
            except Wrong as error:  # a name that the file lacks
                return "failed", str(error)
            except NotWritten as error:
                if is_untouched(text, self.folder / item.chapter / "solution.py", item.needs):
                    return "not attempted", str(error)
                return "failed", f"A part is still to be written: {error}"

    def _source(self, path: Path, within: Path | None) -> str:
        """The text of a learner's file. Raises `NotGraded` for none, and for a link to what is not the learner's."""

        def refusal(why: str) -> NotGraded:
            return NotGraded(f"not graded, because {why}.", whole_file=True)

        name = f"{path.parent.name}/{path.name}"
        if not path.is_file():
            raise refusal(f"there is no {name}")
        if within is not None and not path.resolve().is_relative_to(within.resolve()):
            raise refusal(f"{name} is a link that leads out of its folder: hand in the file itself")
        if path.name not in ANSWERS and any(
            path.samefile(answer) for file in ANSWERS for answer in self.folder.glob(f"*/{file}")
        ):
            raise refusal(f"{name} is a link to the answers: write a file of your own")
        if path.stat().st_size > MAX_SOURCE:
            raise refusal(f"{name} is larger than {MAX_SOURCE >> 20} MiB, and no exercise is: take the data out of it")
        text = path.read_text("utf-8", "replace")
        if not text.strip():
            raise refusal(f"{name} is empty: get the stub again (git checkout {path.name})")
        return text


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
