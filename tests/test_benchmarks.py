"""benchmarks/peers.py measures what it says: its arithmetic on an invented clock, who is set beside whom, the command whole."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    is_one_sentence,
    one_thread,  # noqa: F401 (a fixture)
)

import minillm
from minillm.errors import MinillmError
from minillm.report import make_console
from minillm.side_by_side import shortfalls
from minillm.stages import kernels

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # as Python does for a script there

import comparison
import peers
import turns
from common import TEXT, make_prompts, spread
from engines import is_installed
from machine import Neighbours, describe, worst

needs_transformers = pytest.mark.skipif(not is_installed("transformers"), reason="transformers is not installed")


class Clock:
    """Time that passes only where a fake engine says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Fake:
    """An engine whose n tokens after B prompts of T cost B * T * per_prompt_token + (n - 1) * per_token seconds."""

    def __init__(self, clock: Clock, name: str, precision: str, per_prompt_token: float, per_token: float) -> None:
        self.clock, self.name, self.precision = clock, name, precision
        self.costs = per_prompt_token, per_token
        self.calls = 0
        self.answers = [list(range(1000))] * 8

    def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        self.calls += 1
        self.clock.now += sum(map(len, prompts)) * self.costs[0] + (n - 1) * self.costs[1]
        return [answer[:n] for answer in self.answers[: len(prompts)]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns, "time", clock)
    return clock


REQUEST = turns.Request(decode_prompts=[[1] * 40], prefill_prompts=[[2] * 256], new_tokens=65)
THREE_USERS = turns.Request(decode_prompts=[[1] * 40] * 3, prefill_prompts=[[2] * 256] * 3, new_tokens=65)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_decode_speed_is_that_of_all_tokens_but_the_first(clock: Clock) -> None:
    taken = turns.sample(Fake(clock, "minillm", "fp32", per_prompt_token=0.01, per_token=0.04), REQUEST)
    assert taken.decode_tokens_per_s == pytest.approx(25)  # 1 / 0.04, whatever the 40 tokens of prompt cost
    assert taken.prefill_s == pytest.approx(2.56)


def test_decode_speed_of_a_batch_is_that_of_all_its_rows(clock: Clock) -> None:
    taken = turns.sample(Fake(clock, "minillm", "fp32", per_prompt_token=0.01, per_token=0.04), THREE_USERS)
    assert taken.decode_tokens_per_s == pytest.approx(3 * 25)
    assert taken.prefill_s == pytest.approx(3 * 2.56)


def test_a_slow_call_does_not_move_the_prefill(clock: Clock) -> None:
    engine = Fake(clock, "minillm", "fp32", 0.01, 0.04)
    usual, calls = engine.generate, iter([5.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0])

    def hit_by_noise(prompts: list[list[int]], n: int) -> list[list[int]]:
        clock.now += next(calls)
        return usual(prompts, n)

    engine.generate = hit_by_noise  # type: ignore[method-assign]
    taken = turns.sample(engine, REQUEST)
    assert (taken.decode_tokens_per_s, taken.prefill_s) == pytest.approx((25, 2.56))


def test_engines_take_turns_after_a_warm_up_that_is_not_counted(clock: Clock) -> None:
    order: list[str] = []

    class Noting(Fake):
        def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]:
            if n == REQUEST.new_tokens:  # one such call a turn, and none in the warm-up
                order.append(self.name)
            if self.calls < 2 * turns.WARM_UPS:
                clock.now += 60  # the first calls are slow
            return super().generate(prompts, n)

    engines = [Noting(clock, name, "fp32", 0.01, 0.04) for name in "abc"]
    samples = turns.measure(engines, REQUEST, rounds=3).samples
    assert order == list("abcabcabc")
    assert [len(taken) for taken in samples] == [3, 3, 3]
    assert all(s.prefill_s == pytest.approx(2.56) for taken in samples for s in taken)


