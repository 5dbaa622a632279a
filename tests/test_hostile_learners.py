"""What learners' files do to a grader: nothing. No trick earns a point, each costs its own exercise only, in one sentence."""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minillm.grading import stubs, wire
from minillm.grading.engine import Grading, Result
from minillm.grading.errors import Wrong
from minillm.grading.process import ProcessChannel, Workers

EXERCISES = Path(__file__).parents[1] / "exercises"
GOOD = "def ridge(peak, bandwidth):\n    return peak / bandwidth\n"
NAMES = ["ttft", "ridge"]


def _has_landlock(version: int = 1) -> bool:
    """Whether the kernel keeps a process from files itself: it tells its version of Landlock."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)) >= version)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers


def grade(workers: Workers, folder: Path, code: str, names: list[str] = NAMES) -> dict[str, Result]:
    """Results for a file with this `ttft`, and a right `ridge` after it."""
    path = folder / "exercise.py"
    path.write_text(code)
    # These reach the limit; nothing else may, however busy the machine is.
    loops = "while True" in code or "sleep(" in code
    grading = Grading(EXERCISES, workers, time_limit=3 if loops else 60)
    return {r.exercise: r for r in grading.grade({"ch00": names}, lambda chapter: path)}


def is_one_sentence(why: str) -> bool:
    return "\n" not in why and why.endswith(".") and 15 < len(why) < 400 and "Traceback" not in why


# What stands in `ttft`, and what its sentence says.
BODIES = {
    "endless loop": ("while True: pass", "never ends"),
    "endless sleep": ("import time; time.sleep(1000)", "never ends"),
    "endless recursion": ("return ttft(start, tokens)", "calls itself"),
    "swallows interrupts": (
        """
        while True:
            try:
                while True: pass
            except BaseException: pass
        """,
        "never ends",
    ),
    "abort": ("import os; os.abort()", "crashes Python"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "crashes Python"),
    "kill": ("import ctypes; libc = ctypes.CDLL(None); libc.kill(libc.getpid(), 9)", "crashes Python (SIGKILL)"),
    "sys.exit(0)": ("import sys; sys.exit(0)", "sys.exit"),
    "os._exit(0)": ("import os; os._exit(0)", "return instead"),
    "huge list": ("return [0] * 10**12", "memory"),
    "huge tensor": ("import torch; return torch.zeros(10**12)", "memory"),
    "growing list": (
        """
        x = []
        while True: x.append(bytes(1 << 24))  # of memory that is asked for and never touched: it takes no time
        """,
        "memory",
    ),
    "None": ("return", "None"),
    "print and nothing": ("print(tokens[0] - start)", "None"),
    "text": ("return str(tokens[0] - start)", "text"),
    "truth": ("return True", "truth value"),
    "NaN": ("return float('nan')", "NaN"),
    "infinity": ("return float('inf')", "should give"),
    "huge number": ("return 10**400", "should give"),
    "number beyond printing": ("return 10**100_000", "number is due"),
    "list": ("return [tokens[0] - start]", "a list"),
    "itself": ("x = []; x.append(x); return x", "ttft("),
    "deep": (
        """
        x = 0
        for _ in range(100_000): x = [x]
        return x
        """,
        "ttft(",
    ),
    "generator": ("yield tokens[0] - start", "generator"),
    "always equal": (
        """
        class Yes:
            def __eq__(self, other): return True
            def __sub__(self, other): return 0.0
            __rsub__ = __abs__ = __float__ = __sub__
        return Yes()
        """,
        "Yes",
    ),
    "always equal float": (
        """
        class Yes(float):
            def __eq__(self, other): return True
            def __sub__(self, other): return 0.0
            __hash__ = None
        return Yes(5e9)
        """,
        "should give",
    ),
    "mutated input": ("first = tokens.pop(0); return first - start", "copy"),
    "cleared input": ("first = tokens[0]; tokens.clear(); return first - start", "copy"),
    "exception": ("return tokens[99]", "IndexError"),
    "exception of many lines": ("raise RuntimeError('one\\ntwo\\nthree' * 500)", "RuntimeError"),
    "exception that cannot be printed": (
        """
        class E(Exception):
            def __str__(self): raise SystemExit
        raise E
        """,
        "ttft(",
    ),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "exit by signal": ("import signal, os; signal.raise_signal(signal.SIGTERM)", "crashes Python"),
    "processes": ("import os; os.fork(); return 0.0", "os.fork"),
    "commands": ("import subprocess; subprocess.run(['sleep', '1000'])", "not for an exercise"),
    "kills the grader": ("import os; os.kill(os.getppid(), 9)", "not for an exercise"),
    "patched comparison": (
        """
        import math
        math.isclose = lambda *a, **k: True
        return 0.0
        """,
        "should give",
    ),
    "patched grader": (
        """
        import minillm.grading as g, minillm.grading.answer as a, minillm.grading.engine as e
        a.Answer.number = lambda *x, **k: None
        a.ask = g.ask = lambda *x: None
        e.run_grader = lambda *x: ('passed', '')
        return 0.0
        """,
        "should give",
    ),
    "patched pytest": (
        """
        import builtins, sys
        sys.modules['pytest'] = None
        builtins.AssertionError = SystemExit
        builtins.isinstance = lambda *x: True
        return 0.0
        """,
        "ttft(",
    ),
    "forged message": (
        """
        import gc, socket, struct, json
        for s in [o for o in gc.get_objects() if isinstance(o, socket.socket) and o.fileno() >= 0]:
            m = json.dumps({'passed': True, 'returned': None, 'printed': 0}).encode()
            m = struct.pack('>I', len(m)) + m
            s.sendall(struct.pack('>Q', len(m)) + m)
        return 0.0
        """,
        "ttft(",
    ),
    "noise on the socket": (
        """
        import gc, socket
        for s in [o for o in gc.get_objects() if isinstance(o, socket.socket) and o.fileno() >= 0]:
            s.sendall(b'\\xff' * 64)
        return 0.0
        """,
        "ttft(",
    ),
    "half a message": (
        """
        import gc, socket, struct, time
        for s in [o for o in gc.get_objects() if isinstance(o, socket.socket) and o.fileno() >= 0]:
            s.sendall(struct.pack('>Q', 9999))
        time.sleep(99)
        """,
        "never ends",
    ),
    "code in a dtype": ("import numpy as np; return np.array([lambda: 0], dtype=object)", "ndarray"),
    "tensor of NaN": ("import torch; return torch.tensor(float('nan'))", "NaN"),
}


@pytest.mark.parametrize("name", BODIES)
def test_trick_earns_nothing_and_costs_nothing(workers: Workers, tmp_path: Path, name: str) -> None:
    body, says = BODIES[name]
    body = textwrap.indent(textwrap.dedent(body), "    ")
    results = grade(workers, tmp_path, f"def ttft(start, tokens):\n{body}\n\n\n{GOOD}")
    assert (results["ttft"].status, results["ttft"].earned) == ("failed", 0)
    assert says in results["ttft"].why, results["ttft"].why
    assert is_one_sentence(results["ttft"].why), results["ttft"].why
    assert (results["ridge"].status, results["ridge"].earned) == ("passed", 1), results["ridge"].why


FILES = {
    "syntax error": ("def ttft(start, tokens)\n    return 0\n", "line 1 of exercise.py is not Python"),
    "tabs and spaces": ("def ttft(start, tokens):\n\treturn 0\n        return 1\n", "is not Python"),
    "import error": ("import nothing_of_this_name\n", "ModuleNotFoundError"),
    "name error": ("ttft = undefined\n", "line 1 of exercise.py raises NameError"),
    "exit on import": ("import sys\nsys.exit(0)\n", "SystemExit"),
    "end on import": ("import os\nos._exit(0)\n", "ends Python"),
    "crash on import": ("import os\nos.abort()\n", "crashes Python"),
    "loop on import": ("while True: pass\n", "never ends"),
    "no text": ("\x00\x00", "exercise.py"),
}


@pytest.mark.parametrize("name", FILES)
def test_broken_file_is_not_graded_and_says_so_once(workers: Workers, tmp_path: Path, name: str) -> None:
    code, says = FILES[name]
    results = grade(workers, tmp_path, code + GOOD, ["ttft", "itl", "tpot", "ridge"])
    assert {(r.status, r.earned) for r in results.values()} == {("not graded", 0)}
    assert len({r.why for r in results.values()}) == 1
    why = results["ttft"].why
    assert says in why and is_one_sentence(why) and why.startswith("not graded, because")


def test_missing_file_is_not_graded(workers: Workers, tmp_path: Path) -> None:
    result = Grading(EXERCISES, workers).grade_one("ch00", "ttft", tmp_path / "exercise.py")
    assert result.status == "not graded" and "there is no" in result.why and is_one_sentence(result.why)


@pytest.mark.parametrize(
    "code", ["", "def time_to_first_token(start, tokens):\n    return 0.5\n", "ttft = None\n", "ttft = 5\n"]
)
def test_renamed_function_fails_and_says_which_name_must_stay(workers: Workers, tmp_path: Path, code: str) -> None:
    results = grade(workers, tmp_path, code + GOOD)
    assert results["ttft"].status == "failed" and "keep the name" in results["ttft"].why
    assert is_one_sentence(results["ttft"].why)
    assert results["ridge"].status == "passed"


def test_wrong_number_of_parameters_is_told(workers: Workers, tmp_path: Path) -> None:
    results = grade(workers, tmp_path, "def ttft(tokens):\n    return 0.5\n" + GOOD)
    assert "TypeError" in results["ttft"].why and is_one_sentence(results["ttft"].why)


def test_half_written_class_says_which_part_is_missing(workers: Workers, tmp_path: Path) -> None:
    path = tmp_path / "exercise.py"
    path.write_text(
        "import torch\nclass KVCache:\n    def __init__(self, config, capacity):\n        self.length = 0\n"
        "    def positions(self, n_tokens):\n        self.length += n_tokens\n"
        "        return torch.arange(self.length - n_tokens, self.length)[None]\n"
        "    def attend(self, layer, q, k, v):\n        raise NotImplementedError('Append k and v.')\n"
    )
    result = Grading(EXERCISES, workers).grade_one("ch02", "cache_decode", path)
    assert (result.status, result.why) == ("failed", "A part is still to be written: Append k and v.")


def test_much_printing_is_not_shown_and_is_mentioned(
    workers: Workers, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flood = (
        "import os, sys\ndef ttft(start, tokens):\n    print('x' * 1_000_000)\n    os.write(1, b'y' * 1_000_000)\n"
        "    return tokens[0] - start\n"
    )
    results = grade(workers, tmp_path, flood + GOOD)
    assert results["ttft"].status == "passed"
    assert "printed" in results["ttft"].why and is_one_sentence(results["ttft"].why)
    assert capfd.readouterr() == ("", "")


def test_right_answers_of_unusual_types_pass(workers: Workers, tmp_path: Path) -> None:
    code = (
        "import numpy as np, torch\nfrom fractions import Fraction\n"
        "def ttft(start, tokens):\n    return torch.tensor(tokens[0] - start, dtype=torch.float64)\n"
        "def itl(tokens):\n    return np.diff(tokens)\n"
        "def tpot(start, tokens):\n    return np.diff(tokens).mean() if len(tokens) > 1 else None\n"
        "def ridge(peak, bandwidth):\n    return Fraction(peak) / Fraction(bandwidth)\n"
    )
    results = grade(workers, tmp_path, code, ["ttft", "itl", "tpot", "ridge"])
    assert {r.status for r in results.values()} == {"passed"}, results


def test_hard_coded_answers_to_the_examples_fail(workers: Workers, tmp_path: Path) -> None:
    results = grade(workers, tmp_path, "def ttft(start, tokens):\n    return 0.5\n" + GOOD)
    assert results["ttft"].status == "failed"


@pytest.mark.parametrize(
    "code",
    [
        "from solution import ttft\n",
        "ns = {}\nexec(open('%s').read(), ns)\nttft = ns['ttft']\n",
        "def ttft(start, tokens):\n    import runpy\n    return runpy.run_path('%s')['ttft'](start, tokens)\n",
    ],
)
def test_answers_are_closed_while_a_file_is_graded(workers: Workers, tmp_path: Path, code: str) -> None:
    shutil.copy(EXERCISES / "ch00/solution.py", tmp_path)
    code = code.replace("%s", str(tmp_path / "solution.py"))
    result = grade(workers, tmp_path, code + GOOD)["ttft"]
    assert result.status != "passed" and "answers are closed" in result.why and is_one_sentence(result.why)


def test_source_too_deep_to_parse_is_not_parsed_by_the_grader(workers: Workers, tmp_path: Path) -> None:
    deep = f"def ttft(start, tokens):\n    x = lambda: {'-' * 500}1\n    raise NotImplementedError('Later.')\n"
    result = grade(workers, tmp_path, deep + GOOD)["ttft"]
    assert result.status == "failed" and is_one_sentence(result.why)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_processes_left_behind_are_ended(workers: Workers, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    body = (
        "import ctypes, time\ndef ttft(start, tokens):\n    libc = ctypes.CDLL(None)\n    if libc.fork() == 0:\n"
        f"        open({str(note)!r}, 'w').write(str(libc.getpid()))\n        time.sleep(60)\n"
        "    time.sleep(0.5)\n    return 0.0\n"
    )
    grade(workers, tmp_path, body + GOOD)
    _wait_until(lambda: not _alive(int(note.read_text())), seconds=5)


GRADER = """
from pathlib import Path
from minillm.grading.engine import Grading
from minillm.grading.process import Workers

