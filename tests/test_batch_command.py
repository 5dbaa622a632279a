"""`minillm batch`: files of prompts, good and bad, become files of answers, however often it is stopped on the way."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_helpers import Run, assert_one_sentence, process
from helpers import one_thread  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

import minillm
from minillm.answer_file import AnswerFile, answered
from minillm.errors import MinillmError
from minillm.sampling import Sampler
from minillm.stages import kv_cache, naive

MODEL = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "6"]
DRAWN = ["--temperature", "1", "--seed", "5"]
WORDS = ["one", "two and more", "three", "a somewhat longer prompt than the others", "five", "six", "seven"]
FIELDS = ["id", "prompt", "text", "tokens", "finish", "ttft_s", "e2e_s"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "prompt": word} for i, word in enumerate(WORDS)])


def write(path: Path, lines: list[object]) -> Path:
    """Bytes are written as they are, everything else as JSON."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def texts(path: Path) -> dict[str | int, str]:
    answers = read(path)
    assert len({answer["id"] for answer in answers}) == len(answers), "an answer is there twice"
    return {answer["id"]: answer["text"] for answer in answers}


def answers_of(prompts: Path) -> Path:
    return prompts.with_name("prompts.answers.jsonl")


# --- answers ----------------------------------------------------------------------------------------------------------


def test_greedy_answers_are_those_of_the_naive_stage(run: Run, prompts: Path) -> None:
    status, output, error = run("batch", str(prompts), *MODEL, "--max-batch", "3")
    assert (status, error) == (0, "")  # redirected, there is no progress bar
    model, tokenizer = minillm.load("tiny", device="cpu")
    answers = read(answers_of(prompts))
    assert sorted(answer["id"] for answer in answers) == [f"p{i}" for i in range(7)]
    for answer in answers:
        assert list(answer) == FIELDS
        assert answer["prompt"] == WORDS[int(answer["id"][1:])]
        reference = naive.generate(model, tokenizer.encode(answer["prompt"]), 6, stop_tokens=tokenizer.stop_tokens)
        assert answer["text"] == tokenizer.decode(reference.tokens)
        assert answer["tokens"] == len(reference.tokens)
        assert 0 < answer["ttft_s"] <= answer["e2e_s"]
    tokens = sum(answer["tokens"] for answer in answers)
    for part in (
        f"7 of 7 prompts are answered in {answers_of(prompts)}", f"7 answers, {tokens} tokens, TTFT ", "ITL p50 ", ", P99 ",
        " tokens/s, $", " per million tokens at $1 an hour", "TTFT P99 ", " tokens/s for one user",
    ):  # fmt: skip
        assert part in " ".join(output.split())


def test_chat_puts_each_prompt_into_the_template(run: Run, prompts: Path) -> None:
    write(prompts, [{"id": "a", "prompt": "Why?"}])
    assert run("batch", str(prompts), *MODEL, "--chat")[0] == 0
    model, tokenizer = minillm.load("tiny", device="cpu")
    reference = naive.generate(model, tokenizer.chat("Why?"), 6, stop_tokens=tokenizer.stop_tokens)
    assert texts(answers_of(prompts)) == {"a": tokenizer.decode(reference.tokens)}


def test_chat_renders_all_prompts_in_one_process(run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], subprocess.run
    monkeypatch.setattr("minillm.chat_template.subprocess.run", lambda *a, **k: started.append(a) or start(*a, **k))
    assert run("batch", str(prompts), *MODEL, "--chat")[0] == 0
    assert len(started) == 1
    model, tokenizer = minillm.load("tiny", device="cpu")
    assert texts(answers_of(prompts)) == {
        f"p{i}": tokenizer.decode(
            kv_cache.generate(model, tokenizer.chat(word), 6, stop_tokens=tokenizer.stop_tokens).tokens
        )
        for i, word in enumerate(WORDS)
    }


