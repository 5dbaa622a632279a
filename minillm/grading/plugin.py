"""`pytest exercises`: each exercise of a grader file is a test, graded in a process of its own, and a scorecard at the end.

`exercises/conftest.py` takes these hooks. A failure is one sentence, without a traceback, which would
lead into the grader. An exercise that is not attempted counts as skipped; one that was not graded is never green.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm.errors import MinillmError
from minillm.grading import catalog, scorecard
from minillm.grading.engine import Grading, Result, Scorecard

_GRADING = pytest.StashKey[Grading]()
_CARD = pytest.StashKey[Scorecard]()


class Ungreen(Exception):
    """An exercise that did not pass. Its text is the sentence for the learner."""


class GraderFile(pytest.Module):
    """A `test_exercise.py`: one item an exercise. The file itself is run by the engine, if it is unchanged."""

    def collect(self) -> Iterator[pytest.Item]:
        chapter = self.path.parent.name
        for name in catalog.select(chapter)[chapter]:
            yield ExerciseItem.from_parent(self, name=name)


class ExerciseItem(pytest.Item):
    """One exercise of the learner's `exercise.py`."""

    result: Result | None = None

    @property
    def learner_file(self) -> Path:
        return self.path.with_name("exercise.py")

    def runtest(self) -> None:
        stash = self.config.stash
        if _GRADING not in stash:
            stash[_GRADING] = Grading(self.path.parents[1])
            stash[_CARD] = Scorecard(f"exercises of {self.path.parents[1]}")
        self.result = stash[_GRADING].grade_one(self.path.parent.name, self.name, self.learner_file)
        stash[_CARD].results.append(self.result)
        if self.result.status == "not attempted":
            pytest.skip(self.result.why)
        if self.result.status != "passed":
            raise Ungreen(self.result.why)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, (Ungreen, MinillmError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.learner_file, self._line(), f"{self.path.parent.name}/{self.name}"

    def _line(self) -> int:
        """Where the learner's file defines the function, counted from 0; 0 for an exercise on a class."""
        text = self.learner_file.read_text("utf-8", "replace") if self.learner_file.is_file() else ""
        starts = (n for n, line in enumerate(text.splitlines()) if line.startswith(f"def {self.name}("))
        return next(starts, 0)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.name != "test_exercise.py":
        return None
    return GraderFile.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    if isinstance(item, ExerciseItem) and report.skipped and item.result:
        # Where a skip is reported from: the learner's function, not this file.
        report.longrepr = (str(item.learner_file), item._line() + 1, f"Skipped: {item.result.why}")
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _CARD in config.stash:
        terminalreporter.section("scorecard")
        for line in scorecard.lines(config.stash[_CARD]):
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _GRADING in config.stash:
        config.stash[_GRADING].__exit__()
