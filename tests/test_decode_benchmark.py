"""benchmarks/decode.py measures what it says: who is set beside whom, what F6 picks, and what is counted for a step."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    is_one_sentence,
    lively_model,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)
from rich.console import Console

import minillm
from minillm.config import known_model
from minillm.errors import MinillmError
from minillm.model import Transformer
from minillm.roofline.ceilings import Ceilings
from minillm.stages import gqa
from minillm.stages.drafters import ModelDrafter
from minillm.stages.quantization import quantize, weight_bytes
from minillm.stages.speculative_gain import predicted_speedup

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # as Python does for a script there

import bench as benchmark
import decode
import engines
import precisions
import speculation
import turns

CONFIG = known_model("tiny")  # 4 query heads on 2 KV heads, and widths that groups of 32 divide
CEILINGS = Ceilings("abacus", "bf16", bandwidth=1e9, peak=1e10, overhead=1e-6)
# Seconds that a token takes in each precision, and with each kind of drafter.
SECONDS = {"fp32": 0.08, "bf16": 0.06, "int8": 0.05, "int4 g32": 0.02, "int4 g32, head int8": 0.02, "w8a8": 0.08}
DRAFTED = {"int8 twin": 0.05, "n-grams": 0.1}


class FixedMeter:
    """Ceilings as they were invented, and how often a sample was taken."""

    samples = 0

    def sample(self) -> None:
        FixedMeter.samples += 1

    def ceilings(self) -> Ceilings:
        return CEILINGS


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> type[FixedMeter]:
    monkeypatch.setattr(FixedMeter, "samples", 0)
    monkeypatch.setattr(precisions, "make_meter", lambda model: FixedMeter())
    return FixedMeter


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that follow the tables above: (n - 1) tokens of every prompt after a prefill of a millisecond a token."""

    def seconds(engine: Any, prompts: list[list[int]], n: int) -> float:
        drafted = [t for name, t in DRAFTED.items() if name in engine.name]
        per_token = drafted[0] if drafted else SECONDS[engine.precision]
        return len(prompts) * (n - 1) * per_token + 1e-3 * sum(map(len, prompts))

    monkeypatch.setattr(turns, "seconds", seconds)


def quiet(rounds: int = 1) -> benchmark.Bench:
    return benchmark.Bench(Console(quiet=True), rounds, patience=0)


@pytest.fixture(scope="module")
def bf16() -> Transformer:
    return lively_model(CONFIG, dtype=torch.bfloat16)


def linear_flops(model: Transformer) -> int:
    """2 a weight of every linear layer, for each token."""
    c = model.config
    attention = c.d_model * (c.n_heads + 2 * c.n_kv_heads) * c.head_dim + c.n_heads * c.head_dim * c.d_model
    return 2 * (c.n_layers * (attention + 3 * c.d_model * c.d_ff) + c.d_model * c.vocab_size)


# --- engines ---------------------------------------------------------------------------------------------------------


def test_speculation_answers_prompt_by_prompt_and_adds_up_what_came_of_it() -> None:
    model = lively_model(CONFIG)
    prompts = [random_prompt(length, 97, seed=length) for length in (5, 12, 9)]
    plain = engines.Plain(model, "fp32").generate(prompts, 10)
    assert plain == [gqa.generate(model, prompt, 10).tokens for prompt in prompts]
    engine = speculation.Speculative(model, "itself", ModelDrafter(model), lookahead=2)
    assert engine.precision == "fp32"
    for _ in range(2):  # the latest call only: 9 tokens after the first are 3 rounds of 2 guesses and 1 of its own
        assert engine.generate(prompts, 10) == plain
        s = engine.speculation
        assert (s.rounds, s.drafted, s.accepted, s.alpha) == (3 * 3, 3 * 6, 3 * 6, 1.0)


