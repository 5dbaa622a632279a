"""What the tests of commands share, beside the fixture `run` of conftest.py."""

import os
import subprocess
import sys
from typing import Protocol

# Tests that run in the background of a shell inherit a SIGINT that is ignored: Ctrl-C is to be heard all the same.
MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from minillm.cli import main
sys.exit(main())
"""


class Run(Protocol):
    """Runs a command in this process: its exit status, standard output and standard error."""

    def __call__(self, *argv: str) -> tuple[int, str, str]: ...


def process(*argv: str, **kwargs: object) -> subprocess.Popen[str]:
    """A command in a process of its own, begun and not waited for."""
    command = [sys.executable, "-c", MAIN, *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen(command, **options | kwargs)


def assert_one_sentence(error: str) -> None:
    """`minillm: ` and one sentence on one line, which says more than a word."""
    assert error.startswith("minillm: ")
    assert error.endswith(".\n")
    assert error.count("\n") == 1
    assert len(error) > 30
    assert "Traceback" not in error
    assert ". " not in error.removesuffix(".\n"), "more than one sentence"
    assert "MINILLM_DEBUG" not in error, "not foreseen"
