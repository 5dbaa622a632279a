"""How mutants meet the tests, fast: what `mutate.py` runs.

PyTorch is imported and the tests are collected once; each mutant is a forked child in which only the code of the faulty
function is exchanged (`Warm`). It runs the tests that reach the faulty line, the shortest first, up to the first that fails,
as many seconds of them as are given: with fewer seconds more mutants seem to survive, never fewer. What acts while a module
is imported (defaults, constants) is tried in a child that imports everything anew (`Cold`). Nothing on disk changes. A child
that takes far longer than the right code, or far more memory, has failed: that is noticed too. Tests on the real model and
those that call a compiler take longer than all others and are left out; tests that start a process of their own see the
right code there.
"""

import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import linecache
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import pytest
from _pytest.runner import runtestprotocol
from mutations import Mutant, mutants

SURVIVED, KILLED, ASK_COLD = 0, 1, 3  # exit status of a child
MEMORY = 4 << 30  # bytes that a child may take beyond what its parent has
T = TypeVar("T")


def in_children(work: Callable[[T], int], tasks: Iterable[T], jobs: int) -> Iterator[tuple[T, int]]:
    """Each task in a forked child, at most `jobs` at once: yields it and the exit status, negative for a signal."""
    waiting, running = iter(tasks), {}
    while True:
        while len(running) < jobs and (task := next(waiting, None)) is not None:
            if (pid := os.fork()) == 0:
                status = KILLED
                try:
                    status = work(task)
                finally:
                    os._exit(status)
            running[pid] = task
        if not running:
            return
        pid, status = os.wait()
        yield running.pop(pid), os.waitstatus_to_exitcode(status)


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def passes(items: Sequence[pytest.Item], spent: Mapping[str, float], set_up: float) -> bool:
    """Whether all of these tests pass; stops at the first that does not. A test that hangs ends the process.

    Any of them may be the first to need a fixture, so each has the time that the longest took to be set up.
    """
    for item, following in zip(items, [*items[1:], items[-1].session] if items else [], strict=True):
        limit = 1 + 5 * (spent[item.nodeid] + set_up)
        # Seconds of the processor, as what others run beside it does not count; and of the clock, for a test that waits.
        signal.setitimer(signal.ITIMER_PROF, limit)
        signal.alarm(300 + int(100 * limit))
        if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):  # type: ignore[arg-type]
            return False
    return True


