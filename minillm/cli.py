"""The `minillm` command. An error is one sentence.

Exit status: 0 done, 1 the work failed, 2 the command was wrong, 130 stopped by Ctrl-C. The last is what shells say (128 + the
number of the signal), and it lets a script tell a user who stopped the command from work that failed.
"""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from minillm.commands.parser import make_parser
from minillm.errors import MinillmError, UsageError, printable


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows another one
    try:
        args = make_parser().parse_args(argv)
        with _own_warnings_as_sentences():
            _run(args)
        sys.stdout.flush()
    except UsageError as error:
        return _fail(2, str(error))
    except MinillmError as error:
        return _fail(1, str(error))
    except KeyboardInterrupt as stop:
        return _fail(130, str(stop) or "Interrupted.")
    except BrokenPipeError:
        _discard_output()  # the reader left: nobody to tell
        return 1
    except OSError as error:
        _discard_output()
        return _fail(1, f"{error.filename or 'The output'} cannot be read or written: {error.strerror or error}.")
    except Exception as error:
        if os.environ.get("MINILLM_DEBUG"):
            raise
        if _is_out_of_memory(error):
            return _fail(1, "The device ran out of memory: use a smaller model or dtype, or fewer tokens.")
        summary = (str(error).splitlines() or ["it says no more"])[0].rstrip(".")
        return _fail(
            1, f"Unexpected {type(error).__name__}: {summary}; set MINILLM_DEBUG=1 to see where, and please report it."
        )
    return 0


def _run(args: argparse.Namespace) -> None:
    """Run the command that was asked for. Imports stand inside: PyTorch takes seconds, and a wrong command none of them."""
    match args.command:
        case "tour":
            from minillm.commands.tour import tour

            tour(args)
        case "generate":
            from minillm.commands.generate import generate

            generate(args)
        case "batch":
            from minillm.commands.batch import batch

            batch(args)
        case "roofline":
            from minillm.commands.roofline import roofline

            roofline(args)
        case "predict":
            from minillm.commands.predict import predict

            predict(args)
        case "profile":
            from minillm.commands.profile import profile

            profile(args)
        case "evaluate":
            from minillm.commands.evaluate import evaluate

            evaluate(args)
        case "grade":
            from minillm.grading.command import grade

            grade(args)
        case "doctor":
            from minillm.doctor import examine
            from minillm.report import make_console

            examine(make_console())


@contextmanager
def _own_warnings_as_sentences() -> Iterator[None]:
    """Shows what this package warns of as it shows an error, without a line of source."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category.__module__.startswith("minillm"):
                print(f"minillm: {message}", file=sys.stderr)
            else:
                show(message, category, *where, **more)

        warnings.showwarning = tell
        yield


def _is_out_of_memory(error: Exception) -> bool:
    """Told by name and words: PyTorch, whose errors these are, need not be loaded to ask. On a CPU it has no class for them."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _discard_output() -> None:
    """Send what is still buffered to nowhere, so that Python does not fail at it again on leaving."""
    with suppress(OSError):  # io.UnsupportedOperation, where the output is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(status: int, message: str) -> int:
    print(f"minillm: {printable(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