def test_precisions_are_what_they_are_called_and_what_cannot_be_made_is_left_out(
    bf16: Transformer, capsys: pytest.CaptureFixture[str]
) -> None:
    made = precisions.make_quantized(Console(), bf16, precisions.QUANTIZED)
    assert list(made) == ["int8", "int4 g32", "int4 g32, head int8", "w8a8"]  # 64 does not divide a width of 32
    assert "int4 g64, head int8 is left out. Groups of 64 do not divide" in " ".join(capsys.readouterr().out.split())
    kinds = {name: (type(m.blocks[0].attention.qkv).__name__, type(m.head).__name__) for name, m in made.items()}
    assert kinds == {
        "int8": ("FastInt8Linear", "FastInt8Linear"),
        "int4 g32": ("FastInt4Linear", "FastInt4Linear"),
        "int4 g32, head int8": ("FastInt4Linear", "FastInt8Linear"),
        "w8a8": ("FastW8A8Linear", "FastW8A8Linear"),
    }
    broad = lively_model(replace(CONFIG, d_model=64, n_heads=8), dtype=torch.bfloat16)
    large = precisions.make_quantized(Console(quiet=True), broad, precisions.TWINS)
    assert large["int4 g64, head int8"].blocks[0].attention.qkv.group_size == 64
    for name, model in made.items():  # what is counted has the bytes of what is run
        assert weight_bytes(precisions.shape_of(name, model)) == weight_bytes(model)
        assert precisions.shape_of(name, model).device.type == "meta"
    assert weight_bytes(precisions.shape_of("bf16", bf16)) == weight_bytes(bf16)


# --- precisions ------------------------------------------------------------------------------------------------------


def test_each_precision_is_set_beside_fp32_bf16_and_its_prediction(
    bf16: Transformer, meter: type[FixedMeter], invented: None
) -> None:
    bench, models = quiet(3), {"fp32": lively_model(CONFIG), "bf16": bf16, "int4 g32": quantize(bf16, "int4")}
    rows = precisions.measure_precisions(bench, models, turns.Request([[1] * 20], [[2] * 30], new_tokens=9))
    found = {(r["phase"], r["what"], r["beside"]): (r["times_as_fast"]["median"], r["target"]) for r in bench.ratios}
    assert found == {
        ("decode", "bf16", "fp32"): (pytest.approx(8 / 6), None),
        ("prefill", "bf16", "fp32"): (pytest.approx(1), None),
        ("decode", "int4 g32", "fp32"): (pytest.approx(4), 2.2),
        ("prefill", "int4 g32", "fp32"): (pytest.approx(1), None),
        ("decode", "int4 g32", "bf16"): (pytest.approx(3), None),
        ("prefill", "int4 g32", "bf16"): (pytest.approx(1), None),
    }
    assert meter.samples == 3 * 3  # every meter between all rounds
    for row in rows:
        step = row["step"]
        # The first of 8 steps attends over the 20 tokens of the prompt and a new one, the last over 28.
        attention = 4 * CONFIG.n_layers * CONFIG.n_heads * CONFIG.head_dim * 24.5
        assert step["flops"] == linear_flops(bf16) + attention
        assert step["measured_s"]["median"] == pytest.approx(SECONDS[row["precision"]])
        assert step["ratio"] == pytest.approx(SECONDS[row["precision"]] / step["predicted_s"])
        assert row["weight_bytes"] == weight_bytes(models[row["precision"]])
    assert rows[2]["step"]["bytes"] < rows[1]["step"]["bytes"] < rows[0]["step"]["bytes"]


# --- speculation -----------------------------------------------------------------------------------------------------


