"""Puts every fault of traps.py into a copy of this repository, one at a time, and shows that its test then fails.

    python tests/put_in_faults.py             all of them, in two processes: some seven minutes
    python tests/put_in_faults.py 6 11        those of the traps 6 and 11
    python tests/put_in_faults.py -j 8        in eight processes

Before, the tests must pass without any fault. A fault counts as caught only where a test *ran* and failed, not where it could
not be collected. Exits with 1 if one is missed.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from traps import TRAPS, Fault

ROOT = Path(__file__).parents[1]
COPIED = ("minillm", "tests", "benchmarks", "pyproject.toml")
TESTED = [(number, fault) for number, trap in TRAPS.items() for fault in trap.faults]


class Failures:
    """A pytest plugin that notes how tests failed."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # That hypothesis finds a machine too slow says nothing of the fault.
        if report.failed and report.when == "call" and "FailedHealthCheck" not in str(report.longrepr):
            self.messages.append(" ".join(str(report.longrepr.reprcrash.message).split())[:100])


def run_tests(tests: Sequence[str], fault: Fault | None = None) -> tuple[int, list[str]]:
    """pytest's exit status and the first failure in a copy with the fault, in this process: it must be a fresh one."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder)
        if fault is not None:
            path = Path(folder, fault.file)
            path.write_text(path.read_text().replace(fault.old, fault.new))
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True
        failures = Failures()
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{t}" for t in tests)], [failures])
        import minillm

        assert minillm.__file__.startswith(folder), "the copy was not what was tested"
        os.chdir(ROOT)
    return int(status), failures.messages


def put_in(fault: Fault) -> tuple[bool, str, float]:
    """Whether the fault was caught, by what, and in how many seconds."""
    start = time.perf_counter()
    status, messages = run_tests([fault.test], fault)
    caught = status == pytest.ExitCode.TESTS_FAILED and bool(messages)
    return caught, messages[0] if messages else f"pytest ended with {status}", time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traps", nargs="*", type=int, help="numbers of traps, all by default")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="processes (2)")
    args = parser.parse_args()
    chosen = [(number, fault) for number, fault in TESTED if not args.traps or number in args.traps]
    tests = sorted({fault.test for _, fault in chosen})
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # Every run gets a process of its own, which has imported what takes long and nothing of minillm.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest", "hypothesis", "transformers"])
    with context.Pool(args.j, maxtasksperchild=1) as pool:
        parts = [part for i in range(args.j) if (part := tests[i :: args.j])]
        for status, messages in pool.imap(run_tests, parts, chunksize=1):
            if status:
                print(f"Without any fault, tests fail or do not run (status {status}): {messages}")
                return 1
        print(f"{len(tests)} tests pass without faults.", flush=True)
        missed = 0
        results = pool.imap(put_in, [fault for _, fault in chosen], chunksize=1)
        for (number, fault), (caught, message, seconds) in zip(chosen, results, strict=True):
            missed += not caught
            print(
                f"{number:2} {'caught' if caught else 'MISSED'} {seconds:5.1f} s  {fault.test}: {message}", flush=True
            )
    print(f"{len(chosen) - missed} of {len(chosen)} faults were caught.")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
