"""The script of mutation testing, on a module whose survivors are known, and what is written about the package's own."""

import json
import subprocess
import sys
from pathlib import Path

import mutate
import pytest
from mutations import mutants

REPORT = json.loads((Path(__file__).parent / "mutation_report.json").read_text())
HELD_TO_95_PERCENT = [name for name in mutate.TESTS if name.startswith("stages/") or name in ("sampling", "metrics")]

MODULE = '''
"""A docstring stays: 1 + 1."""

import math

FACTOR = 2


def ceiling(x: int, limit: "int < 3" = 3) -> int:
    """At most limit: min(x, limit)."""
    if not isinstance(x, int):
        raise TypeError(f"{x + 1} is no number.")
    return min(x, limit)


def parts(n: int, size: int) -> list[int]:
    found = []
    while n > 0:
        found.append(min(n, size))
        n -= size
    return [part for part in found if part]


def times(factor: int):
    def product(x: int) -> int:
        return factor * x

    return product


DOUBLE = times(2)  # a function made while the module is imported


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, n: int) -> None:
        self.n += FACTOR * n
        math.floor(n)  # this changes nothing
'''
WHOLE_TESTS = """
import pytest
from sums import DOUBLE, Counter, ceiling, parts


def test_ceiling():
    assert [ceiling(x) for x in (2, 3, 4)] == [2, 3, 3]
    assert ceiling(4, 2) == 2


def test_what_is_no_number():
    with pytest.raises(TypeError):
        ceiling(1.5)


def test_parts():
    assert parts(5, 2) == [2, 2, 1]
    assert parts(4, 2) == [2, 2]


def test_double():
    assert DOUBLE(4) == 8


def test_counter():
    counter = Counter()
    counter.add(1)
    counter.add(2)
    assert counter.n == 6
"""


def changes(source: str) -> list[str]:
    return [mutant.change for mutant in mutants(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a < b -> pass", "a < b -> a <= b", "a < b -> a >= b"]),
        ("0 <= a < b", ["0 <= a < b -> pass", "0 <= a < b -> 0 < a < b", "0 <= a < b -> 0 > a < b"]),
        ("x = a and b", ["a and b -> a or b", "a and b -> b", "a and b -> a"]),
        ("x = not a", ["not a -> a"]),
        ("x = a if b else c", ["b -> not b"]),
        ("x = [a for a in b if a]", ["a -> not a"]),
        ("x = a + b", ["a + b -> a - b"]),
        ("x = a + 'text'", []),
        ("def f(): ...", []),
        ("x = a + 7", ["a + 7 -> a - 7", "a + 7 -> a + 8", "a + 7 -> a + 6"]),
        ("x = a.sum(dim=-1)", ["dim=-1 -> dim=0", "dim=-1 -> dim=-2"]),
        ("x = a[..., :n]", [":n -> :n + 1", ":n -> :n - 1"]),
        ("x = range(n)", ["range(n) -> range(n + 1)", "range(n) -> range(n - 1)"]),
        ("x = range(n + 1)", ["n + 1 -> n - 1", "n + 1 -> n + 2", "n + 1 -> n + 0"]),
        ("x = 0.5", ["0.5 -> 1.0"]),
        ("x = f(keep=True)", ["keep=True -> keep=False"]),
        ("x = torch.argmax(a)", ["torch.argmax -> torch.argmin"]),
        ("x = zip(a, b, strict=True)", []),
        ("def f(n=1):\n    n = a\n    m = b", ["1 -> 2", "1 -> 0", "n = a -> pass"]),
        ("if a:\n    raise E(1)", ["a -> not a", "raise E(1) -> pass"]),
        ("n: Literal[1] = a", []),
        ("'1 + 1'\nimport a", []),
        ("x = f'{1 + 1}'", []),
        ("x = f(\n    a\n    + b,\n    c,\n)", ["a + b -> a - b"]),
        ("x = (1, 1)", ["(1, 1) -> (2, 1)", "(1, 1) -> (0, 1)", "(1, 1) -> (1, 2)", "(1, 1) -> (1, 0)"]),
    ],
)
def test_changes_of_a_line(source: str, expected: list[str]) -> None:
    found = changes(source)
    assert found[: len(expected)] == expected
    assert expected or not found
    for mutant in mutants(source):
        compile(mutant.source, "mutant", "exec")
        assert mutant.source.count("\n") == source.count("\n")  # what follows keeps its numbers
        assert mutant.source != source


def test_mutant_tells_where_it_acts() -> None:
    found = {mutant.change: mutant for mutant in mutants(MODULE)}
    assert found["FACTOR * n -> FACTOR / n"].function == "Counter.add"
    assert found["2 -> 3"].function is None
    assert found["3 -> 4"].function is None  # a default is made when the module is imported
    assert (
        MODULE.splitlines()[found["n > 0 -> n >= 0"].number - 1].strip()
        == found["n > 0 -> n >= 0"].line
        == "while n > 0:"
    )


def test_two_changes_of_the_same_words_on_a_line_have_names_of_their_own() -> None:
    assert changes("x = (a + b, a + b)") == ["a + b -> a - b", "a + b -> a - b (2)"]