class Tracer:
    """A trace function that notes which lines of some files run."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.lines: dict[str, set[int]] = {str(path): set() for path in paths}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self.lines:
            return None
        return self.line(frame, event, argument)

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        self.lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self.line


def functions_of(path: Path) -> dict[tuple[str, int], list[FunctionType]]:
    """All functions that exist whose code is in this file, by qualified name and first line: decorated ones too."""
    found: dict[tuple[str, int], list[FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename == str(path):
            found.setdefault((thing.__qualname__, thing.__code__.co_firstlineno), []).append(thing)
    return found


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A code object and all that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


Announce = Callable[[str, Mutant, str], None]  # called for each survivor as it is found: module, mutant, note


def within(items: Sequence[pytest.Item], spent: Mapping[str, float], seconds: float) -> list[pytest.Item]:
    """The shortest of these tests, the shortest first: those that begin within so many seconds."""
    ordered = sorted(items, key=lambda item: spent[item.nodeid])
    starts = itertools.accumulate((spent[item.nodeid] for item in ordered), initial=0.0)
    return [item for item, start in zip(ordered, starts, strict=False) if start < seconds]


@dataclass
class Target:
    """A module under test."""

    module: str  # its import name
    path: Path
    source: str
    found: list[Mutant]
    tried: list[int]  # which of those; the others are known to be killed


Name = tuple[int, int]  # of a mutant: which target, and which of its mutants


@dataclass
class Warm:
    """A pytest plugin that tries mutants with the tests collected: exchanges code in children. Writes `warm.json`."""

    targets: Sequence[Target]
    jobs: int
    seconds: float  # of tests for each mutant
    announce: Announce
    folder: Path
    tracer: Tracer
    set_up: float = 0.0  # seconds of the longest setup

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        start = time.process_time()
        try:
            return (yield)
        finally:
            self.set_up = max(self.set_up, time.process_time() - start)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed or not session.items:
            raise pytest.UsageError("The tests of this module cannot be collected: run them alone.")
        for target in self.targets:
            importlib.import_module(
                target.module
            )  # where only a test would import it, there is no code to exchange yet
        sys.settrace(None)
        measured = self._measured(session.items)
        spent = {nodeid: seconds for nodeid, (seconds, _) in measured.items()}
        set_up = self.set_up  # as found, not as a mutant makes it
        existing = [functions_of(target.path) for target in self.targets]

        def reaching(name: Name) -> list[pytest.Item]:
            path, touches = str(self.targets[name[0]].path), self._mutant(name).touches
            items = [item for item in session.items if not measured[item.nodeid][1][path].isdisjoint(touches)]
            return within(items, spent, self.seconds)

        def trial(name: Name) -> int:
            limit_memory()
            show(self._mutant(name).source, self.targets[name[0]].path)
            if not exchanged(self._mutant(name), self.targets[name[0]].path, existing[name[0]]):
                return ASK_COLD
            return SURVIVED if passes(reaching(name), spent, set_up) else KILLED

        gc.freeze()  # else a collection in a child would copy the memory that it shares with its parent
        names = [(t, i) for t, target in enumerate(self.targets) for i in target.tried]
        warm = [name for name in names if self._mutant(name).function is not None and reaching(name)]
        unreached = [name for name in names if self._mutant(name).function is not None and not reaching(name)]
        outcomes = dict.fromkeys(names, ASK_COLD) | dict.fromkeys(unreached, SURVIVED)
        for name in unreached:
            self._decide(name, SURVIVED, outcomes, "no test runs it")
        for name, status in in_children(trial, warm, self.jobs):
            self._decide(name, status, outcomes)
        told = {"spent": spent, "set_up": set_up, "outcomes": list(outcomes.items())}
        (self.folder / "warm.json").write_text(json.dumps(told))
        return True

    def _decide(self, name: Name, status: int, outcomes: dict[Name, int], note: str = "") -> None:
        """A survivor that also acts while tests are collected is tried again: then the right code was there."""
        imported = self.tracer.lines[str(self.targets[name[0]].path)]
        if status == SURVIVED and not imported.isdisjoint(self._mutant(name).touches):
            status = ASK_COLD
        outcomes[name] = status
        if status == SURVIVED:
            self.announce(self.targets[name[0]].module, self._mutant(name), note)

    def _mutant(self, name: Name) -> Mutant:
        return self.targets[name[0]].found[name[1]]

    def _measured(self, items: Sequence[pytest.Item]) -> dict[str, tuple[float, dict[str, set[int]]]]:
        """For each test the seconds it takes and the lines it runs; found in a child, so that the parent has run none."""

        def measure(file: Path) -> int:
            rows = {}
            for item, following in zip(items, [*items[1:], items[-1].session], strict=True):
                tracer, start = Tracer(target.path for target in self.targets), time.process_time()
                sys.settrace(tracer)
                reports = runtestprotocol(item, nextitem=following, log=False)  # type: ignore[arg-type]
                sys.settrace(None)
                if failed := [report for report in reports if report.failed]:
                    file.write_text(json.dumps({"failed": item.nodeid, "why": str(failed[0].longrepr)}))
                    return KILLED
                lines = {path: sorted(numbers) for path, numbers in tracer.lines.items()}
                rows[item.nodeid] = (time.process_time() - start, lines)
            file.write_text(json.dumps({"rows": rows, "set_up": self.set_up}))
            return SURVIVED

        file = self.folder / "measured.json"
        list(in_children(measure, [file], 1))
        told = json.loads(file.read_text())
        if "failed" in told:
            raise pytest.UsageError(f"{told['failed']} fails on the code as it is: {told['why']}")
        self.set_up = told["set_up"]
        return {
            nodeid: (seconds, {path: set(numbers) for path, numbers in lines.items()})
            for nodeid, (seconds, lines) in told["rows"].items()
        }


def exchanged(mutant: Mutant, path: Path, existing: dict[tuple[str, int], list[FunctionType]]) -> bool:
    """Give every function of the mutant's name, and those made in it, the faulty code. False where only a new import can."""
    codes = {(code.co_qualname, code.co_firstlineno): code for code in codes_of(compile(mutant.source, path, "exec"))}
    done = False
    for (name, line), functions in existing.items():
        if not f"{name}.".startswith(f"{mutant.function}.") or (name, line) not in codes:
            continue
        for function in functions:
            if len(function.__code__.co_freevars) != len(codes[name, line].co_freevars):
                return False
            function.__code__ = codes[name, line]
            done = True
    return done