def test_a_line_may_have_settings_of_its_own(run: Run, prompts: Path) -> None:
    lines = [
        "bare",
        {"prompt": "short", "max_new_tokens": 2},
        {"prompt": "drawn", "temperature": 0.7, "seed": 9, "id": 3},
    ]
    write(prompts, lines)
    assert run("batch", str(prompts), *MODEL, "--top-k", "50")[0] == 0
    answers = {answer["id"]: answer for answer in read(answers_of(prompts))}
    assert {id: answer["tokens"] for id, answer in answers.items()} == {"line-1": 6, "line-2": 2, 3: 6}
    model, tokenizer = minillm.load("tiny", device="cpu")
    sampler = Sampler(0.7, top_k=50, seed=9)
    assert answers[3]["text"] == tokenizer.decode(
        kv_cache.generate(model, tokenizer.encode("drawn"), 6, sampler=sampler).tokens
    )


def test_the_longest_answer_is_begun_first(run: Run, prompts: Path) -> None:
    write(prompts, [{"prompt": "x", "max_new_tokens": n} for n in (2, 3, 2, 5)])
    assert run("batch", str(prompts), *MODEL, "--max-batch", "1")[0] == 0
    assert list(texts(answers_of(prompts))) == ["line-4", "line-2", "line-1", "line-3"]


def test_a_stop_token_ends_an_answer_and_is_not_shown(run: Run, prompts: Path) -> None:
    write(prompts, [{"prompt": f"{i}"} for i in range(30)])
    hot = ["--temperature", "1e5", "--seed", "1"]  # each of 320 tokens as probable: 17 % stop within 60
    assert run("batch", str(prompts), *MODEL, "--max-new-tokens", "60", *hot)[0] == 0
    answers = read(answers_of(prompts))
    stopped = [answer for answer in answers if answer["finish"] == "stop"]
    assert 1 <= len(stopped) <= 15
    assert all("<|end|>" not in answer["text"] for answer in answers)
    assert all(answer["tokens"] == 60 for answer in answers if answer["finish"] == "length")
    assert any(answer["tokens"] < 60 for answer in stopped)


def test_drawn_answers_depend_on_seed_and_id_and_on_nothing_else(run: Run, prompts: Path, tmp_path: Path) -> None:
    lines = prompts.read_text().splitlines()
    assert run("batch", str(prompts), *MODEL, *DRAWN)[0] == 0
    expected = texts(answers_of(prompts))
    for max_batch in ("1", "2", "5"):
        random.Random(max_batch).shuffle(lines)
        prompts.write_text("\n".join(lines) + "\n")
        out = tmp_path / f"{max_batch}.jsonl"
        assert run("batch", str(prompts), *MODEL, *DRAWN, "--max-batch", max_batch, "--out", str(out))[0] == 0
        assert texts(out) == expected
    assert run("batch", str(prompts), *MODEL, *DRAWN[:2], "--seed", "6", "--out", str(tmp_path / "6"))[0] == 0
    assert texts(tmp_path / "6") != expected
    write(prompts, ["same", "same"])  # two who ask the same draw apart
    assert run("batch", str(prompts), *MODEL, *DRAWN, "--out", str(tmp_path / "same"))[0] == 0
    first, second = texts(tmp_path / "same").values()
    assert first != second