def test_disturbed_rounds_are_repeated_while_there_is_patience(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbances = iter([0.0, 0.9, 0.5, 0.0, 0.02, 0.7])

    class Scripted:
        def busy_cores(self) -> float:
            return next(disturbances)

    monkeypatch.setattr(turns, "Neighbours", Scripted)
    engine = Fake(clock, "minillm", "fp32", 0.01, 0.04)  # a turn takes 11.5 seconds
    measured = turns.measure([engine], REQUEST, rounds=3, patience=600)
    assert len(measured.samples[0]) == 3 and measured.disturbed_rounds == 2
    assert measured.others_busy_cores == 0.02  # the worst round that counts
    disturbances = iter([0.9, 0.9, 0.9])
    measured = turns.measure([engine], REQUEST, rounds=3)  # without patience every round counts
    assert len(measured.samples[0]) == 3 and (measured.disturbed_rounds, measured.others_busy_cores) == (0, 0.9)


def test_ratios_are_taken_within_a_round_and_above_1_is_faster() -> None:
    ours = [turns.Sample(30, 0.2), turns.Sample(15, 0.4), turns.Sample(36, 0.1)]  # the machine drifts by half ...
    theirs = [turns.Sample(20, 0.3), turns.Sample(10, 0.6), turns.Sample(20, 0.2)]  # ... for both
    ratios = turns.times_as_fast(ours, theirs)
    assert ratios["decode"] == pytest.approx([1.5, 1.5, 1.8])
    assert ratios["prefill"] == pytest.approx([1.5, 1.5, 2.0])
    assert spread(ratios["decode"])["median"] == pytest.approx(1.5)


def test_an_engine_that_stops_early_is_refused(clock: Clock) -> None:
    engine = Fake(clock, "transformers", "fp32", 0.01, 0.04)
    engine.answers[1] = engine.answers[1][:10]
    with pytest.raises(MinillmError, match="transformers gave 10 tokens where 65 were asked for") as error:
        turns.sample(engine, THREE_USERS)
    assert is_one_sentence(str(error.value))
    del engine.answers[2:]
    with pytest.raises(MinillmError, match="gave 2 answers to 3 prompts"):
        turns.sample(engine, THREE_USERS)


def test_times_that_cannot_be_told_apart_are_refused(clock: Clock) -> None:
    with pytest.raises(MinillmError, match="took no longer than 1") as error:
        turns.sample(Fake(clock, "minillm", "fp32", 0.01, 0.0), REQUEST)
    assert is_one_sentence(str(error.value))


# --- what is compared with what --------------------------------------------------------------------------------------


@pytest.fixture
def five(clock: Clock) -> list[Fake]:
    """minillm decodes 1.2, 0.9 times as fast as transformers, prefill 0.5, 2 times; llama.cpp decodes 3 times as fast."""
    return [
        Fake(clock, "minillm", "fp32", 0.02, 0.10),
        Fake(clock, "transformers", "fp32", 0.01, 0.12),
        Fake(clock, "minillm", "bf16", 0.01, 0.10),
        Fake(clock, "transformers", "bf16", 0.02, 0.09),
        Fake(clock, "llama.cpp", "Q4_1", 0.01, 0.05),
    ]


def test_each_precision_is_compared_with_its_own_and_llama_cpp_with_every_one(five: list[Fake]) -> None:
    result = comparison.summarize(five, turns.measure(five, REQUEST, rounds=3).samples)
    found = {
        (r["phase"], r["precision"], r["peer"], r["peer_precision"]): r["times_as_fast"]["median"]
        for r in result["ratios"]
    }
    assert found == pytest.approx(
        {
            ("decode", "fp32", "transformers", "fp32"): 1.2,
            ("prefill", "fp32", "transformers", "fp32"): 0.5,
            ("decode", "bf16", "transformers", "bf16"): 0.9,
            ("prefill", "bf16", "transformers", "bf16"): 2.0,
            ("decode", "fp32", "llama.cpp", "Q4_1"): 0.5,
            ("prefill", "fp32", "llama.cpp", "Q4_1"): 0.5,
            ("decode", "bf16", "llama.cpp", "Q4_1"): 0.5,
            ("prefill", "bf16", "llama.cpp", "Q4_1"): 1.0,
        }
    )
    assert {r["target"] for r in result["ratios"] if r["peer"] == "llama.cpp"} == {None}
    assert {r["phase"]: r["target"] for r in result["ratios"] if r["peer"] == "transformers"} == comparison.TARGETS


@pytest.fixture
def quantized(clock: Clock) -> list[Fake]:
    """Compiled int4 decodes 1.5 times as fast as eager int4 and 1.2 times as fast as llama.cpp; transformers is slowest."""
    return [
        Fake(clock, "minillm", "bf16", 0.01, 0.12),
        Fake(clock, "transformers", "bf16", 0.02, 0.24),
        Fake(clock, "minillm", "int8", 0.01, 0.12),
        Fake(clock, "minillm", "int4", 0.01, 0.06),
        Fake(clock, "minillm", "compiled int4", 0.01, 0.04),
        Fake(clock, "llama.cpp", "Q4_1", 0.01, 0.048),
    ]


def test_quantized_stages_stand_beside_16_bits_of_transformers_and_compiled_steps_beside_eager_ones(
    quantized: list[Fake],
) -> None:
    result = comparison.summarize(quantized, turns.measure(quantized, REQUEST, rounds=1).samples)
    decode = {
        (r["precision"], r["peer"]): (r["times_as_fast"]["median"], r["target"])
        for r in result["ratios"]
        if r["phase"] == "decode"
    }
    assert decode == {
        ("bf16", "transformers"): (pytest.approx(2), 1.15),
        ("bf16", "llama.cpp"): (pytest.approx(0.4), None),
        ("int8", "transformers"): (pytest.approx(2), None),
        ("int8", "llama.cpp"): (pytest.approx(0.4), None),
        ("int4", "transformers"): (pytest.approx(4), None),
        ("int4", "llama.cpp"): (pytest.approx(0.8), 0.8),
        ("compiled int4", "transformers"): (pytest.approx(6), None),
        ("compiled int4", "minillm"): (pytest.approx(1.5), 1.4),
        ("compiled int4", "llama.cpp"): (pytest.approx(1.2), 1.2),
    }
    prefill = [(r["precision"], r["peer"], r["target"]) for r in result["ratios"] if r["phase"] == "prefill"]
    assert ("compiled int4", "minillm", 1.4) not in prefill and len(prefill) == len(decode) - 1
    assert {target for _, peer, target in prefill if peer == "llama.cpp"} == {None}


def test_a_compiled_step_that_is_too_slow_is_named_beside_both(quantized: list[Fake]) -> None:
    quantized[4].costs = (0.01, 0.05)
    found = comparison.summarize(quantized, turns.measure(quantized, REQUEST, rounds=1).samples)["ratios"]
    lines = [line for line in shortfalls(found) if "compiled" in line]
    assert lines == [
        "Below the target of 1.4: minillm's decode in compiled int4 is 1.20 times as fast as minillm in int4.",
        "Slower: minillm's decode in compiled int4 is 0.96 times as fast as llama.cpp in Q4_1.",
    ]


def test_compiled_answers_are_set_beside_eager_ones_and_other_quantized_ones_beside_none(quantized: list[Fake]) -> None:
    quantized[0].answers[0] = [*range(9), 0, *range(10, 1000)]  # of bf16: no matter here but to those beside it
    quantized[4].answers[0] = [*range(30), 0, *range(31, 1000)]
    found = {
        (row["engine"], row["precision"]): row["equal_tokens"] for row in comparison.check_answers(quantized, REQUEST)
    }
    assert found == {("transformers", "bf16"): 9, ("minillm", "compiled int4"): 30, ("llama.cpp", "Q4_1"): 9}


def test_what_is_done_once_is_timed_apart(clock: Clock) -> None:
    class Compiling(Fake):
        def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]:
            if n > 1 and not any(length > 1 for length in asked):
                clock.now += 15  # the first decode step is compiled
            asked.append(n)
            return super().generate(prompts, n)

    asked: list[int] = []
    engine = Compiling(clock, "minillm", "compiled int4", per_prompt_token=0.01, per_token=0.04)
    assert turns.first_calls(engine, REQUEST) == pytest.approx(2.56 + 0.4 + 64 * 0.04 + 15)
    assert asked == [1, REQUEST.new_tokens]  # a whole answer: a step further on may need a program of its own
    assert turns.sample(engine, REQUEST).decode_tokens_per_s == pytest.approx(25)


