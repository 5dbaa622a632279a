"""The scorecard as text, and the table of a folder of submissions."""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from minillm.grading.engine import Scorecard

STATUSES = ("passed", "failed", "not attempted", "not graded")


def lines(card: Scorecard, width: int = 120) -> Iterator[str]:
    """The scorecard, one line an exercise; the sentence to an exercise is folded at `width`."""
    yield f"Scorecard of {card.package}, {card.folder}"
    name_width = max((len(result.id) for result in card.results), default=0)
    for result in card.results:
        head = f"{result.earned:>3} of {result.points}  {result.id:<{name_width}}  "
        body = result.status + (f": {result.why.removeprefix('not graded, ')}" if result.why else "")
        yield from textwrap.wrap(body, max(width, 60), initial_indent=head, subsequent_indent=" " * len(head))
    counts = ", ".join(f"{card.count(status)} {status}" for status in STATUSES)  # type: ignore[arg-type]
    yield f"{card.earned} of {card.points} points: {counts}."


def submissions_table(cards: Mapping[str, Scorecard]) -> Iterator[str]:
    """Students by points: one line a student, one column a chapter."""
    chapters = sorted({result.chapter for card in cards.values() for result in card.results})
    width = max(map(len, [*cards, "student"]))
    yield f"{'student':<{width}}  {'  '.join(f'{chapter:>9}' for chapter in chapters)}  {'points':>9}  notes"
    for student, card in cards.items():
        cells = []
        for chapter in chapters:
            results = [result for result in card.results if result.chapter == chapter]
            cells.append(f"{sum(r.earned for r in results)} of {sum(r.points for r in results)}")
        notes = ", ".join(f"{n} {status}" for status in STATUSES[2:] if (n := card.count(status)))  # type: ignore[arg-type]
        columns = "  ".join(f"{cell:>9}" for cell in [*cells, f"{card.earned} of {card.points}"])
        yield f"{student:<{width}}  {columns}  {notes}".rstrip()


def submitted_file(folder: Path, chapter: str) -> Path:
    """Where a student's folder holds a chapter: chNN/exercise.py or chNN.py."""
    flat = folder / f"{chapter}.py"
    return flat if flat.is_file() else folder / chapter / "exercise.py"