Grading(Path({exercises!r}), Workers(fork={fork})).grade_one("ch00", "ttft", Path({path!r}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("fork", [True, False])
def test_learners_process_ends_with_a_grader_that_is_killed(tmp_path: Path, fork: bool) -> None:
    """Asleep, it takes no processor time that a limit would notice, and does not see that the grader has hung up."""
    path, note = tmp_path / "exercise.py", tmp_path / "pid"
    path.write_text(
        "import os, time\ndef ttft(start, tokens):\n"
        f"    open({str(note)!r}, 'w').write(str(os.getpid()))\n    time.sleep(300)\n"
    )
    code = GRADER.format(exercises=str(EXERCISES), fork=fork, path=str(path))
    grader = subprocess.Popen([sys.executable, "-c", code])
    try:
        _wait_until(lambda: note.exists() and note.read_text() != "", seconds=120)
        assert _alive(int(note.read_text()))
    finally:
        grader.kill()
        grader.wait()
    _wait_until(lambda: not _alive(int(note.read_text())), seconds=20)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_server_that_a_learner_killed_is_started_again(workers: Workers, tmp_path: Path) -> None:
    body = (
        "import ctypes\ndef ttft(start, tokens):\n    libc = ctypes.CDLL(None)\n    libc.kill(libc.getppid(), 9)\n"
        "    return 0.0\n"
    )
    results = grade(workers, tmp_path, body + GOOD)
    assert results["ttft"].status == "failed"
    assert results["ridge"].status == "passed"


def test_without_fork_each_exercise_gets_a_process_all_the_same(tmp_path: Path) -> None:
    with Workers(fork=False) as workers:
        path = tmp_path / "exercise.py"
        path.write_text(f"import os\ndef ttft(start, tokens):\n    os._exit(3)\n{GOOD}")
        grading = Grading(EXERCISES, workers, time_limit=30)
        results = {r.exercise: r for r in grading.grade({"ch00": NAMES}, lambda chapter: path)}
    assert "ends Python" in results["ttft"].why
    assert results["ridge"].status == "passed"


def test_memory_of_the_grader_stays_small(workers: Workers, tmp_path: Path) -> None:
    """A reply beyond what a grader reads is refused unread."""
    results = grade(
        workers, tmp_path, "import torch\ndef ttft(start, tokens):\n    return torch.zeros(40_000_000)\n" + GOOD
    )
    assert results["ttft"].status == "failed" and is_one_sentence(results["ttft"].why)
    assert results["ridge"].status == "passed"


def test_learner_does_not_see_the_token_of_its_process(tmp_path: Path) -> None:
    code = (
        "import os\ndef ttft(start, tokens):\n    return os.environ.get('MINILLM_GRADING_TOKEN', tokens[0] - start)\n"
    )
    with Workers(fork=False) as workers:  # a process that the server forks needs none
        assert grade(workers, tmp_path, code + GOOD, ["ttft"])["ttft"].status == "passed"


# --- Files and folders that are not the learner's


OUTSIDE = "import os, sys\nroot = {outside!r}\n"
REACHES = {
    "writing": "open(root + '/victim', 'w')",
    "appending": "open(root + '/victim', 'ab')",
    "a new file": "open(root + '/new', 'x')",
    "low-level opening": "os.open(root + '/new', os.O_CREAT | os.O_WRONLY)",
    "removing": "os.remove(root + '/victim')",
    "renaming": "os.rename(root + '/victim', root + '/gone')",
    "fetching": "os.rename(root + '/victim', os.path.dirname(__file__) + '/gone')",
    "emptying": "os.truncate(root + '/victim', 0)",
    "a folder": "os.mkdir(root + '/new')",
    "a tree": "import shutil; shutil.rmtree(root)",
    "rights": "os.chmod(root + '/victim', 0)",
    "a link of its own": "os.symlink(root, os.path.dirname(__file__) + '/link')",
    "a link to overwrite by": "os.link(root + '/victim', os.path.dirname(__file__) + '/link')",
    "the network": "import socket; socket.create_connection(('127.0.0.1', 9))",
    "a database": "import sqlite3; sqlite3.connect(root + '/new')",
    "higher limits": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9999, 9999))",
}