def test_it_says_where_minillm_is_slower_and_which_target_it_misses(five: list[Fake]) -> None:
    five[1].costs = (0.05, 0.11)  # fp32 decode 1.1 times as fast: faster, and below the target
    lines = shortfalls(comparison.summarize(five[:4], turns.measure(five[:4], REQUEST, rounds=1).samples)["ratios"])
    assert lines == [
        "Below the target of 1.15: minillm's decode in fp32 is 1.10 times as fast as transformers in fp32.",
        "Slower: minillm's decode in bf16 is 0.90 times as fast as transformers in bf16.",
    ]


def test_fp32_answers_must_be_equal_and_others_are_reported(five: list[Fake]) -> None:
    five[3].answers[0] = [*range(7), 0, 0, 0, *range(10, 1000)]  # parts at token 8, in bf16
    agreement = {
        (row["engine"], row["precision"]): row["equal_tokens"] for row in comparison.check_answers(five, REQUEST)
    }
    assert agreement == {("transformers", "fp32"): 65, ("transformers", "bf16"): 7, ("llama.cpp", "Q4_1"): 65}
    agreement = {row["engine"] + row["precision"]: row for row in comparison.check_answers(five, THREE_USERS)}
    assert (agreement["transformersbf16"]["equal_tokens"], agreement["transformersbf16"]["of"]) == (7 + 65 + 65, 3 * 65)
    five[1].answers[2] = [*range(20), 0, *range(21, 1000)]
    comparison.check_answers(five, REQUEST)  # a row that nobody asked for
    with pytest.raises(MinillmError, match="differ at new token 21 of prompt 3") as error:
        comparison.check_answers(five, THREE_USERS)
    assert str(error.value).endswith(".")