def test_passes_are_set_beside_the_plain_step_of_their_own_turn(
    bf16: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = speculation.LONGEST_LOOKAHEAD + 2  # 1 to 9 tokens of the target, 1 of the twin
    # The machine: a slow warm-up, then turns that are slower as a whole; and what the twin takes in each.
    turns = [(50.0, 9.0), (4.0, 0.2), (1.0, 0.3), (2.0, 0.4), (2.0, 0.5), (2.0, 0.6)]

    def times() -> Iterator[float]:
        for slower, twin in turns:
            yield from (slower * (1 + 0.1 * i) for i in range(passes - 1))
            yield slower * twin

    clock = times()
    monkeypatch.setattr(speculation, "seconds", lambda run, device: run() is None or next(clock))
    costs = speculation.measure_passes(bf16, {"int8": quantize(bf16, "int8")}, context=20)
    assert costs.verification == pytest.approx([1 + 0.1 * i for i in range(9)])
    assert (costs.v(1), costs.v(5)) == pytest.approx((1, 1.4)) and costs.draft == {"int8": pytest.approx(0.4)}


@pytest.mark.parametrize(
    "verification, draft, best, tried",
    [
        ([1.0] * 9, 0.01, 8, [2, 3, 4, 8]),  # nearly free: as many guesses as there may be
        ([1.0, 3.0] + [3.5] * 7, 2.0, 0, [2, 3, 4]),  # nothing to gain: only what is fixed is run
    ],
)
def test_f6_picks_the_lookahead_and_the_best_has_the_target(
    verification: list[float], draft: float, best: int, tried: list[int],
    bf16: Transformer, invented: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _, tokenizer = minillm.load("tiny", "cpu")
    costs = speculation.PassCosts(verification, {"int8": draft})
    monkeypatch.setattr(speculation, "measure_passes", lambda model, twins, context: costs)
    bench = quiet()
    result = speculation.measure_twins(bench, bf16, {"int8": quantize(bf16, "int8")}, tokenizer, 8)
    (twin,) = result["twins"]
    assert 0.5 < twin["alpha"] <= 1 and (twin["c"], twin["best_lookahead"]) == (draft, best)
    assert [row["lookahead"] for row in result["rows"]] == tried
    assert [row["lookahead"] for row in result["rows"] if row["chosen_by_f6"]] == [best] * (best > 0)
    for row in result["rows"]:
        v = dict(enumerate(verification, start=1)).__getitem__
        expected = predicted_speedup(twin["alpha"], row["lookahead"], draft, v)
        assert row["predicted_times_as_fast"] == pytest.approx(expected)
        assert row["times_as_fast"]["median"] == pytest.approx(0.06 / 0.05)
        assert row["ratio"] == pytest.approx(1.2 / expected)
        assert 1 <= row["tokens_per_round"] <= row["lookahead"] + 1
    assert [r["target"] for r in bench.ratios].count(speculation.TWIN_TARGET) == 1
    assert {r["beside"] for r in bench.ratios} == {"bf16"} and len(bench.agreement) == 1


def test_the_target_of_twins_is_that_of_the_fastest(bf16: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(engine: Any, prompts: list[list[int]], n: int) -> float:
        return 1e-3 + (n - 1) * {"minillm": 0.06}.get(engine.name, 0.03 if "3 guesses" in engine.name else 0.04)

    monkeypatch.setattr(turns, "seconds", seconds)
    costs = speculation.PassCosts([1.0] * 9, {"int8": 0.5})
    monkeypatch.setattr(speculation, "measure_passes", lambda model, twins, context: costs)
    bench, tokenizer = quiet(), minillm.load("tiny", "cpu")[1]
    speculation.measure_twins(bench, bf16, {"int8": quantize(bf16, "int8")}, tokenizer, 8)
    assert [r["what"] for r in bench.ratios if r["target"]] == ["bf16 with int8 twin, 3 guesses"]


def test_n_grams_stand_beside_plain_decoding_of_their_own_dtype(bf16: Transformer, invented: None) -> None:
    bench, prompt = quiet(2), random_prompt(12, 97) * 3
    rows = speculation.measure_ngrams(bench, "repeats", [lively_model(CONFIG), bf16], prompt, 10, target=2.0)
    assert [(row["precision"], row["lookahead"]) for row in rows] == [
        ("fp32", 4),
        ("fp32", 8),
        ("bf16", 4),
        ("bf16", 8),
    ]
    assert [row["times_as_fast"]["median"] for row in rows] == pytest.approx([0.8, 0.8, 0.6, 0.6])
    assert [(r["beside"], r["target"]) for r in bench.ratios] == [("fp32", 2.0)] * 2 + [("bf16", 2.0)] * 2
    assert [row["plain_tokens_per_s"]["median"] for row in rows] == pytest.approx([12.5, 12.5, 1 / 0.06, 1 / 0.06])


def test_in_fp32_an_answer_that_is_not_the_plain_one_is_refused(
    invented: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = speculation.Speculative.generate

    def wrong(self: speculation.Speculative, prompts: list[list[int]], n: int) -> list[list[int]]:
        (tokens,) = usual(self, prompts, n)
        return [[*tokens[:6], tokens[6] + 1, *tokens[7:]]]

    monkeypatch.setattr(speculation.Speculative, "generate", wrong)
    with pytest.raises(MinillmError, match=r"n-grams, 4 guesses.* differ at new token 7"):
        speculation.measure_ngrams(quiet(), "repeats", [lively_model(CONFIG)], [1, 2, 3], 10, None)


def test_the_text_that_is_repeated_ends_where_every_model_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = minillm.load("tiny", "cpu")
    models = [lively_model(replace(CONFIG, max_positions=400)) for _ in range(2)]
    answers, asked = iter([[1] * 30, [1] * 20]), []

    def invented(model: Transformer, prompt: list[int], n: int, stop_tokens: Any) -> list[int]:
        asked.append((tokenizer.decode(prompt), n, stop_tokens))
        return next(answers)

    monkeypatch.setattr(gqa, "generate", invented)
    prompt, n = speculation.repeating(models, tokenizer, 1)
    assert n == 20 and "exactly:\n\nThe roofline model asks" in asked[0][0] and "Their quotient" not in asked[0][0]
    paragraph = speculation.TEXT[: speculation.TEXT.index("?") + 1]
    assert asked[0][1:] == (min(len(paragraph) + 16, 400 - len(prompt) + 1), tokenizer.stop_tokens)
    assert tokenizer.decode(speculation.chat(tokenizer, "Hi")).startswith("user: Hi")
    tokenizer.template = None
    assert speculation.chat(tokenizer, "Hi") == tokenizer.encode("Hi")


# --- batches ---------------------------------------------------------------------------------------------------------


def test_steps_of_batches_are_counted_and_set_beside_the_first_precision(
    bf16: Transformer, meter: type[FixedMeter], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.4, 0.4, 0.2, 0.2, 0.6, 0.6, 0.9, 0.9, 0.1, 0.1, 0.05, 0.05, 0.1, 0.1, 0.2, 0.2])
    monkeypatch.setattr(precisions, "seconds", lambda run, device: next(times))
    models = {"bf16": bf16, "int8": quantize(bf16, "int8")}
    rows = precisions.measure_batches(quiet(2), models, [1, 4], steps=2)
    assert [(row["batch"], row["precision"]) for row in rows] == [(1, "bf16"), (1, "int8"), (4, "bf16"), (4, "int8")]
    assert [row["measured_s"]["rounds"] for row in rows] == [[0.4, 0.1], [0.2, 0.05], [0.6, 0.1], [0.9, 0.2]]
    assert rows[1]["times_as_fast"]["rounds"] == pytest.approx([2, 2])
    assert rows[3]["times_as_fast"]["rounds"] == pytest.approx([6 / 9, 0.5])
    assert rows[3]["predicted_times_as_fast"] == pytest.approx(rows[2]["predicted_s"] / rows[3]["predicted_s"])
    for row in rows:
        attention = 4 * CONFIG.n_layers * CONFIG.n_heads * CONFIG.head_dim * (precisions.CONTEXT + 1)
        assert row["flops"] == row["batch"] * (linear_flops(bf16) + attention)
    assert meter.samples == 2 * 2
    assert precisions.crossings(rows) == [{"precision": "int8", "measured": 4, "predicted": None}]


# --- what is shown ---------------------------------------------------------------------------------------------------


def outcome(times: float, target: float | None, ratio: float, crossing: int | None) -> dict[str, Any]:
    row = {"phase": "decode", "what": "int8", "beside": "fp32", "times_as_fast": {"median": times}, "target": target}
    return {
        "ratios": [row],
        "crossings": [{"precision": "int8", "measured": crossing, "predicted": None}],
        "precisions": [{"precision": "int8", "step": {"ratio": ratio}}],
        "batches": [{"batch": 8, "precision": "int8", "ratio": ratio}],
        "twins": {"rows": [{"drafter": "int8", "lookahead": 1, "ratio": ratio}]},
    }


def test_it_says_what_falls_short_and_nothing_else() -> None:
    assert decode.missed(outcome(1.7, 1.7, 1.15, None)) == ["Every target is reached, and nothing is slower."]
    assert decode.missed(outcome(1.7, None, 1 / 1.15, None)) == ["Every target is reached, and nothing is slower."]
    lines = decode.missed(outcome(0.9, 1.7, 1.2, 16))
    assert lines == [
        "Below the target of 1.7: decode in int8 is 0.90 times as fast as in fp32.",
        "Slower: a step in int8 is slower than in bf16 from a batch of 16 on; the prediction says so for none of these "
        "batches.",
        "Not within 15 % of the prediction: a decode step in int8 takes 1.20 times as long as predicted.",
        "Not within 15 % of the prediction: a step of batch 8 in int8 takes 1.20 times as long as predicted.",
        "Not within 15 % of the prediction: with the int8 twin, 1 guess, the speed-up is 1.20 times what F6 says.",
    ]
    assert all(is_one_sentence(line) for line in lines)
    slower = "Slower: decode in int8 is 0.90 times as fast as in fp32."
    assert decode.missed(outcome(0.9, 0.8, 1, None)) == decode.missed(outcome(0.9, None, 1, None)) == [slower]
    assert len(decode.missed(outcome(1.8, 1.7, 0.8, None))) == 3  # faster than predicted is no hit either


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_its_result_whole(
    tmp_path: Path, meter: type[FixedMeter], invented: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "decode.json"
    options = ["--model", "tiny", "--device", "cpu", "--rounds", "2", "--max-new-tokens", "6", "--prefill-prompt", "20"]
    options += ["--sentences", "1", "--batches", "1,2", "--steps", "1", "--json", str(path)]
    assert decode.main(options) == 0
    result = json.loads(path.read_text())
    assert set(result) == {
        "date", "commit", "dirty", "machine", "versions", "settings", "precisions", "twins", "ngrams", "batches",
        "crossings", "ratios", "agreement", "missed", "others_busy_cores", "disturbed_rounds",
    }  # fmt: skip
    assert [row["precision"] for row in result["precisions"]] == list(SECONDS)
    assert all(len(row["decode_tokens_per_s"]["rounds"]) == 2 for row in result["precisions"])
    assert [twin["twin"] for twin in result["twins"]["twins"]] == ["int8"]
    assert [row["text"] for row in result["ngrams"]] == ["repeats"] * 4 + ["does not repeat"] * 4
    assert len(result["batches"]) == 2 * 3 and len(result["crossings"]) == 2
    targets = {(r["phase"], r["what"], r["beside"]): r["target"] for r in result["ratios"] if r["target"]}
    assert targets["decode", "int8", "fp32"] == 1.7 and sorted(targets.values()) == [1.3, 1.7, 2, 2, 2, 2, 2.2]
    printed = " ".join(capsys.readouterr().out.split())
    assert "Below the target of 1.7: decode in int8 is 1.60 times as fast as in fp32." in result["missed"]
    assert all(line in printed for line in result["missed"])


@pytest.mark.parametrize(
    "options, words",
    [
        (["--model", "no-such-model"], "Unknown model"),
        (["--max-new-tokens", "1"], "at least 2"),
        (["--model", "tiny", "--prefill-prompt", "1000"], "tiny has 256 positions and 1001 are asked for"),
        (["--model", "tiny", "--max-new-tokens", "6", "--prefill-prompt", "9", "--sentences", "4"], "positions"),
        (["--batches", "1,0"], "below 1"),
        (["--rounds", "many"], "invalid"),
    ],
)
def test_bad_requests_end_in_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = decode.main(options)
    except SystemExit as exit:  # argparse leaves that way
        code = exit.code  # type: ignore[assignment]
    message = capsys.readouterr().err.strip()
    assert code == 2 and words in message and message.startswith("decode.py: ")
    assert "\n" not in message and message.endswith(".")