@pytest.mark.parametrize("name", REACHES)
def test_learner_changes_nothing_outside_its_folder(workers: Workers, tmp_path: Path, name: str) -> None:
    outside, own = tmp_path / "outside", tmp_path / "own"
    for folder in (outside, own):
        folder.mkdir()
    (outside / "victim").write_text("as it was")
    code = OUTSIDE.format(outside=str(outside)) + f"def ttft(start, tokens):\n    {REACHES[name]}\n    return 0.0\n"
    results = grade(workers, own, code + GOOD)
    assert "PermissionError" in results["ttft"].why and is_one_sentence(results["ttft"].why)
    assert results["ridge"].status == "passed"
    assert [path.name for path in outside.iterdir()] == ["victim"]
    assert (outside / "victim").read_text() == "as it was" and (outside / "victim").stat().st_mode & 0o600
    assert [path.name for path in own.iterdir()] == ["exercise.py"]


def test_learner_may_write_in_its_own_folder_but_not_where_the_answers_lie(workers: Workers, tmp_path: Path) -> None:
    code = (
        "import os\ndef ttft(start, tokens):\n    open(os.path.dirname(__file__) + '/note', 'w').write('x')\n"
        "    return tokens[0] - start\n"
    )
    assert grade(workers, tmp_path, code + GOOD)["ttft"].status == "passed"
    (tmp_path / "note").unlink()
    shutil.copy(EXERCISES / "ch00/solution.py", tmp_path)
    assert "may not write" in grade(workers, tmp_path, code + GOOD)["ttft"].why