def test_prompts_have_the_lengths_that_were_asked_for_and_differ_in_their_tokens() -> None:
    _, tokenizer = minillm.load("tiny", "cpu")
    request = turns.make_request(tokenizer, 40, 2000, 8, batch=32)  # longer than the text: it repeats
    assert {len(prompt) for prompt in request.decode_prompts} == {40} and request.longest == 2001
    assert {len(prompt) for prompt in request.prefill_prompts} == {2000}
    assert request.decode_prompts == [prompt[:40] for prompt in request.prefill_prompts]
    assert request.batch == len({tuple(prompt) for prompt in request.decode_prompts}) == 32
    assert request.decode_prompts[0] == tokenizer.encode(TEXT)[:40]
    many, period = make_prompts(tokenizer, 3, 1000), len(tokenizer.encode(TEXT))
    assert (
        period < 1000 and many[period:] == many[: 1000 - period]
    )  # more of them than the text has tokens: they repeat


# --- the commands ----------------------------------------------------------------------------------------------------


@needs_transformers
@pytest.mark.parametrize("batch", [1, 3])
def test_peers_writes_its_result_whole(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter(range(10**6))

    # Times of calls this short mean nothing and could even be negative: only the rest is tested here.
    def invented(engine: Any, prompts: list[list[int]], n: int) -> float:
        assert len(prompts) == batch
        return n * 0.01 + len(prompts[0]) * 1e-3 + next(calls) * 1e-9

    monkeypatch.setattr(turns, "seconds", invented)
    path = tmp_path / "new" / "peers.json"
    options = ["--model", "tiny", "--device", "cpu", "--rounds", "3", "--max-new-tokens", "8", "--prefill-prompt", "64"]
    options += ["--engines", "minillm,transformers", "--batch", str(batch)]
    assert peers.main([*options, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert set(result) == {
        "date", "commit", "dirty", "machine", "versions", "settings", "engines", "ratios", "agreement",
        "others_busy_cores", "disturbed_rounds",
    }  # fmt: skip
    assert [(e["engine"], e["precision"]) for e in result["engines"]] == [
        ("minillm", "fp32"), ("transformers", "fp32"), ("minillm", "bf16"), ("transformers", "bf16"),
    ]  # fmt: skip
    for row in result["engines"]:
        for key in ("decode_tokens_per_s", "prefill_s"):
            assert row[key]["min"] <= row[key]["median"] <= row[key]["max"] and len(row[key]["rounds"]) == 3
    assert len(result["ratios"]) == 4 and all(len(r["times_as_fast"]["rounds"]) == 3 for r in result["ratios"])
    n = 8 * batch
    assert result["agreement"][0] == {"engine": "transformers", "precision": "fp32", "equal_tokens": n, "of": n}
    assert result["settings"]["targets_beside_transformers"] == {"decode": 1.15, "prefill": 1.0}
    assert (result["settings"]["rounds"], result["settings"]["batch"]) == (3, batch)
    assert result["versions"]["torch"] == torch.__version__
    assert "how many times as fast" in capsys.readouterr().out


@needs_transformers
def test_one_command_runs_every_stage_and_every_peer_that_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []

    def invented(engine: Any, prompts: list[list[int]], n: int) -> float:
        folders.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
        return n * 0.01 + len(prompts[0]) * 1e-3

    usual = kernels.generate
    monkeypatch.setattr(kernels, "generate", lambda *args: usual(*args, compiled=False))
    monkeypatch.setattr(turns, "seconds", invented)
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    path = tmp_path / "peers.json"
    options = ["--model", "tiny", "--device", "cpu", "--dtypes", "fp32", "--rounds", "2", "--max-new-tokens", "8"]
    assert peers.main([*options, "--prefill-prompt", "64", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [(e["engine"], e["precision"]) for e in result["engines"]] == [
        ("minillm", "fp32"), ("transformers", "fp32"), ("minillm", "int8"), ("minillm", "int4"), ("minillm", "compiled int4"),
    ]  # fmt: skip
    assert all(e["first_calls_s"] == pytest.approx(0.01 + 0.064 + 0.08 + 0.04) for e in result["engines"])
    assert result["settings"]["activations_of_quantized"] == "bf16"
    assert [(r["phase"], r["precision"], r["target"]) for r in result["ratios"]][-1] == ("decode", "compiled int4", 1.4)
    # Compiled code is looked for in a folder that is empty at first and gone afterwards.
    (folder,) = set(folders)
    assert folder != before == os.environ.get("TORCHINDUCTOR_CACHE_DIR") and not Path(folder).exists()
    assert "gpt-fast" not in capsys.readouterr().out  # whose GPU is nothing to set a CPU beside


def test_on_a_gpu_published_figures_stand_apart_and_are_called_so(
    five: list[Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    result = comparison.summarize(five, turns.measure(five, REQUEST, rounds=1).samples)
    result |= {"settings": {"batch": 1}, "agreement": [], "others_busy_cores": None}
    peers.show(make_console(), result, torch.device("cuda"))
    printed = " ".join(capsys.readouterr().out.split())
    assert "published by gpt-fast, not measured here" in printed and "104.9" in printed and "68.5%" in printed


@pytest.mark.parametrize(
    "options, status, words",
    [
        (["--engines", "vllm"], 2, "Unknown engine 'vllm'"),
        (["--model", "tiny", "--engines", "llama.cpp"], 2, "llama"),
        (["--engines", "kernels", "--batch", "2"], 2, "kernels is run for one prompt at a time"),
        (["--model", "no-such-model"], 2, "Unknown model"),
        (["--model", "tiny", "--dtypes", "fp8"], 2, "Unknown dtype"),
        (["--model", "tiny", "--device", "abacus"], 2, "Unknown device"),
        (["--max-new-tokens", "1"], 2, "at least 2"),
        (["--model", "tiny", "--prefill-prompt", "1000"], 2, "positions"),
        (["--rounds", "0"], 2, "below 1"),
        (["--batch", "0"], 2, "below 1"),
        (["--rounds", "many"], 2, "invalid"),
    ],
)
def test_bad_requests_to_peers_end_in_one_sentence(
    options: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = peers.main(options)
    except SystemExit as exit:  # argparse leaves that way
        code = exit.code  # type: ignore[assignment]
    message = capsys.readouterr().err.strip()
    assert code == status and words in message and message.startswith("peers.py: ")
    assert "\n" not in message and message.endswith(".")


def test_an_engine_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "is_installed", lambda name: name == "minillm")
    assert peers.main(["--engines", "minillm,llama.cpp"]) == 2
    assert "The engine llama.cpp is not installed" in capsys.readouterr().err


def test_llama_cpp_is_run_for_one_user_and_its_absence_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "is_installed", lambda name: name != "transformers")
    assert peers.main(["--engines", "minillm,llama.cpp", "--batch", "2"]) == 2
    assert "llama.cpp is run for one prompt at a time" in capsys.readouterr().err
    monkeypatch.setattr(turns, "seconds", lambda engine, prompts, n: n * 0.01)
    options = ["--model", "tiny", "--device", "cpu", "--dtypes", "fp32", "--rounds", "1", "--prefill-prompt", "64"]
    assert peers.main([*options, "--batch", "2"]) == 0
    assert "llama.cpp is run for one prompt at a time: it is left out" in capsys.readouterr().out


def test_a_result_names_machine_versions_and_commit() -> None:
    description = describe(torch.device("cpu"))
    here = {"cwd": Path(__file__).parent, "capture_output": True, "text": True}
    done = subprocess.run(["git", "log", "-1", "--format=%H"], **here, check=False)
    assert description["commit"] == (done.stdout.strip() if done.returncode == 0 else None)
    assert description["machine"]["threads"] == torch.get_num_threads()
    assert description["machine"]["processor"] == description["machine"]["device"]
    assert description["versions"]["torch"] == torch.__version__
    assert json.loads(json.dumps(description)) == description


def test_neighbours_are_those_who_are_not_we(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(10.0, 500.0, 3.0), (20.0, 515.0, 13.0)])  # wall, CPU seconds of everyone, and ours
    monkeypatch.setattr(Neighbours, "_read", staticmethod(lambda: next(readings)))
    assert Neighbours().busy_cores() == pytest.approx(0.5)  # of 15 seconds of work in 10, 10 are ours
    assert worst(None, 0.2, 0.5, None) == 0.5 and worst(None, None) is None
