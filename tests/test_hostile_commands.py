"""Command lines of any kind: each ends soon, in one sentence where it fails, and writes nothing that it was not asked for."""

import os
import time
from pathlib import Path

import pytest
from helpers import is_one_sentence, one_thread  # noqa: F401
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minillm
from minillm.cli import main

WORDS = ["", " ", "0", "-1", "1", "3", "1e400", "nan", "inf", "9" * 400, "\udcff", "\x1b[2J", "a\nb", "--", "-", "tiny"]
WORDS += ["cpu", "cuda:99", "meta", "fp32", "kv_cache", "naive", "h100-sxm", "llama-3-8b", "random:tiny", "/", "../x"]
WORDS += ["/dev/null", "prompts.jsonl", "pipe", "folder", "ch00", "ch00/ttft", "int4", "x.png"]
OPTIONS = ["--model", "--device", "--dtype", "--stage", "--stages", "--max-new-tokens", "--max-batch", "--temperature"]
OPTIONS += ["--top-k", "--top-p", "--min-p", "--seed", "--price-per-hour", "--json", "--plot", "--out", "--chat"]
OPTIONS += ["--hardware", "--batch", "--context", "--overhead", "--schemes", "--group-size", "--text", "--tokens"]
OPTIONS += ["--exercises", "--submissions", "--time-limit", "--solutions", "--nothing", "--help", "--prompt"]
# What measures or grades for seconds is stopped where its work would begin: the command line has been judged by then.
WORK = [
    "minillm.commands.tour.run_tour",
    "minillm.roofline.ceilings.CeilingMeter._measure",
    "minillm.commands.evaluate.measure",
    "minillm.grading.engine.Grading.grade_one",
    "minillm.checkpoint.hub_folder",
    "minillm.checkpoint.default_model_path",
]
TINY = ["--model", "tiny"]
COMMANDS = ["tour", "generate", "batch", "roofline", "predict", "profile", "evaluate", "grade"]


class Reached(minillm.errors.MinillmError):
    """The work would begin."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with a file of prompts; the user's own folders are in it, too."""

    def reached(*args: object, **kwargs: object) -> None:
        raise Reached("Here the work of the command would begin.")

    for name in WORK:
        monkeypatch.setattr(name, reached)
    here = tmp_path / "here"
    (here / "folder").mkdir(parents=True)
    (here / "prompts.jsonl").write_text('"a"\n{"prompt": "b", "id": 1}\n')
    for name in ("HOME", "MINILLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(here)
    return here


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    command=st.sampled_from(COMMANDS),
    words=st.lists(st.sampled_from(WORDS), max_size=2),
    options=st.lists(st.tuples(st.sampled_from(OPTIONS), st.sampled_from(WORDS)), max_size=4),
)
def test_any_command_line_ends_in_a_status_and_a_sentence(
    command: str,
    words: list[str],
    options: list[tuple[str, str]],
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = {"generate": [*TINY, "--max-new-tokens", "2"], "batch": [*TINY, "--max-new-tokens", "2"], "evaluate": TINY}
    more = [word for option in options for word in option]
    before, start = set(place.parent.rglob("*")), time.monotonic()
    try:
        status = main([command, *words, *small.get(command, []), *more])
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status in (0, 1, 2) and time.monotonic() - start < 30
    if status and command != "batch":  # which names each line that it cannot serve
        assert is_one_sentence(error.removeprefix("minillm: ").rstrip("\n")), error
    assert all(line.isprintable() for line in error.splitlines()), error
    assert "Unexpected" not in error and "Traceback" not in error, error
    named = {os.path.normpath(place / word) for word in [*words, *more] if "\0" not in word}
    named |= {str(place / "prompts.answers.jsonl")}
    for path in set(place.parent.rglob("*")) - before:
        assert any(str(path) == name or name.startswith(f"{path}{os.sep}") for name in named), path
        if path.is_file():
            path.unlink()