def show(source: str, path: Path) -> None:
    """Give this source to whoever asks for that of the file: Triton's interpreter runs what it reads there."""
    # An entry without a time is not compared with the file.
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))


class Cold:
    """A pytest plugin that runs the collected tests, the shortest first, and ends the process with the outcome."""

    def __init__(self, spent: dict[str, float], set_up: float, seconds: float) -> None:
        self.spent, self.set_up, self.seconds = spent, set_up, seconds

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed or {item.nodeid for item in session.items} != self.spent.keys():
            os._exit(KILLED)
        shortest = within(session.items, self.spent, self.seconds)
        os._exit(SURVIVED if passes(shortest, self.spent, self.set_up) else KILLED)


class FaultyImport(importlib.abc.MetaPathFinder):
    """Imports one module from a source of our own, under the path of the right one."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        self.module, self.path, self.source = module, path, source

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        source = self.source

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return compile(source, self.path, "exec")

        return importlib.util.spec_from_file_location(name, self.path, loader=Loader(name, str(self.path)))


@dataclass
class Outcome:
    """What became of a module's mutants."""

    found: list[Mutant]
    killed: list[Mutant]
    timeouts: int  # of those killed: stopped by a limit of time
    survivors: list[Mutant]


def run_pytest(tests: Sequence[Path], plugin: object) -> None:
    """pytest in this process, of which nothing is printed and nothing kept."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    without = [word for name in ("cacheprovider", "randomly", "xdist") for word in ("-p", f"no:{name}")]
    pytest.main(
        ["-q", "--tb=native", "--hypothesis-profile=mutate", *without, *map(str, tests)],
        plugins=[WithoutSlow(), plugin],
    )


class WithoutSlow:
    """Leaves out tests that each child would spend longer on than on all the others: they load a real model, or compile."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        slow = {"smollm2", "compiled_code"}
        items[:] = [item for item in items if slow.isdisjoint(getattr(item, "fixturenames", ()))]


def try_modules(
    modules: Mapping[str, Path],
    tests: Sequence[Path],
    jobs: int,
    seconds: float,
    announce: Announce,
    is_tried: Callable[[str, Mutant], bool] = lambda module, mutant: True,
) -> dict[str, Outcome]:
    """Put mutants of modules, given with their files, before the tests that they share, one mutant at a time.

    The tests of a mutant are the shortest of those that reach it, so many seconds of them. What is not tried counts as killed.
    Raises `RuntimeError` where the tests fail on the right code.
    """
    targets = []
    for module, path in modules.items():
        found = mutants(source := path.read_text())
        tried = [i for i, mutant in enumerate(found) if is_tried(module, mutant)]
        targets.append(Target(module, path, source, found, tried))
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary  # tests leave files: they go with this folder
        told = try_warm(targets, tests, jobs, seconds, announce, Path(temporary))
        outcomes: dict[Name, int] = {(t, i): status for (t, i), status in told["outcomes"]}
        cold = [name for name, status in outcomes.items() if status == ASK_COLD]
        run = Cold(told["spent"], told["set_up"], seconds)
        for name, status in try_cold(targets, cold, tests, jobs, run):
            outcomes[name] = status
            if status == SURVIVED:
                announce(targets[name[0]].module, targets[name[0]].found[name[1]], "")
        del os.environ["TMPDIR"]
        tempfile.tempdir = None
    return {target.module: outcome_of(t, target, outcomes) for t, target in enumerate(targets)}


