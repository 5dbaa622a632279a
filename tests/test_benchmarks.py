"""The benchmarks measure what they say: the arithmetic on an invented clock, the weights by value, the commands end to end."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import SHAPES, is_one_sentence, lively_model, logits_whole, random_prompt, wide

import minillm
from minillm.config import known_model
from minillm.errors import MinillmError
from minillm.report import make_console
from minillm.stages import gqa, kernels
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.quantization import quantize
from minillm.stages.slotted_cache import SlottedCache

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as Python does for a script there

import engines as engines_module  # noqa: E402
import peers  # noqa: E402
from common import TEXT  # noqa: E402
from engines import Compiled, Minillm, Quantized, Transformers, is_installed, llama_of_transformers  # noqa: E402
from machine import Neighbours, describe  # noqa: E402

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
    monkeypatch.setattr(peers, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny operators: a second thread would only be waited for
    yield
    torch.set_num_threads(before)


LLAMAS = {
    "llama": wide(SHAPES["llama"], n_heads=4),  # transformers wants heads that divide the width
    "multi-query": SHAPES["multi-query"],
    "multi-head": SHAPES["multi-head"],
}
REQUEST = peers.Request(decode_prompts=[[1] * 40], prefill_prompts=[[2] * 256], new_tokens=65)
THREE_USERS = peers.Request(decode_prompts=[[1] * 40] * 3, prefill_prompts=[[2] * 256] * 3, new_tokens=65)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_decode_speed_is_that_of_all_tokens_but_the_first(clock: Clock) -> None:
    taken = peers.sample(Fake(clock, "minillm", "fp32", per_prompt_token=0.01, per_token=0.04), REQUEST)
    assert taken.decode_tokens_per_s == pytest.approx(25)  # 1 / 0.04, whatever the 40 tokens of prompt cost
    assert taken.prefill_s == pytest.approx(2.56)


def test_decode_speed_of_a_batch_is_that_of_all_its_rows(clock: Clock) -> None:
    taken = peers.sample(Fake(clock, "minillm", "fp32", per_prompt_token=0.01, per_token=0.04), THREE_USERS)
    assert taken.decode_tokens_per_s == pytest.approx(3 * 25)
    assert taken.prefill_s == pytest.approx(3 * 2.56)


def test_a_slow_call_does_not_move_the_prefill(clock: Clock) -> None:
    engine = Fake(clock, "minillm", "fp32", 0.01, 0.04)
    usual, calls = engine.generate, iter([5.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0])

    def hit_by_noise(prompts: list[list[int]], n: int) -> list[list[int]]:
        clock.now += next(calls)
        return usual(prompts, n)

    engine.generate = hit_by_noise  # type: ignore[method-assign]
    taken = peers.sample(engine, REQUEST)
    assert (taken.decode_tokens_per_s, taken.prefill_s) == pytest.approx((25, 2.56))


def test_engines_take_turns_after_a_warm_up_that_is_not_counted(clock: Clock) -> None:
    order: list[str] = []

    class Noting(Fake):
        def generate(self, prompts: list[list[int]], n: int) -> list[list[int]]:
            if n == REQUEST.new_tokens:  # one such call a turn, and none in the warm-up
                order.append(self.name)
            if self.calls < 2 * peers.WARM_UPS:
                clock.now += 60  # the first calls are slow
            return super().generate(prompts, n)

    engines = [Noting(clock, name, "fp32", 0.01, 0.04) for name in "abc"]
    samples = peers.measure(engines, REQUEST, rounds=3).samples
    assert order == list("abcabcabc")
    assert [len(taken) for taken in samples] == [3, 3, 3]
    assert all(s.prefill_s == pytest.approx(2.56) for taken in samples for s in taken)


def test_disturbed_rounds_are_repeated_while_there_is_patience(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbances = iter([0.0, 0.9, 0.5, 0.0, 0.02, 0.7])

    class Scripted:
        def busy_cores(self) -> float:
            return next(disturbances)

    monkeypatch.setattr(peers, "Neighbours", Scripted)
    engine = Fake(clock, "minillm", "fp32", 0.01, 0.04)  # a turn takes 11.5 seconds
    measured = peers.measure([engine], REQUEST, rounds=3, patience=600)
    assert len(measured.samples[0]) == 3 and measured.disturbed_rounds == 2
    assert measured.others_busy_cores == 0.02  # the worst round that counts
    disturbances = iter([0.9, 0.9, 0.9])
    measured = peers.measure([engine], REQUEST, rounds=3)  # without patience every round counts
    assert len(measured.samples[0]) == 3 and (measured.disturbed_rounds, measured.others_busy_cores) == (0, 0.9)


def test_ratios_are_taken_within_a_round_and_above_1_is_faster() -> None:
    ours = [peers.Sample(30, 0.2), peers.Sample(15, 0.4), peers.Sample(36, 0.1)]  # the machine drifts by half ...
    theirs = [peers.Sample(20, 0.3), peers.Sample(10, 0.6), peers.Sample(20, 0.2)]  # ... for both
    ratios = peers.times_as_fast(ours, theirs)
    assert ratios["decode"] == pytest.approx([1.5, 1.5, 1.8])
    assert ratios["prefill"] == pytest.approx([1.5, 1.5, 2.0])
    assert peers.spread(ratios["decode"])["median"] == pytest.approx(1.5)


def test_an_engine_that_stops_early_is_refused(clock: Clock) -> None:
    engine = Fake(clock, "transformers", "fp32", 0.01, 0.04)
    engine.answers[1] = engine.answers[1][:10]
    with pytest.raises(MinillmError, match="transformers gave 10 tokens where 65 were asked for") as error:
        peers.sample(engine, THREE_USERS)
    assert is_one_sentence(str(error.value))
    del engine.answers[2:]
    with pytest.raises(MinillmError, match="gave 2 answers to 3 prompts"):
        peers.sample(engine, THREE_USERS)


def test_times_that_cannot_be_told_apart_are_refused(clock: Clock) -> None:
    with pytest.raises(MinillmError, match="took no longer than 1") as error:
        peers.sample(Fake(clock, "minillm", "fp32", 0.01, 0.0), REQUEST)
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
    result = peers.summarize(five, peers.measure(five, REQUEST, rounds=3).samples)
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
    assert {r["phase"]: r["target"] for r in result["ratios"] if r["peer"] == "transformers"} == peers.TARGETS


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
    result = peers.summarize(quantized, peers.measure(quantized, REQUEST, rounds=1).samples)
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
    found = peers.summarize(quantized, peers.measure(quantized, REQUEST, rounds=1).samples)["ratios"]
    lines = [line for line in peers.shortfalls(found) if "compiled" in line]
    assert lines == [
        "Below the target of 1.4: minillm's decode in compiled int4 is 1.20 times as fast as minillm in int4.",
        "Slower: minillm's decode in compiled int4 is 0.96 times as fast as llama.cpp in Q4_1.",
    ]


def test_compiled_answers_are_set_beside_eager_ones_and_other_quantized_ones_beside_none(quantized: list[Fake]) -> None:
    quantized[0].answers[0] = [*range(9), 0, *range(10, 1000)]  # of bf16: no matter here but to those beside it
    quantized[4].answers[0] = [*range(30), 0, *range(31, 1000)]
    found = {(row["engine"], row["precision"]): row["equal_tokens"] for row in peers.check_answers(quantized, REQUEST)}
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
    assert peers.first_calls(engine, REQUEST) == pytest.approx(2.56 + 0.4 + 64 * 0.04 + 15)
    assert asked == [1, REQUEST.new_tokens]  # a whole answer: a step further on may need a program of its own
    assert peers.sample(engine, REQUEST).decode_tokens_per_s == pytest.approx(25)


def test_it_says_where_minillm_is_slower_and_which_target_it_misses(five: list[Fake]) -> None:
    five[1].costs = (0.05, 0.11)  # fp32 decode 1.1 times as fast: faster, and below the target
    lines = peers.shortfalls(peers.summarize(five[:4], peers.measure(five[:4], REQUEST, rounds=1).samples)["ratios"])
    assert lines == [
        "Below the target of 1.15: minillm's decode in fp32 is 1.10 times as fast as transformers in fp32.",
        "Slower: minillm's decode in bf16 is 0.90 times as fast as transformers in bf16.",
    ]


def test_fp32_answers_must_be_equal_and_others_are_reported(five: list[Fake]) -> None:
    five[3].answers[0] = [*range(7), 0, 0, 0, *range(10, 1000)]  # parts at token 8, in bf16
    agreement = {(row["engine"], row["precision"]): row["equal_tokens"] for row in peers.check_answers(five, REQUEST)}
    assert agreement == {("transformers", "fp32"): 65, ("transformers", "bf16"): 7, ("llama.cpp", "Q4_1"): 65}
    agreement = {row["engine"] + row["precision"]: row for row in peers.check_answers(five, THREE_USERS)}
    assert (agreement["transformersbf16"]["equal_tokens"], agreement["transformersbf16"]["of"]) == (7 + 65 + 65, 3 * 65)
    five[1].answers[2] = [*range(20), 0, *range(21, 1000)]
    peers.check_answers(five, REQUEST)  # a row that nobody asked for
    with pytest.raises(MinillmError, match="differ at new token 21 of prompt 3") as error:
        peers.check_answers(five, THREE_USERS)
    assert str(error.value).endswith(".")


def test_prompts_have_the_lengths_that_were_asked_for_and_differ_in_their_tokens() -> None:
    _, tokenizer = minillm.load("tiny", "cpu")
    request = peers.make_request(tokenizer, 40, 2000, 8, batch=32)  # longer than the text: it repeats
    assert {len(prompt) for prompt in request.decode_prompts} == {40} and request.longest == 2001
    assert {len(prompt) for prompt in request.prefill_prompts} == {2000}
    assert request.decode_prompts == [prompt[:40] for prompt in request.prefill_prompts]
    assert request.batch == len({tuple(prompt) for prompt in request.decode_prompts}) == 32
    assert request.decode_prompts[0] == tokenizer.encode(TEXT)[:40]
    assert peers.make_prompts(tokenizer, 3, 1000)[-1]  # more of them than the text has tokens: they repeat


# --- the engines -----------------------------------------------------------------------------------------------------


@needs_transformers
@pytest.mark.parametrize("shape", LLAMAS)
def test_transformers_gets_the_same_weights(shape: str) -> None:
    model = lively_model(LLAMAS[shape])
    tokens = torch.tensor([random_prompt(30, 97)])
    with torch.inference_mode():
        theirs = llama_of_transformers(model)(tokens).logits
    torch.testing.assert_close(theirs, logits_whole(model, tokens), rtol=0, atol=1e-4)


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_engines_give_n_tokens_and_in_fp32_the_same(dtype: torch.dtype) -> None:
    model = lively_model(LLAMAS["llama"], dtype=dtype)
    prompts = [random_prompt(20, 97, seed) for seed in range(4)]
    ours, theirs = Minillm(model), Transformers(model)
    assert ours.precision == theirs.precision == {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    for n, B in ((1, 1), (2, 1), (30, 1), (1, 4), (30, 4)):
        answers, found = ours.generate(prompts[:B], n), theirs.generate(prompts[:B], n)
        assert [len(answer) for answer in answers] == [len(answer) for answer in found] == [n] * B
        assert dtype != torch.float32 or found == answers


def test_minillm_runs_its_newest_stage_for_one_prompt_and_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[str, int]] = []
    for cache in (GroupedKVCache, SlottedCache):
        usual = cache.attend

        def noting(self: Any, layer: int, q: torch.Tensor, *kv: torch.Tensor, usual: Any = usual) -> torch.Tensor:
            passes.append((type(self).__name__, q.shape[2]))
            return usual(self, layer, q, *kv)

        monkeypatch.setattr(cache, "attend", noting)
    engine = Minillm(lively_model(LLAMAS["llama"]))
    engine.generate([[1, 2, 3]], 2)
    assert passes == [("GroupedKVCache", 3)] * 2 + [("GroupedKVCache", 1)] * 2  # two layers, two passes
    passes.clear()
    engine.generate([[1, 2, 3], [4, 5, 6]], 2)  # all at once
    assert passes == [("SlottedCache", 6)] * 2 + [("SlottedCache", 2)] * 2


TINY = known_model("tiny")  # groups of 32 divide its widths


@pytest.mark.parametrize("precision, kind", [("int8", "FastInt8Linear"), ("int4", "FastInt4Linear")])
def test_quantized_engines_run_the_same_stages_on_quantized_weights(precision: str, kind: str) -> None:
    model = lively_model(TINY, dtype=torch.bfloat16)
    engine, prompts = Quantized(model, precision), [random_prompt(12, 97, seed) for seed in range(3)]
    assert (engine.name, engine.precision) == ("minillm", precision)
    assert type(engine.model.blocks[0].attention.qkv).__name__ == kind and engine.model.dtype == torch.bfloat16
    assert engine.generate(prompts[:1], 9) == [gqa.generate(quantize(model, precision), prompts[0], 9).tokens]
    assert [len(answer) for answer in engine.generate(prompts, 9)] == [9] * 3


def test_the_compiled_engine_is_the_kernels_stage_on_int4_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, usual = lively_model(TINY), [], kernels.generate

    def eager(model: Any, prompt: list[int], n: int) -> Any:
        asked.append((type(model.blocks[0].attention.qkv).__name__, n))
        return usual(model, prompt, n, compiled=False)

    monkeypatch.setattr(kernels, "generate", eager)  # compiling is tested where the stage is
    engine, prompt = Compiled(model), random_prompt(12, 97)
    assert (engine.name, engine.precision) == ("minillm", "compiled int4")
    assert engine.generate([prompt], 9) == [gqa.generate(quantize(model, "int4"), prompt, 9).tokens]
    assert asked == [("FastInt4Linear", 9)]


def test_eager_steps_never_go_by_the_name_of_compiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fn: Any, device: torch.device) -> Any:
        raise RuntimeError("there is no compiler here")

    monkeypatch.setattr(kernels, "_compile", broken)
    with pytest.raises(MinillmError, match=r"leave it out with --engines: .*there is no compiler here"):
        Compiled(lively_model(TINY)).generate([[1, 2, 3]], 4)


@needs_transformers
def test_transformers_runs_fused_attention_a_cache_and_nothing_on_the_logits() -> None:
    model = llama_of_transformers(lively_model(LLAMAS["llama"]))
    assert model.config._attn_implementation == "sdpa"
    settings = model.generation_config
    assert settings.use_cache and not settings.do_sample and settings.eos_token_id is None
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@needs_transformers
@pytest.mark.parametrize("shape, words", [("qwen3", "qwen3 model"), ("llama3", "rotary frequencies")])
def test_a_model_that_would_not_be_the_same_there_is_refused(shape: str, words: str) -> None:
    with pytest.raises(MinillmError, match=words) as error:
        llama_of_transformers(lively_model(SHAPES[shape]))
    assert str(error.value).endswith(".")


def test_llama_cpp_forgets_before_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in that does what llama-cpp-python does: it keeps what it has read until it is told to forget.
    class Llama:
        def __init__(self, *_: object, **__: object) -> None:
            self.kept: list[int] = []
            self.read: list[int] = []

        def reset(self) -> None:
            self.kept = []

        def generate(self, prompt: list[int], temp: float) -> Iterator[int]:
            known = len(self.kept) if prompt[: len(self.kept)] == self.kept else 0
            self.read.append(len(prompt) - known)
            self.kept = list(prompt)
            yield from range(100)

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    monkeypatch.setattr(engines_module, "default_model_path", lambda: Path("model.gguf"))
    engine = engines_module.LlamaCpp(torch.device("cpu"), context=64)
    for _ in range(3):
        assert engine.generate([[5, 6, 7]], 4) == [[0, 1, 2, 3]]
    assert engine.generate([[5, 6, 7, 8]], 4) == [[0, 1, 2, 3]]
    assert engine.model.read == [3, 3, 3, 4]  # the whole prompt every time


@pytest.mark.skipif(not is_installed("llama.cpp"), reason="llama-cpp-python is not installed")
def test_llama_cpp_starts_every_answer_anew() -> None:
    engine = engines_module.LlamaCpp(torch.device("cpu"), context=64)
    prompt = [504, 3575, 282, 260]
    (first,) = engine.generate([prompt], 8)
    assert len(first) == 8 and engine.generate([prompt], 8) == [first]
    assert engine.model.n_tokens >= len(prompt) + 7  # the prompt was read again, not kept


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

    monkeypatch.setattr(peers, "seconds", invented)
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
    monkeypatch.setattr(peers, "seconds", invented)
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
    result = peers.summarize(five, peers.measure(five, REQUEST, rounds=1).samples)
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
    monkeypatch.setattr(peers, "seconds", lambda engine, prompts, n: n * 0.01)
    options = ["--model", "tiny", "--device", "cpu", "--dtypes", "fp32", "--rounds", "1", "--prefill-prompt", "64"]
    assert peers.main([*options, "--batch", "2"]) == 0
    assert "llama.cpp is run for one prompt at a time: it is left out" in capsys.readouterr().out


def test_a_result_names_machine_versions_and_commit() -> None:
    description = describe(torch.device("cpu"))
    assert description["machine"]["cores"] >= 1 and description["machine"]["threads"] == torch.get_num_threads()
    assert description["versions"]["torch"] == torch.__version__
    assert description["commit"] is None or len(description["commit"]) == 40
    json.dumps(description)


def test_neighbours_are_those_who_are_not_we(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(10.0, 500.0, 3.0), (20.0, 515.0, 13.0)])  # wall, CPU seconds of everyone, and ours
    monkeypatch.setattr(Neighbours, "_read", staticmethod(lambda: next(readings)))
    assert Neighbours().busy_cores() == pytest.approx(0.5)  # of 15 seconds of work in 10, 10 are ours


# --- gpu.sh ----------------------------------------------------------------------------------------------------------

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def gpu_sh(folder: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": sys.executable, "OUT": str(folder), "OMP_NUM_THREADS": "1"} | environment
    command = ["bash", str(BENCHMARKS / "gpu.sh"), *parts]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)


@needs_bash
def test_gpu_sh_tours_a_tiny_model_on_the_cpu(tmp_path: Path) -> None:
    done = gpu_sh(tmp_path, "tiny", DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"machine.json", "gpu.log", "tiny.json", "tiny.png"}
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert [(part["part"], part["outcome"]) for part in machine["parts"]] == [("tiny", "passed")]
    tour = json.loads((tmp_path / "tiny.json").read_text())
    assert [stage["stage"] for stage in tour["stages"]][:2] == ["naive", "kv_cache"]
    assert "tiny: passed in" in done.stdout.splitlines()[-1]


@needs_bash
def test_gpu_sh_goes_on_after_a_part_that_failed_and_exits_nonzero(tmp_path: Path) -> None:
    (tmp_path / "smollm.json").mkdir()  # where the first part wants to write a file
    done = gpu_sh(tmp_path, "smollm", "tiny", DEVICE="cpu")
    assert done.returncode == 1
    assert "Failed: smollm" in done.stderr and "cannot be written" in done.stdout
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert [(part["part"], part["outcome"]) for part in machine["parts"]] == [("smollm", "failed"), ("tiny", "passed")]
    assert (tmp_path / "tiny.json").exists()


@needs_bash
@pytest.mark.parametrize(
    "part, environment, status, words",
    [
        ("everything", {}, 2, "Unknown part 'everything'"),
        ("tiny", {"PYTHON": "/no/such/python"}, 1, "/no/such/python does not run"),
        ("tiny", {"DEVICE": "abacus"}, 1, "Unknown device 'abacus'"),
        pytest.param(
            "tiny", {"DEVICE": "cuda"}, 1, "No CUDA device can be used here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)  # fmt: skip
def test_gpu_sh_refuses_what_it_cannot_do(
    part: str, environment: dict[str, str], status: int, words: str, tmp_path: Path
) -> None:
    done = gpu_sh(tmp_path / "out", part, **{"DEVICE": "cpu"} | environment)
    assert done.returncode == status and words in done.stderr
    assert not (tmp_path / "out").exists()


@needs_bash
def test_gpu_sh_names_the_packages_that_are_missing(tmp_path: Path) -> None:
    # A Python that has none of them: the same one, without its site-packages.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = gpu_sh(tmp_path / "out", "tiny", DEVICE="cpu", PYTHON=str(bare))
    assert done.returncode == 1 and "Missing Python packages: gguf" in done.stderr and ".whl/" in done.stderr