@pytest.mark.skipif(not _has_landlock(), reason="this kernel has no Landlock")
@pytest.mark.parametrize(
    "call",
    [
        "libc.fopen(root + b'/victim', b'w')",
        "libc.unlink(root + b'/victim')",
        "libc.rename(root + b'/victim', root + b'/gone')",
        "libc.mkdir(root + b'/new', 0o700)",
        "libc.symlink(root, root + b'/new')",
    ],
)
def test_the_kernel_keeps_code_that_goes_round_python_inside(workers: Workers, tmp_path: Path, call: str) -> None:
    outside, own = tmp_path / "outside", tmp_path / "own"
    for folder in (outside, own):
        folder.mkdir()
    (outside / "victim").write_text("as it was")
    code = (
        f"import ctypes\ndef ttft(start, tokens):\n    libc = ctypes.CDLL(None)\n    root = {str(outside).encode()!r}\n"
        f"    libc.fopen.restype = ctypes.c_void_p\n    {call}\n    return tokens[0] - start\n"
    )
    results = grade(workers, own, code + GOOD)
    assert results["ttft"].status == "passed", results["ttft"].why  # the call was refused, and that is all
    assert [path.name for path in outside.iterdir()] == ["victim"] and (outside / "victim").read_text() == "as it was"


@pytest.mark.skipif(not _has_landlock(6), reason="this kernel's Landlock does not keep signals in")
def test_learner_cannot_end_the_grader(workers: Workers, tmp_path: Path) -> None:
    body = f"import ctypes\ndef ttft(start, tokens):\n    return ctypes.CDLL(None).kill({os.getpid()}, 0)\n"
    assert "not -1" in grade(workers, tmp_path, body + GOOD)["ttft"].why