def try_sums(folder: Path, tests: str) -> tuple[list[str], dict[str, list[str]]]:
    """What the script finds of MODULE with these tests, in a process of its own: errors, and changes by outcome."""
    (folder / "sums.py").write_text(MODULE)
    (folder / "test_sums.py").write_text(tests)
    script = f"""
import json, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(folder)!r}]
import hypothesis, mutate
from pathlib import Path
hypothesis.settings.register_profile("mutate", database=None)
folder = Path({str(folder)!r})
told = folder / "told"
told.touch()
def announce(module, mutant, note):
    told.write_text(told.read_text() + f"{{mutant.change}}{{note and ': '}}{{note}}\\n")
try:
    found = mutate.try_modules({{"sums": folder / "sums.py"}}, [folder / "test_sums.py"], 2, 20.0, announce)["sums"]
except RuntimeError as error:
    print(json.dumps([[str(error)], {{}}]))
else:
    changes = {{name: [mutant.change for mutant in getattr(found, name)] for name in ("killed", "survivors")}}
    print(json.dumps([[], {{**changes, "timeouts": [str(found.timeouts)], "told": told.read_text().splitlines()}}]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def test_only_faults_that_change_nothing_survive_whole_tests(tmp_path: Path) -> None:
    _, told = try_sums(tmp_path, WHOLE_TESTS)
    assert told["survivors"] == [
        "n > 0 -> n >= 0",
        "n > 0 -> n > -1",
        "math.floor(n) -> pass",
        "math.floor -> math.ceil",
    ]
    assert len(told["killed"]) + len(told["survivors"]) == len(mutants(MODULE))
    assert int(told["timeouts"][0]) >= 1  # n += size runs on until it is stopped


def test_faults_survive_where_no_test_looks(tmp_path: Path) -> None:
    tests = (
        WHOLE_TESTS.replace("(2, 3, 4)] == [2, 3, 3]", "(2,)] == [2]")
        .replace("counter.add", "abs")
        .replace("== 6", "== 0")
        .replace("assert DOUBLE(4) == 8", "DOUBLE(4)\n    assert 'factor * x' in inspect.getsource(DOUBLE)")
        .replace("import pytest", "import inspect\n\nimport pytest")
    )
    _, told = try_sums(tmp_path, tests)
    assert "3 -> 4" in told["survivors"]  # the default of ceiling
    assert "factor * x -> factor / x" in told["killed"]  # by who reads the source, as Triton does
    assert {f"{change}: no test runs it" for change in ("FACTOR * n -> FACTOR / n", "math.floor(n) -> pass")} <= set(
        told["told"]
    )
    assert {line.split(": ")[0] for line in told["told"]} == set(told["survivors"])


def test_tests_that_fail_on_the_right_code_are_refused(tmp_path: Path) -> None:
    errors, _ = try_sums(tmp_path, WHOLE_TESTS.replace("counter.n == 6", "counter.n == 7"))
    assert "fail on the code as it is" in errors[0]
    assert "test_counter" in errors[0]


@pytest.mark.parametrize(
    ("old", "new", "is_the_same"),
    [
        ("A docstring stays: 1 + 1.", "Another docstring.", True),
        ('    """At most limit: min(x, limit)."""\n', "", True),
        ("  # this changes nothing", "  # and this is another comment", True),
        ("        self.n = 0", '        # How often.\n        self.n = 0\n        "A text alone."', True),
        ("n -= size", "n -= size + 1", False),
        ('limit: "int < 3" = 3', 'limit: "int < 3" = 4', False),
        ("is no number.", "is a text.", False),  # a text in code is code
    ],
)
def test_a_report_holds_as_long_as_the_code_is_the_same(old: str, new: str, is_the_same: bool) -> None:
    assert MODULE.count(old) == 1
    assert (mutate.digest(MODULE.replace(old, new)) == mutate.digest(MODULE)) is is_the_same
    if is_the_same:  # as the mutants are, on which the report rests
        assert changes(MODULE.replace(old, new)) == changes(MODULE)


def test_only_survivors_that_are_mutants_of_today_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, report = tmp_path / "sums.py", tmp_path / "report.json"
    survivor = {"line": "math.floor(n)  # this changes nothing", "change": "math.floor -> math.ceil"}
    report.write_text(json.dumps({"sums": {"source": mutate.digest(MODULE), "survivors": [survivor]}}))
    monkeypatch.setattr(mutate, "files_of", lambda module: (module, file, []))
    for old, new, known in (
        ("1 + 1", "2 + 2", {"sums": {tuple(survivor.values())}}),
        ("n -= size", "n -= 1", {}),
        ("  # this changes nothing", "", {}),  # the line is another one to look for
    ):
        file.write_text(MODULE.replace(old, new))
        assert mutate.survivors_of(report) == known


# What is written about the package


def test_every_stage_is_tried_and_its_tests_exist() -> None:
    stages = {f"stages/{path.stem}" for path in (mutate.ROOT / "minillm" / "stages").glob("*.py")}
    assert stages <= mutate.TESTS.keys()
    for module in mutate.TESTS:
        _, path, tests = mutate.files_of(module)
        assert path.exists()
        assert tests
        assert all(test.exists() for test in tests)


@pytest.mark.parametrize("module", mutate.TESTS)
def test_listed_equivalents_are_mutants_of_today(module: str) -> None:
    """A line that was changed is looked at anew."""
    _, path, _ = mutate.files_of(module)
    today = {(mutant.line, mutant.change) for mutant in mutants(path.read_text())}
    listed = mutate.equivalents(module)
    assert [name for name in listed if name not in today] == []
    assert all(excuse.reason.endswith(".") and len(excuse.reason) > 20 for excuse in listed.values())


@pytest.mark.parametrize("module", REPORT)
def test_a_row_of_the_report_adds_up(module: str) -> None:
    row = REPORT[module]
    assert row["killed"] + row["equivalent"] + row["needs_gpu"] + row["survived"] == row["mutants"]
    assert len(row["survivors"]) == row["survived"]
    assert row["score"] == round(row["killed"] / (row["killed"] + row["survived"]), 4)


@pytest.mark.parametrize("module", HELD_TO_95_PERCENT)
def test_95_of_100_mutants_that_change_something_were_killed(module: str) -> None:
    assert REPORT[module]["score"] >= 0.95
