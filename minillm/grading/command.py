"""`minillm grade`: the scorecard of one learner, or of a folder of submissions.

Exit status 0 when everything was graded, whatever was earned; 1 when graders are missing or were changed, so that nothing can
be said; 2 for a wrong command.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from minillm.errors import MinillmError, UsageError
from minillm.files import check_writable, write_file, write_json
from minillm.grading import scorecard
from minillm.grading.catalog import find_exercises, select
from minillm.grading.channel import TIME_LIMIT
from minillm.grading.engine import Grading, Scorecard
from minillm.report import make_console


def grade(args: argparse.Namespace) -> None:
    """Grade what the arguments ask for, print it and write the JSON. Raises `UsageError` and `MinillmError`."""
    check_writable(args.json, args.csv)
    folder, names = find_exercises(args.exercises), select(args.chapter)
    if args.solutions and args.submissions:
        raise UsageError("Grade either --solutions or --submissions.")
    if args.csv and not args.submissions:
        raise UsageError(
            "--csv has a line for each student, so it needs --submissions DIR: for one scorecard use --json."
        )
    students = _students(args.submissions) if args.submissions else []
    with Grading(folder, time_limit=args.time_limit or TIME_LIMIT) as grading:
        if args.submissions:
            cards = {student.name: _submission(grading, names, student) for student in students}
            _print(*scorecard.submissions_table(cards))
            data: object = {student: card.as_json() for student, card in cards.items()}
            if args.csv:
                write_file(args.csv, scorecard.submissions_csv(cards).encode())
        else:
            file = "solution.py" if args.solutions else "exercise.py"
            what = "the solutions" if args.solutions else "exercises"
            card = Scorecard(f"{what} in {folder}")
            card.results += grading.grade(names, lambda chapter: folder / chapter / file)
            _print(*scorecard.lines(card, make_console().width))
            data = card.as_json()
        if args.json:
            write_json(args.json, data)
        if grading.damaged:
            raise MinillmError(f"{len(grading.damaged)} chapter(s) could not be graded: {'; '.join(grading.damaged)}")


def _print(*lines: str) -> None:
    for line in lines:
        print(line)
    sys.stdout.flush()


def _students(path: str) -> list[Path]:
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{path} is no folder: name one that holds a folder for each student.")
    students = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not students:
        raise UsageError(f"{path} is empty: it needs a folder for each student, with chNN/exercise.py or chNN.py.")
    return students


def _submission(grading: Grading, names: Mapping[str, Sequence[str]], student: Path) -> Scorecard:
    card = Scorecard(str(student))
    card.results += grading.grade(names, lambda chapter: scorecard.submitted_file(student, chapter), within=student)
    return card