def test_disk_that_one_file_may_take_has_a_limit(workers: Workers, tmp_path: Path) -> None:
    body = "import os\ndef ttft(start, tokens):\n    os.truncate(__file__, 1 << 40)\n    return 0.0\n"
    assert "OSError" in grade(workers, tmp_path, body + GOOD)["ttft"].why
    assert (tmp_path / "exercise.py").stat().st_size < 1 << 20


# --- The answers, by other ways


@pytest.mark.parametrize(
    "way",
    [
        "open('{folder}/link.py').read()",  # a symbolic link that lies there
        "open('{folder}/hard.txt').read()",
        "open('{folder}/__pycache__/solution.cpython-311.pyc', 'rb').read()",
        "import sys; sys.path.insert(0, '{exercises}'); import solution",
        "open('{exercises}/test_exercise.py').read()",
    ],
)
def test_answers_are_closed_by_whatever_name(workers: Workers, tmp_path: Path, way: str) -> None:
    exercises, own = tmp_path / "exercises", tmp_path / "own"
    shutil.copytree(EXERCISES, exercises, ignore=shutil.ignore_patterns("__pycache__"))
    (own / "__pycache__").mkdir(parents=True)
    (own / "link.py").symlink_to(exercises / "ch00/solution.py")
    (own / "hard.txt").hardlink_to(exercises / "ch00/solution.py")
    (own / "__pycache__/solution.cpython-311.pyc").write_bytes(b"compiled")
    way = way.format(folder=own, exercises=exercises / "ch00")
    (own / "exercise.py").write_text(f"def ttft(start, tokens):\n    {way}\n    return tokens[0] - start\n")
    result = Grading(exercises, workers).grade_one("ch00", "ttft", own / "exercise.py")
    assert result.status == "failed" and "answers are closed" in result.why, result.why


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
def test_link_to_the_answers_is_not_graded(workers: Workers, tmp_path: Path, kind: str) -> None:
    exercises = tmp_path / "exercises"
    shutil.copytree(EXERCISES, exercises, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "exercise.py"
    getattr(path, kind)(exercises / "ch00/solution.py")
    result = Grading(exercises, workers).grade_one("ch00", "ttft", path)
    assert result.status == "not graded" and "link to the answers" in result.why and is_one_sentence(result.why)


def test_submission_that_leads_to_another_student_is_not_graded(workers: Workers, tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        (tmp_path / name).mkdir()
    (tmp_path / "ann/ch00").mkdir()
    (tmp_path / "ann/ch00/exercise.py").write_text(GOOD)
    (tmp_path / "bob/ch00").symlink_to(tmp_path / "ann/ch00")
    grading = Grading(EXERCISES, workers)
    ann, bob = (
        next(grading.grade({"ch00": ["ridge"]}, lambda chapter: path / chapter / "exercise.py", within=path))  # noqa: B023
        for path in (tmp_path / "ann", tmp_path / "bob")
    )
    assert ann.status == "passed"
    assert bob.status == "not graded" and "leads out of its folder" in bob.why and is_one_sentence(bob.why)


def test_stub_is_written_in_place_of_a_link_and_not_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner's exercise.py that links to the solution would have the stub written over the solution."""
    chapter = tmp_path / "ch00"
    chapter.mkdir()
    for name in ("solution.py", "test_exercise.py", "mutants.py"):
        shutil.copy(EXERCISES / "ch00" / name, chapter)
    shutil.copy(EXERCISES / "conftest.py", tmp_path)
    (chapter / "exercise.py").symlink_to(chapter / "solution.py")
    monkeypatch.setattr(stubs, "EXERCISES", tmp_path)
    monkeypatch.setattr(stubs, "manifest_text", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # the package's own manifest is left alone
        stubs.main(["--force"])
    assert (chapter / "solution.py").read_text() == (EXERCISES / "ch00/solution.py").read_text()
    assert not (chapter / "exercise.py").is_symlink() and "raise NotImplementedError" in (
        chapter / "exercise.py"
    ).read_text("utf-8")


# --- The grader's own time, memory and screen


def test_file_that_becomes_a_pipe_does_not_stop_the_grader(workers: Workers, tmp_path: Path) -> None:
    body = (
        "import os\ndef ttft(start, tokens):\n    os.remove(__file__)\n    os.mkfifo(__file__)\n"
        "    raise NotImplementedError('Later.')\n"
    )
    assert grade(workers, tmp_path, body + GOOD)["ttft"].why == "A part is still to be written: Later."


def test_large_and_empty_files_are_not_graded_and_say_so_once(workers: Workers, tmp_path: Path) -> None:
    for code, says in (("", "is empty"), (" \n\n", "is empty"), ("#" * (1 << 20) + "\n", "larger than 1 MiB")):
        results = grade(workers, tmp_path, code)
        assert {result.status for result in results.values()} == {"not graded"}
        (why,) = {result.why for result in results.values()}
        assert says in why and is_one_sentence(why)


def test_sentences_hold_nothing_that_a_terminal_obeys(workers: Workers, tmp_path: Path) -> None:
    body = "def ttft(start, tokens):\n    raise type('\\x1b[2J\\n' + 'E' * 5000, (Exception,), {})('\\x1b]0;\\u202e')\n"
    why = grade(workers, tmp_path, body + GOOD)["ttft"].why
    assert why.isprintable() and len(why) < 400 and "[2J" in why


FORGE = (
    "import gc, socket, struct\n"
    "def forge(header, blobs=b''):\n"
    "    m = struct.pack('>I', len(header)) + header + blobs\n"
    "    for s in [o for o in gc.get_objects() if isinstance(o, socket.socket) and o.fileno() >= 0]:\n"
    "        s.sendall(struct.pack('>Q', len(m)) + m)\n"
)


@pytest.mark.parametrize(
    "header",
    [
        '{"callback": 9, "args": []}',
        '{"callback": "x"}',
        '{"callback": 0, "args": 5}',
        '{"returned": {"callback": 7}}',
        '{"returned": 1, "printed": [1]}',
        '{"raised": "x", "line": []}',
        '{"raised": {"dict": []}}',
        "[]",
    ],
)
@pytest.mark.parametrize("when", ["import", "call"])
def test_forged_replies_harm_only_their_exercise(workers: Workers, tmp_path: Path, header: str, when: str) -> None:
    call = f"forge({header.encode()!r})"
    code = FORGE + (f"{call}\n" if when == "import" else "") + f"def ttft(start, tokens):\n    {call}\n    return 0.0\n"
    result = grade(workers, tmp_path, code + GOOD)["ttft"]
    assert result.status in ("failed", "not graded") and is_one_sentence(result.why), result.why
    assert "please report" not in result.why


@pytest.mark.parametrize(
    "value", ["10**400", "[10**400] * 3", "torch.zeros(5_000_000)", "[0] * 3_000_000", "[[]] * 300_000"]
)
def test_huge_answers_are_wrong_and_no_fault_of_the_grader(workers: Workers, tmp_path: Path, value: str) -> None:
    result = grade(workers, tmp_path, f"import torch\ndef itl(tokens):\n    return {value}\n" + GOOD, ["itl"])["itl"]
    assert result.status == "failed" and is_one_sentence(result.why) and "please report" not in result.why


def test_message_costs_its_reader_no_more_than_it_weighs() -> None:
    """One tensor that a header names many times would become many."""

    def message(header: bytes, blobs: bytes = b"") -> bytes:
        return struct.pack(">I", len(header)) + header + blobs

    one = b'{"tensor": ["uint8", [1000], [0]]}'
    for header, blobs in (
        (b'{"x": [' + one + b", " + one + b"]}", bytes(1000)),
        (b'{"x": [' + b"0," * (1 << 22) + b"0]}", b""),
    ):
        with pytest.raises(wire.Unreadable):
            wire.unpack(message(header, blobs), lambda value: value)
    assert wire.unpack(message(b'{"x": ' + one + b"}", bytes(1000)), lambda value: value)["x"].shape == (1000,)


def test_calls_of_the_graders_functions_come_to_an_end(workers: Workers, tmp_path: Path) -> None:
    """The grader's own work is not the learner's time, and would have no end where the learner's code has none."""
    path = tmp_path / "exercise.py"
    path.write_text("def f(g):\n    while True: g(1)\n")
    for function, says in (
        (lambda x: time.sleep(0.05), "at work for more than"),
        (lambda x: time.sleep(99), "at work"),
    ):
        with ProcessChannel(workers, path, EXERCISES, time_limit=0.5) as channel:
            channel.load()
            start = time.monotonic()
            with pytest.raises(Wrong, match=says):
                channel.get("f")(function)
            assert time.monotonic() - start < 10
    path.write_text("def f(g):\n    return g(list(range(50_000)))\n")
    with ProcessChannel(workers, path, EXERCISES) as channel:
        channel.load()
        with pytest.raises(Wrong, match="more than any right answer"):
            channel.get("f")(sum)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)])