# --- lines that cannot be served --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "half', "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 50_000, "not valid JSON"),
        (["a", "list"], "no prompt"),
        (7, "no prompt"),
        ({}, "no prompt"),
        ({"prompt": 7}, "no prompt"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": ""}, "prompt is empty"),
        ("", "prompt is empty"),
        ({"prompt": "again", "id": "first"}, "Line 1 has the id 'first' too"),
        ({"prompt": "x", "id": ["a"]}, "id is ['a']"),
        ({"prompt": "x", "id": 1.5}, "id is 1.5"),
        ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt": "x", "max_new_tokens": "6"}, "max_new_tokens is '6'"),
        ({"prompt": "x", "max_new_tokens": 10**60}, "max_new_tokens is 1000"),
        ({"prompt": "x", "temperature": -1}, "temperature is -1"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature is nan"),
        ({"prompt": "x", "temperature": 10**400}, "temperature is 1000"),
        ({"prompt": "x", "seed": -1}, "seed is -1"),
        ({"prompt": "x", "seed": 2**63}, "seed is 9223372036854775808"),
        ({"prompt": "x", "seed": True}, "seed is True"),
        ({"prompt": "\ud800"}, "valid Unicode"),
        ({"prompt": "x" * 300}, "256 positions"),
        ({"prompt": "x", "max_new_tokens": 300}, "256 positions"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_served(run: Run, prompts: Path, line: object, says: str) -> None:
    write(prompts, [{"prompt": "one", "id": "first"}, b"", line, {"prompt": "two", "id": "last"}])
    status, output, error = run("batch", str(prompts), *MODEL)
    named, left_out = error.splitlines(keepends=True)
    assert named.startswith(f"minillm: {prompts}, line 3: ")
    assert says in named
    assert len(named) < 400
    assert left_out.startswith("minillm: 1 of 3 prompts were not served: ")
    assert_one_sentence(left_out)
    assert status == 1
    assert f"2 of 3 prompts are answered in {answers_of(prompts)}" in output
    assert set(texts(answers_of(prompts))) == {"first", "last"}
    before = answers_of(prompts).read_bytes()
    write(prompts, [{"prompt": "one", "id": "first"}, b"", "mended", {"prompt": "two", "id": "last"}])
    assert run("batch", str(prompts), *MODEL)[::2] == (0, "")
    assert answers_of(prompts).read_bytes().startswith(before)
    assert set(texts(answers_of(prompts))) == {"first", "last", "line-3"}


def test_where_no_line_can_be_served_no_model_is_loaded(
    run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.commands.batch.load", lambda *_: pytest.fail("a model was loaded"))
    write(prompts, [b"{", b"}"])
    status, _, error = run("batch", str(prompts), *MODEL)
    assert (status, error.count("\n")) == (1, 3)
    assert "2 of 2 prompts were not served" in error


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["--max-batch", "0"], 2, "max_batch is 0"),
        (["--max-batch", "-3"], 2, "max_batch is -3"),
        (["--max-batch", "two"], 2, "'two'"),
        (["--max-new-tokens", "0"], 2, "max_new_tokens is 0"),
        (["--temperature", "-1"], 2, "temperature"),
        (["--temperature", "1e9"], 2, "temperature"),
        (["--top-p", "7"], 2, "top_p"),
        (["--seed", "-1"], 2, "seed"),
        (["--model", "gpt-9"], 2, "Unknown model 'gpt-9'"),
        (["--device", "meta"], 2, "meta device"),
        (["--out", "/proc/no/answers.jsonl"], 1, "/proc/no/answers.jsonl cannot be written"),
        (["--out", "/tmp"], 1, "name a file"),
        (["--out", ""], 1, "name a file"),
        (["--out", "{prompts}"], 2, "holds the prompts"),
    ],
)
def test_wrong_options_are_told_in_one_sentence(
    run: Run, prompts: Path, argv: list[str], status: int, says: str
) -> None:
    before = prompts.read_bytes()
    result, output, error = run("batch", str(prompts), *MODEL, *(part.format(prompts=prompts) for part in argv))
    assert_one_sentence(error)
    assert says in error
    assert (result, output) == (status, "")
    assert prompts.read_bytes() == before
    assert not answers_of(prompts).exists()


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [(None, 1, "cannot be read"), (b"", 2, "holds no prompts"), (b"\n \n", 2, "no prompts")],
)
def test_a_file_without_prompts(run: Run, tmp_path: Path, content: bytes | None, status: int, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    result, output, error = run("batch", str(path), *MODEL)
    assert_one_sentence(error)
    assert (result, output, says in error) == (status, "", True)


def test_a_folder_is_no_file_of_prompts(run: Run, tmp_path: Path) -> None:
    status, _, error = run("batch", str(tmp_path), *MODEL)
    assert_one_sentence(error)
    assert (status, "cannot be read" in error) == (1, True)


# --- stopped and resumed ----------------------------------------------------------------------------------------------


def test_a_second_run_keeps_the_answers_and_loads_no_model(
    run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("batch", str(prompts), *MODEL)[0] == 0
    before = answers_of(prompts).read_bytes()
    monkeypatch.setattr("minillm.commands.batch.load", lambda *_: pytest.fail("a model was loaded"))
    status, output, error = run("batch", str(prompts), *MODEL)
    assert (status, error) == (0, "")
    assert "7 of 7 prompts are answered" in output
    assert answers_of(prompts).read_bytes() == before


@pytest.mark.parametrize(
    "cut", ["a byte", "half a line", "all but a byte", "the newline", "two lines and a half", "everything"]
)
def test_half_an_answer_is_cut_off_and_made_anew(run: Run, prompts: Path, cut: str) -> None:
    assert run("batch", str(prompts), *MODEL, *DRAWN)[0] == 0
    path = answers_of(prompts)
    whole, expected = path.read_bytes(), texts(path)
    last = len(whole.splitlines()[-1]) + 1
    lost = {
        "a byte": 2, "half a line": last // 2, "all but a byte": last - 1, "the newline": 1,
        "two lines and a half": 2 * last + last // 2, "everything": len(whole),
    }[cut]  # fmt: skip
    kept = whole[:-lost]
    path.write_bytes(kept)
    assert run("batch", str(prompts), *MODEL, *DRAWN, "--max-batch", "2")[::2] == (0, "")
    assert path.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert texts(path) == expected


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_wherever_the_file_ends_whole_answers_stay(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    asked = {"a": "x", 7: 'quotes " and \n lines', "é": "ü"}
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    with AnswerFile(path, asked) as answers:
        for id in asked:
            answers.append(id, {"text": f"of {id}"})
    whole = path.read_bytes()
    end = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:end])
    whole_lines = [line for line in whole[:end].split(b"\n") if line in whole.split(b"\n") and line]
    assert answered(path, asked) == {json.loads(line)["id"] for line in whole_lines}
    assert path.read_bytes() == whole[:end]  # looking changes nothing
    with AnswerFile(path, asked) as answers:
        for id in asked.keys() - answers.done:
            answers.append(id, {"text": f"of {id}"})
    assert sorted(path.read_bytes().split(b"\n")) == sorted(whole.split(b"\n"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"id": "p0", "prompt": "another", "text": "t"}\n', "belongs to other prompts"),
        (b'{"id": "who", "prompt": "one", "text": "t"}\n', "belongs to other prompts"),
        (b'{"id": "who", "text": "t"}\n', "belongs to other prompts"),
        (b'{"id": "p0", "prompt": "one"}\n', "Line 1 of"),
        (b'{"id": "p0", "prompt": "one"}', "Line 1 of"),
        (b'{"id": "p0", "prompt": "another", "text": "t"}', "belongs to other prompts"),
        (b'{"id": "p0", "prompt": "one", "text": "t"}\nnotes of mine\n', "Line 2 of"),
        (b"notes of mine", "Line 1 of"),
        (b'{"id": "p0", "prom\n{"id": "p1", "prompt": "two and more", "text": "t"}\n', "Line 1 of"),
        (b'{"id": [], "prompt": "one", "text": "t"}\n', "Line 1 of"),
        (b"\x00\xff" * 50, "Line 1 of"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_unharmed(
    run: Run, prompts: Path, content: bytes, says: str
) -> None:
    path = answers_of(prompts)
    path.write_bytes(content)
    status, output, error = run("batch", str(prompts), *MODEL)
    assert_one_sentence(error)
    assert (status, output, says in error) == (1, "", True)
    assert path.read_bytes() == content


def test_two_runs_do_not_write_into_one_file(run: Run, prompts: Path) -> None:
    with AnswerFile(answers_of(prompts), {}):
        status, _, error = run("batch", str(prompts), *MODEL)
    assert_one_sentence(error)
    assert (status, "Another run is writing" in error) == (1, True)
    assert run("batch", str(prompts), *MODEL)[0] == 0


def test_without_locks_answers_are_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no fcntl, and some network file systems have it and no locks."""

    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with AnswerFile(tmp_path / "a", {"x": "hi", "y": "ho"}) as answers:
        answers.append("x", {"text": "one"})
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with AnswerFile(tmp_path / "a", {"x": "hi", "y": "ho"}) as answers:
        assert answers.done == {"x"}
        answers.append("y", {"text": "two"})
    assert answered(tmp_path / "a", {"x": "hi", "y": "ho"}) == {"x", "y"}


def test_a_file_that_cannot_be_opened_or_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MinillmError, match=r"could not be written \(No such file or directory\): name a file"):
        AnswerFile(tmp_path / "nowhere" / "a", {})
    (tmp_path / "a").touch()

    def broken(self: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(MinillmError, match=r"cannot be read \(Input/output error\): name another file with --out"):
        answered(tmp_path / "a", {})


@pytest.mark.parametrize("room", [0, 1, 200, 400])
def test_a_disk_that_fills_leaves_whole_answers_and_a_second_run_completes(
    run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    assert run("batch", str(prompts), *MODEL, *DRAWN)[0] == 0
    expected = texts(answers_of(prompts))
    answers_of(prompts).unlink()
    real, left = os.write, room

    def full(file: int, data: bytes) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(file, data[:left])
        left -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr("minillm.answer_file.os.write", full)
        status, _, error = run("batch", str(prompts), *MODEL, *DRAWN)
    assert_one_sentence(error)
    kept = texts(answers_of(prompts))
    assert f"(No space left on device): {len(kept)} of 7 prompts have their answers in it" in error
    assert status == 1
    assert kept.items() <= expected.items()
    assert len(kept) >= room // 150  # an answer here takes some 110 to 140 bytes
    assert run("batch", str(prompts), *MODEL, *DRAWN)[::2] == (0, "")
    assert texts(answers_of(prompts)) == expected


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_a_full_device_is_told_in_one_sentence(run: Run, prompts: Path) -> None:
    status, _, error = run("batch", str(prompts), *MODEL, "--out", "/dev/full")
    assert_one_sentence(error)
    assert (status, "/dev/full could not be written (No space left on device): 0 of 7" in error) == (1, True)


def test_each_answer_is_on_the_disk_before_the_next_one_is_written(
    run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("write", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(
            f"minillm.answer_file.os.{name}", lambda *args, name=name, real=real: calls.append(name) or real(*args)
        )
    assert run("batch", str(prompts), *MODEL)[0] == 0
    assert calls == ["write", "fsync"] * 7


def test_answers_go_into_a_pipe(run: Run, prompts: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # a few kB wait in the pipe until they are read
    assert run("batch", str(prompts), *MODEL, "--out", str(pipe))[::2] == (0, "")
    assert len(os.read(reader, 1 << 16).splitlines()) == 7
    os.close(reader)


# --- in a process of its own ------------------------------------------------------------------------------------------

LONG = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "40", "--max-batch", "1", *DRAWN]


def start_and_wait_for_answers(path: Path, stderr: int) -> subprocess.Popen[str]:
    """Prompts enough for a second or more; returns once the first of them are answered."""
    write(path, [{"prompt": f"prompt number {i}"} for i in range(30)])
    command = process("batch", str(path), *LONG, stderr=stderr)
    deadline = time.monotonic() + 60
    while not answers_of(path).exists() or answers_of(path).read_bytes().count(b"\n") < 3:
        assert command.poll() is None, "it ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return command


def assert_it_goes_on(run: Run, path: Path, before: bytes) -> None:
    """A second run keeps what was there, adds the rest, and all is as if nothing had happened."""
    assert 3 <= before.count(b"\n") < 30
    assert run("batch", str(path), *LONG, "--max-batch", "16")[::2] == (0, "")
    assert answers_of(path).read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    whole = path.with_name("whole.jsonl")
    assert run("batch", str(path), *LONG, "--max-batch", "7", "--out", str(whole))[0] == 0
    assert texts(answers_of(path)) == texts(whole)
    assert len(texts(whole)) == 30


def test_killed_in_the_middle_it_goes_on(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    terminal, stderr = os.openpty()
    command = start_and_wait_for_answers(path, stderr)
    command.kill()
    assert command.wait(timeout=60) == -signal.SIGKILL
    os.close(stderr)
    assert b"answers" in os.read(terminal, 1 << 16)  # on a terminal there is a progress bar
    os.close(terminal)
    assert_it_goes_on(run, path, answers_of(path).read_bytes())


def test_ctrl_c_says_how_far_it_is_and_that_it_goes_on(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    command = start_and_wait_for_answers(path, subprocess.PIPE)
    command.send_signal(signal.SIGINT)
    output, error = command.communicate(timeout=60)
    before = answers_of(path).read_bytes()
    assert (command.returncode, output) == (130, "")
    assert_one_sentence(error)
    assert error == (
        f"minillm: Interrupted: {before.count(chr(10).encode())} of 30 prompts are answered in {answers_of(path)}, "
        "and the same command goes on from there.\n"
    )
    assert before.endswith(b"\n")
    assert_it_goes_on(run, path, before)