def names_of(targets: Sequence[Target]) -> str:
    return ", ".join(target.module for target in targets)


def try_warm(
    targets: Sequence[Target], tests: Sequence[Path], jobs: int, seconds: float, announce: Announce, folder: Path
) -> dict[str, Any]:
    """What `Warm` tells of all mutants; it runs in a child, so that this process has imported none of the modules."""

    def warm(_: int) -> int:
        tracer = Tracer(target.path for target in targets)
        sys.settrace(tracer)
        run_pytest(tests, Warm(targets, jobs, seconds, announce, folder, tracer))
        return SURVIVED

    list(in_children(warm, [0], 1))
    if not (folder / "warm.json").exists():
        measured = folder / "measured.json"
        why = measured.read_text() if measured.exists() else "They cannot be collected."
        raise RuntimeError(f"The tests of {names_of(targets)} fail on the code as it is. {why}")
    told: dict[str, Any] = json.loads((folder / "warm.json").read_text())
    return told


def try_cold(
    targets: Sequence[Target], names: Sequence[Name], tests: Sequence[Path], jobs: int, run: Cold
) -> Iterator[tuple[Name, int]]:
    """These mutants once more, each in a child that imports everything anew: yields the name and how it ended."""

    def trial(name: Name) -> int:
        limit_memory()
        target = targets[name[0]]
        source = target.source if name == unchanged else target.found[name[1]].source
        show(source, target.path)
        sys.meta_path.insert(0, FaultyImport(target.module, target.path, source))
        run_pytest(tests, run)
        return KILLED  # the tests did not even begin

    unchanged = (0, -1)  # must survive, or the others that do not would say nothing
    for name, status in in_children(trial, [unchanged, *names], jobs):
        if name != unchanged:
            yield name, status
        elif status != SURVIVED:
            raise RuntimeError(
                f"The tests of {names_of(targets)} fail where nothing is changed, the shortest run first."
            )


def outcome_of(t: int, target: Target, outcomes: Mapping[Name, int]) -> Outcome:
    """Of target number t; a mutant that was not tried counts as killed."""
    status = [outcomes.get((t, i), KILLED) for i in range(len(target.found))]
    return Outcome(
        target.found,
        [mutant for mutant, end in zip(target.found, status, strict=True) if end != SURVIVED],
        sum(end in (-signal.SIGPROF, -signal.SIGALRM) for end in status),
        [mutant for mutant, end in zip(target.found, status, strict=True) if end == SURVIVED],
    )


def prepare() -> None:
    """What every child needs and none changes."""
    # PyTorch loads its compiler, which takes seconds, when a mode first sees an operator: in each child, were it not here.
    for name in (
        "torch", "torch._inductor", "numpy", "hypothesis", "safetensors.torch", "tokenizers", "gguf", "rich.console",
    ):  # fmt: skip
        importlib.import_module(name)
    import hypothesis
    import torch

    torch.set_num_threads(1)  # a child has none of its parent's threads
    hypothesis.settings.register_profile(
        "mutate",
        database=None,
        derandomize=True,  # the same mutants survive each time
        deadline=None,
        # One failure is enough: no smaller one is sought.
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