def test_tensors_travel_in_the_order_of_their_memory(order: tuple[int, ...]) -> None:
    x = torch.arange(24).reshape(2, 3, 4).permute(order)
    unpacked = wire.unpack(wire.pack({"x": x}, dict), dict)["x"]
    assert torch.equal(unpacked, x) and unpacked.stride() == x.stride()
    spread = torch.arange(48).reshape(2, 3, 8).permute(order)[..., ::2]  # what lies between is left out
    unpacked = wire.unpack(wire.pack({"x": spread}, dict), dict)["x"]
    assert torch.equal(unpacked, spread)


def test_view_of_a_transposed_tensor_fails_as_it_does_in_a_model(workers: Workers, tmp_path: Path) -> None:
    path = tmp_path / "exercise.py"
    path.write_text("def f(q):\n    return q.view(-1)\n")
    q = torch.randn(1, 5, 2, 4)  # (B, T, Hq, D), of which a model gives the transpose
    with ProcessChannel(workers, path, EXERCISES) as channel:
        channel.load()
        assert torch.equal(channel.get("f")(q), q.view(-1))
        with pytest.raises(Wrong, match="view size is not compatible"):
            channel.get("f")(q.transpose(1, 2))


def test_bytes_are_not_counted_by_the_learners_file(workers: Workers, tmp_path: Path) -> None:
    """A `bytes_moved` that lies helps nobody, and one that is spoilt harms nobody."""
    solution = (EXERCISES / "ch03/solution.py").read_text("utf-8")
    right = "return F.scaled_dot_product_attention(rows, k, v, attn_mask=visible)"
    copies = (
        "k, v = (x.repeat_interleave(Hq // Hkv, 1) for x in (k, v))\n"
        "    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:T])"
    )
    assert solution.count(right) == 1
    for lie in ("sum(x.nbytes for x in args) * 5 // 4", "None"):
        path, lying = tmp_path / "exercise.py", f"\n\ndef bytes_moved(function, *args):\n    return {lie}\n"
        for code, status in ((solution, "passed"), (solution.replace(right, copies), "failed")):
            path.write_text(code + lying)
            result = Grading(EXERCISES, workers).grade_one("ch03", "grouped_attention", path)
            assert result.status == status, result.why
        assert "It copies them for each query head" in result.why
