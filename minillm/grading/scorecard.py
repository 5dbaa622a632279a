"""The scorecard as text, and the table of a folder of submissions, as text and as CSV."""

import csv
import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from minillm.errors import printable
from minillm.grading.engine import Scorecard, Status


def lines(card: Scorecard, width: int = 120) -> Iterator[str]:
    """The scorecard, one line an exercise; the sentence to an exercise is folded at `width`."""
    yield f"Scorecard of {card.package}, {card.folder}"
    name_width = max((len(result.id) for result in card.results), default=0)
    for result in card.results:
        head = f"{result.earned:>3} of {result.points}  {result.id:<{name_width}}  "
        body = result.status + (f": {result.why.removeprefix('not graded, ')}" if result.why else "")
        yield from textwrap.wrap(body, max(width, 60), initial_indent=head, subsequent_indent=" " * len(head))
    counts = ", ".join(f"{card.count(status)} {status}" for status in get_args(Status))
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
        columns = "  ".join(f"{cell:>9}" for cell in [*cells, f"{card.earned} of {card.points}"])
        yield f"{printable(student):<{width}}  {columns}  {'; '.join(_notes(card, chapters))}".rstrip()


def _notes(card: Scorecard, chapters: Sequence[str]) -> Iterator[str]:
    """What the points do not tell: what was not attempted, and why nothing can be said about the rest."""
    folder = Path(card.folder)
    absent = [chapter for chapter in chapters if not submitted_file(folder, chapter).exists()]
    if n := card.count("not attempted"):
        yield f"{n} not attempted"
    refused = [result.why for result in card.results if result.status == "not graded" and result.chapter not in absent]
    if refused:
        whys = dict.fromkeys(why.removeprefix("not graded, because ").removeprefix("of this: ") for why in refused)
        yield printable(f"{len(refused)} not graded: {' '.join(whys)}").removesuffix(".")
    if absent == chapters:
        only = ", only a notebook, which is not graded" if any(folder.glob("**/*.ipynb")) else ""
        yield f"nothing handed in as chNN/exercise.py or chNN.py{only}"
    elif absent:
        yield f"nothing handed in for {', '.join(absent)}"


def submissions_csv(cards: Mapping[str, Scorecard]) -> str:
    """One line a student: the points of each exercise, and of all."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for student, card in cards.items():
        if not text.tell():
            rows.writerow(["student", *(result.id for result in card.results), "earned", "points"])
        # A spreadsheet takes a name that begins like a formula for one, and computes it.
        name = f"'{student}" if student.startswith(("=", "+", "-", "@")) else student
        rows.writerow([printable(name), *(result.earned for result in card.results), card.earned, card.points])
    return text.getvalue()


def submitted_file(folder: Path, chapter: str) -> Path:
    """Where a student's folder holds a chapter: chNN/exercise.py or chNN.py."""
    flat = folder / f"{chapter}.py"
    return flat if flat.is_file() else folder / chapter / "exercise.py"
