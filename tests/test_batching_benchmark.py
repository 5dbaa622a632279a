"""benchmarks/batching.py measures what it says: steps by closed form, FLOPs of what is timed, ratios on invented times."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    SHAPES,
    is_one_sentence,
    lively_model,
    one_thread,  # noqa: F401 (a fixture)
)
from rich.console import Console

import minillm
from minillm.config import ModelConfig
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.counting import count
from minillm.stages.kv_cache import KVCache
from minillm.stages.naive import causal_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # as Python does for a script there

import batching
import batching_steps
import batching_trace
import steps

LLAMA = SHAPES["llama"]  # 6 query heads on 2 KV heads
CEILINGS = Ceilings("abacus", "fp32", bandwidth=1e9, peak=1e10, overhead=1e-6)


def quiet(number: int) -> steps.Rounds:
    return steps.Rounds(number, Console(quiet=True))


class FixedMeter:
    """Ceilings as they were invented, and how often a sample was taken."""

    samples = 0

    def sample(self) -> None:
        self.samples += 1

    def ceilings(self) -> Ceilings:
        return CEILINGS


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> FixedMeter:
    meter = FixedMeter()
    monkeypatch.setattr(batching_steps, "make_meter", lambda model: meter)
    return meter


def step_flops(config: ModelConfig, batch: int, mean_context: float) -> float:
    """2 a weight of every linear layer, and 4 Hq D S in each layer, for each sequence."""
    C, D, Hq, Hkv = config.d_model, config.head_dim, config.n_heads, config.n_kv_heads
    layer = C * (Hq + 2 * Hkv) * D + Hq * D * C + 3 * C * config.d_ff + 2 * Hq * D * mean_context
    return 2 * batch * (config.n_layers * layer + C * config.vocab_size)


# --- the trace -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace() -> batching_trace.Trace:
    return batching_trace.make_trace(minillm.load("tiny", "cpu")[1], 200)


def test_the_trace_is_the_same_in_every_run_and_spreads_10_to_1(trace: batching_trace.Trace) -> None:
    assert trace == batching_trace.make_trace(minillm.load("tiny", "cpu")[1], 200)
    lengths = [len(prompt) for prompt in trace.prompts]
    assert (min(lengths), max(lengths), len(lengths)) == (8, 64, 200)
    assert (min(trace.limits), max(trace.limits), len(trace.limits)) == (8, 80, 200)
    assert len({tuple(prompt[:8]) for prompt in trace.prompts}) > 150  # they are not one prompt at 200 lengths


def test_steps_are_the_passes_of_the_model_and_answers_agree(trace: batching_trace.Trace) -> None:
    model = lively_model(replace(LLAMA, n_layers=1, vocab_size=320))
    result = batching_trace.measure_trace(quiet(1), model, trace)
    limits = trace.limits
    static = sum(max(limits[i : i + 16]) for i in range(0, 200, 16))  # each batch lasts as long as its longest answer
    assert result["static"]["steps"] == static
    assert result["ideal_steps"] == -(-sum(limits) // 16)  # more than the longest
    assert result["ideal_steps"] <= result["continuous"]["steps"] <= 1.05 * result["ideal_steps"]  # the target, a count
    assert result["steps_over_ideal"] == result["continuous"]["steps"] / result["ideal_steps"]
    assert result["equal_answers"] == 200 and result["output_tokens"] == sum(limits)
    assert not model.norm._forward_hooks


def test_ways_take_turns_and_their_ratio_is_taken_within_a_round(
    trace: batching_trace.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    times = iter([0.0, 0.0, 6.0, 2.0, 3.0, 2.0, 8.0, 4.0])  # a warm-up, then three rounds: 3, 1.5 and 2 times

    def invented(generate: Any, model: Any, trace: batching_trace.Trace) -> batching_trace.Answered:
        order.append(generate.__module__.rsplit(".", 1)[-1])
        return batching_trace.Answered(next(times), 900, [[len(order) > 3]])

    monkeypatch.setattr(batching_trace, "answer_trace", invented)
    result = batching_trace.measure_trace(quiet(3), lively_model(LLAMA), trace)
    assert order == ["static_batching", "batching"] * 4
    assert result["times_as_fast"]["rounds"] == [3, 1.5, 2] and result["times_as_fast"]["median"] == 2
    tokens = sum(trace.limits)
    assert result["static"]["tokens_per_s"]["median"] == pytest.approx(tokens / 6)
    assert result["continuous"]["tokens_per_s"]["median"] == pytest.approx(tokens / 2)
    assert result["equal_answers"] == 0


# --- a step ----------------------------------------------------------------------------------------------------------


def test_figures_of_a_step_are_those_of_one_of_them() -> None:
    x = torch.ones(10, 20)
    cost = count(lambda: [x @ x.T for _ in range(4)])  # four steps, each of 2 * 10 * 20 * 10 FLOPs
    row = steps.step_figures(
        cost, 4, Ceilings("abacus", "fp32", bandwidth=1e30, peak=1e3, overhead=1e-9), [5.0, 9.0, 8.0]
    )
    assert (row["flops"], row["predicted_s"], row["bound"]) == (4000, pytest.approx(4.0), "compute")
    assert row["bytes"] == 4 * (10 * 20 + 10 * 10) and row["intensity"] == 4000 / 1200
    assert row["measured_s"]["median"] == 8 and row["ratio"] == pytest.approx(2.0)


# --- the batches -----------------------------------------------------------------------------------------------------


def test_a_step_of_a_batch_is_counted_predicted_and_shared_among_users(
    meter: FixedMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([9.0, 9.0, 0.1, 0.3, 0.2, 0.2, 0.4, 0.1])  # seconds a step: a warm-up, then B = 1 and 4 in turns
    monkeypatch.setattr(batching_steps, "lockstep_seconds", lambda model, prompts, steps: next(times))
    _, tokenizer = minillm.load("tiny", "cpu")
    result = batching_steps.measure_batches(
        quiet(3), lively_model(replace(LLAMA, vocab_size=320)), tokenizer, [1, 4], steps=6
    )
    one, four = result["rows"]
    assert meter.samples == 6  # before each run
    assert one["measured_s"]["rounds"] == [0.1, 0.2, 0.4] and four["measured_s"]["rounds"] == [0.3, 0.2, 0.1]
    assert (one["tokens_per_s"], one["tokens_per_s_per_user"]) == pytest.approx((5, 5))
    assert (four["tokens_per_s"], four["tokens_per_s_per_user"]) == pytest.approx((20, 5))
    for B, row in ((1, one), (4, four)):
        # The first of 6 steps attends over the 40 tokens of the prompt and a new one, the last over 46.
        assert row["flops"] == step_flops(replace(LLAMA, vocab_size=320), B, mean_context=43.5)
        assert row["predicted_s"] >= max(row["flops"] / CEILINGS.peak, row["bytes"] / CEILINGS.bandwidth)
        assert row["ratio"] == pytest.approx(0.2 / row["predicted_s"])
        assert row["intensity"] == pytest.approx(row["flops"] / row["bytes"])
    assert one["intensity"] < four["intensity"] < 4 * one["intensity"]


def test_what_is_timed_in_a_batch_is_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model(LLAMA)
    prompts = [[i] * batching_steps.LOCKSTEP_PROMPT for i in range(3)]
    counted = batching_steps.phase_costs(batching_steps.STAGE, model, batching_steps.LOCKSTEP_PROMPT, 6, 3)
    assert count(lambda: batching_steps.lockstep_seconds(model, prompts, 5)).flops == sum(
        c.flops for c in counted.values()
    )
    monkeypatch.setattr(batching_steps, "phase_seconds", lambda times: {"decode": 10.0 * (len(times) == 6)})
    assert batching_steps.lockstep_seconds(model, prompts, 5) == 2  # seconds a step


# --- the contexts ----------------------------------------------------------------------------------------------------


def test_a_step_after_a_context_is_counted_over_all_of_it(meter: FixedMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = iter(range(10**6))
    monkeypatch.setattr(batching_steps, "context_seconds", lambda model, cache, context, steps: 1 + next(slow))
    result = batching_steps.measure_contexts(quiet(1), lively_model(LLAMA), [10, 100], steps=4)
    rows = {(r["context"], r["stage"], r["kv_heads"]): r for r in result["rows"]}
    variants = [("kv_cache", 2), ("gqa", 6), ("gqa", 2), ("gqa", 1)]
    assert list(rows) == [(S, *variant) for S in (10, 100) for variant in variants]  # each context's variants in turns
    for (S, stage, kv_heads), row in rows.items():
        assert row["flops"] == step_flops(replace(LLAMA, n_kv_heads=kv_heads), 1, mean_context=S + 2.5)
        kept = 6 if stage == "kv_cache" else kv_heads
        assert row["cache_bytes"] == 2 * LLAMA.n_layers * kept * S * LLAMA.head_dim * 4
    assert meter.samples == 2
    # Invented seconds: 4 warm-ups, then 5, 6, 7, 8 at the first context and 9, 10, 11, 12 at the second.
    gains = {(g["context"], g["kv_heads"], g["beside"]["stage"]): g["times_as_fast"]["median"] for g in result["gains"]}
    assert gains == pytest.approx(
        {
            (10, 2, "kv_cache"): 5 / 7, (10, 2, "gqa"): 6 / 7, (10, 1, "gqa"): 6 / 8,
            (100, 2, "kv_cache"): 9 / 11, (100, 2, "gqa"): 10 / 11, (100, 1, "gqa"): 10 / 12,
        }
    )  # fmt: skip


def test_a_model_with_one_kv_head_a_query_head_has_nothing_to_share_but_one() -> None:
    names = [(str(ours), str(theirs)) for ours, theirs in batching_steps.comparisons(4, 4)]
    assert names == [("gqa, 4 KV heads", "kv_cache, 4 KV heads"), ("gqa, 1 KV head", "gqa, 4 KV heads")]
    assert [ours.kv_heads for ours, _ in batching_steps.comparisons(4, 1)] == [1, 1]


def test_a_filled_cache_is_read_from_its_first_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = lively_model(LLAMA), []

    def noting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        seen.append((k.shape[2], bool(k.isfinite().all() and v.isfinite().all())))
        return causal_attention(q, k, v, window)

    monkeypatch.setattr("minillm.stages.kv_cache.causal_attention", noting)
    cache = batching_steps.filled_cache(batching_steps.Variant("kv_cache", 2), model, 24)
    ticks = SimpleNamespace(perf_counter=map(float, range(100)).__next__)  # a clock that each look at it advances by 1
    monkeypatch.setattr("minillm.generation.time", ticks)
    assert isinstance(cache, KVCache) and batching_steps.context_seconds(model, cache, 20, 3) == 1  # seconds a step
    assert seen == [(21, True), (21, True), (22, True), (22, True), (23, True), (23, True)]  # two layers
    batching_steps.context_seconds(model, cache, 20, 3)  # again from 20 tokens on, in the same cache
    assert seen[6][0] == 21


# --- what is shown ---------------------------------------------------------------------------------------------------


def parts(steps: int, times: float, ratio: float, slowest_gain: float) -> dict[str, Any]:
    trace = {
        "dtype": "bf16", "ideal_steps": 100, "continuous": {"steps": steps}, "steps_over_ideal": steps / 100,
        "times_as_fast": {"median": times},
    }  # fmt: skip
    gain = {
        "context": 64, "stage": "gqa", "kv_heads": 3, "beside": {"stage": "kv_cache", "kv_heads": 3},
        "times_as_fast": {"median": 1.2, "min": slowest_gain, "max": 1.3},
    }  # fmt: skip
    context = {
        "dtype": "fp32",
        "rows": [{"context": 64, "stage": "gqa", "kv_heads": 1, "ratio": ratio}],
        "gains": [gain],
    }
    return {
        "trace": [trace],
        "batches": [{"dtype": "bf16", "rows": [{"batch": 8, "ratio": ratio}]}],
        "contexts": [context],
    }


def test_it_says_what_misses_its_target_and_nothing_else() -> None:
    assert batching.missed(parts(105, 1.5, 1.15, 1.1)) == ["Every target is reached."]
    assert batching.missed(parts(105, 1.5, 1 / 1.15, 1.1)) == ["Every target is reached."]
    lines = batching.missed(parts(106, 1.49, 1.2, 0.99))
    assert lines == [
        "Above the target of 1.05 times the ideal: in bf16 continuous batching takes 106 steps, ideal are 100.",
        "Below the target of 1.5: in bf16 continuous batching gives 1.49 times as many tokens/s as static.",
        "Not within 15 % of the prediction: batch 8 in bf16 takes 1.20 times as long as predicted.",
        "Not within 15 % of the prediction: gqa, 1 KV head at 64 tokens in fp32 takes 1.20 times as long as predicted.",
        "No sure gain: at 64 tokens in fp32 gqa, 3 KV heads is 1.2 (0.99 to 1.3) times as fast as kv_cache, 3 KV heads.",
    ]
    assert all(is_one_sentence(line) for line in lines)
    assert len(batching.missed(parts(100, 2, 0.8, 1.1))) == 2  # faster than predicted is no hit either


# --- the command -----------------------------------------------------------------------------------------------------

SMALL = [
    "--model", "tiny", "--device", "cpu", "--requests", "3", "--batches", "1,2", "--contexts", "4,8", "--steps", "2",
]  # fmt: skip


def test_the_command_writes_its_result_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "batching.json"
    assert batching.main([*SMALL, "--rounds", "1", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert set(result) == {
        "date", "commit", "dirty", "machine", "versions", "settings", "trace", "batches", "contexts", "missed",
        "others_busy_cores",
    }  # fmt: skip
    for name in ("trace", "batches", "contexts"):
        assert [part["dtype"] for part in result[name]] == ["fp32", "bf16"]
    assert [row["batch"] for row in result["batches"][1]["rows"]] == [1, 2]
    assert len(result["contexts"][0]["rows"]) == 2 * 4 and len(result["contexts"][0]["gains"]) == 2 * 3
    assert all(len(row["measured_s"]["rounds"]) == 1 for part in result["contexts"] for row in part["rows"])
    assert (result["settings"]["rounds"], result["settings"]["max_batch"]) == (1, 16)
    printed = " ".join(capsys.readouterr().out.split())
    assert "A trace of 3 requests" in printed and all(line[:60] in printed for line in result["missed"])


@pytest.mark.parametrize(
    "options, words",
    [
        (["--model", "tiny"], "tiny has 256 positions and 4128 are asked for"),
        (["--model", "no-such-model"], "Unknown model"),
        (["--batches", "1,0"], "below 1"),
        (["--contexts", "64,many"], "invalid"),
        (["--requests", "0"], "below 1"),
        (["--dtypes", "fp8"], "Unknown dtype"),
    ],
)
def test_bad_requests_end_in_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = batching.main(options)
    except SystemExit as exit:  # argparse leaves that way
        code = exit.code  # type: ignore[assignment]
    message = capsys.readouterr().err.strip()
    assert code == 2 and words in message and message.startswith("batching.py: ")
    assert "\n" not in message and message.endswith(".")
