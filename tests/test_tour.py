"""The tour on a tiny model: prediction first, the same text from every stage, and results that agree with one another."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_helpers import Run, assert_one_sentence
from helpers import one_thread  # noqa: F401
from PIL import Image
from rich.console import Console

import minillm
from minillm import tour as tour_module
from minillm.cli import main
from minillm.config import KNOWN_MODELS
from minillm.errors import MinillmError, UsageError
from minillm.generation import Generation
from minillm.model import Transformer
from minillm.roofline.ceilings import CeilingMeter, Ceilings
from minillm.roofline.position import ceilings_of, meta_twin, phase_costs, predict
from minillm.stages import STAGES, kv_cache, naive
from minillm.tokenizer import Tokenizer
from minillm.tour import StageResult, Tour, run_tour

QUANTIZED = ("quantization", "kernels")  # stages of these names change the weights
NEW_TOKENS = 8
SAMPLE = (2e10, 1e11, 8e-6)


@pytest.fixture(scope="module")
def tiny() -> tuple[Transformer, Tokenizer]:
    return minillm.load("tiny", "cpu", "fp32")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One tour through the command, with ceilings of made-up samples: what it printed and wrote."""
    folder = tmp_path_factory.mktemp("tour")
    paths = folder / "tour.json", folder / "tour.png"
    command = f"tour --model tiny --device cpu --max-new-tokens {NEW_TOKENS} --price-per-hour 2.5".split()
    output = StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CeilingMeter, "_measure", lambda self: SAMPLE)
        patch.setattr("minillm.commands.tour.make_console", lambda: Console(file=output, width=120, highlight=False))
        status = main([*command, "--json", str(paths[0]), "--plot", str(paths[1])])
    return SimpleNamespace(
        status=status, output=output.getvalue(), json=json.loads(paths[0].read_text()), plot=paths[1], folder=folder
    )


# --- the JSON ---------------------------------------------------------------------------------------------------------


def test_json_has_the_keys_of_the_contract(written: SimpleNamespace) -> None:
    data = written.json
    assert written.status == 0
    assert list(data) == ["model", "device", "dtype", "prompt_tokens", "ceilings", "stages"]
    assert list(data["ceilings"]) == [
        "bandwidth_bytes_per_s", "peak_flop_per_s", "overhead_s", "ridge_flop_per_byte",
    ]  # fmt: skip
    for stage in data["stages"]:
        assert list(stage) == ["stage", "tokens", "text", "metrics", "phases"]
        assert list(stage["metrics"]) == [
            "ttft_s", "itl_p50_s", "itl_p99_s", "tokens_per_s", "usd_per_million_tokens",
        ]  # fmt: skip
        for phase in stage["phases"]:
            assert list(phase) == [
                "phase", "flops", "bytes", "ideal_bytes", "intensity", "predicted_s", "bound",
                "measured_s", "achieved_flop_per_s", "fraction_of_roofline",
            ]  # fmt: skip


def test_json_says_what_was_run(written: SimpleNamespace, tiny: tuple[Transformer, Tokenizer]) -> None:
    data = written.json
    assert (data["model"], data["device"], data["dtype"]) == ("tiny", "cpu", "fp32")
    assert data["prompt_tokens"] == len(tiny[1].chat(tour_module.PROMPT))
    assert [stage["stage"] for stage in data["stages"]] == list(STAGES)
    assert [[phase["phase"] for phase in stage["phases"]] for stage in data["stages"]] == [["prefill", "decode"]] * len(
        STAGES
    )


def test_every_stage_gives_the_tokens_and_the_text_of_the_naive_one(
    written: SimpleNamespace, tiny: tuple[Transformer, Tokenizer]
) -> None:
    model, tokenizer = tiny
    expected = naive.generate(model, tokenizer.chat(tour_module.PROMPT), NEW_TOKENS).tokens
    for stage in written.json["stages"]:
        if not stage["stage"].startswith(QUANTIZED):
            assert stage["tokens"] == expected
        assert stage["text"] == tokenizer.decode(stage["tokens"])


def test_ceilings_are_the_medians_of_the_samples(written: SimpleNamespace) -> None:
    bandwidth, peak, overhead = SAMPLE
    assert list(written.json["ceilings"].values()) == [bandwidth, peak, overhead, peak / bandwidth]


def test_counts_and_predictions_are_those_of_the_stage_on_meta(written: SimpleNamespace) -> None:
    ceilings = Ceilings("", "fp32", *SAMPLE)
    twin = meta_twin(KNOWN_MODELS["tiny"], torch.float32)
    for stage in written.json["stages"]:
        entry = STAGES[stage["stage"]]
        users = tour_module.USERS if entry.generate_batch else 1
        if entry.run is None:
            continue  # counted in its run
        costs = phase_costs(entry, entry.prepared(twin), written.json["prompt_tokens"], NEW_TOKENS, users)
        for phase in stage["phases"]:
            cost = costs[phase["phase"]]
            assert (phase["flops"], phase["bytes"], phase["ideal_bytes"]) == (cost.flops, cost.bytes, cost.ideal_bytes)
            assert phase["predicted_s"] == predict(cost, ceilings_of(entry, phase["phase"], ceilings))


def test_figures_of_a_phase_agree_with_each_other(written: SimpleNamespace) -> None:
    bandwidth, peak, _ = SAMPLE
    for stage in written.json["stages"]:
        for phase in stage["phases"]:
            assert phase["intensity"] == phase["flops"] / phase["bytes"]
            assert phase["achieved_flop_per_s"] == phase["flops"] / phase["measured_s"]
            attainable = min(peak, phase["intensity"] * bandwidth)
            assert phase["fraction_of_roofline"] == phase["achieved_flop_per_s"] / attainable
            assert phase["bound"] in ("compute", "memory", "overhead")
            assert 0 < phase["ideal_bytes"] < phase["bytes"]
            assert phase["measured_s"] > 0


def test_phases_and_metrics_are_times_of_the_same_run(written: SimpleNamespace) -> None:
    """Prefill is the time to the first token; decode, the n - 1 gaps, with it makes the run that tokens/s divides by."""
    for stage in written.json["stages"]:
        metrics, (prefill, decode) = stage["metrics"], stage["phases"]
        tokens = NEW_TOKENS * (tour_module.USERS if STAGES[stage["stage"]].generate_batch else 1)
        # The users of a batch get a token within microseconds of each other; phases are those of the first.
        close = 0.3 if tokens > NEW_TOKENS else 1e-9
        assert prefill["measured_s"] == pytest.approx(metrics["ttft_s"], rel=close)
        total = prefill["measured_s"] + decode["measured_s"]
        assert metrics["tokens_per_s"] == pytest.approx(tokens / total, rel=close)
        assert metrics["itl_p50_s"] <= metrics["itl_p99_s"] <= decode["measured_s"] * (1 + close)
        assert metrics["usd_per_million_tokens"] == pytest.approx(2.5 / 3600 * total / tokens * 1e6, rel=close)


def test_the_cache_saves_flops_and_lowers_the_intensity(written: SimpleNamespace) -> None:
    (naive_prefill, naive_decode), (prefill, decode) = (stage["phases"] for stage in written.json["stages"][:2])
    assert prefill["flops"] < naive_prefill["flops"]  # the head at one position
    assert decode["flops"] * 20 < naive_decode["flops"]
    assert decode["intensity"] < naive_decode["intensity"]


def test_a_batch_multiplies_the_flops_of_a_step_and_hardly_its_bytes(written: SimpleNamespace) -> None:
    phases = {stage["stage"]: stage["phases"][1] for stage in written.json["stages"]}
    alone = phases["gqa"]
    for stage in ("batching_static", "batching"):
        assert phases[stage]["flops"] == tour_module.USERS * alone["flops"]
        assert phases[stage]["intensity"] > alone["intensity"]
        assert phases[stage]["bytes"] < tour_module.USERS * alone["bytes"]


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_the_prediction_comes_first_then_text_numbers_and_positions(written: SimpleNamespace) -> None:
    text = written.json["stages"][0]["text"].split()[0]
    parts = (
        "tiny, 65 prompt tokens, 8 new ones",
        "ceiling",
        "Predicted, before anything has run",
        "The runs",
        tour_module.PROMPT,
        "naive: ",
        text,
        "kv_cache: ",
        text,
        "The five numbers",
        "On the roofline",
        "Written: ",
    )
    at = 0
    for part in parts:
        at = written.output.index(part, at)
        at += len(part)


def test_tables_show_what_the_json_holds(written: SimpleNamespace) -> None:
    words = written.output.replace("│", " ").split()
    for stage in written.json["stages"]:
        for phase in stage["phases"]:
            assert f"{phase['intensity']:.3g}" in words
            assert f"{phase['fraction_of_roofline']:.0%}" in words
            assert f"{phase['measured_s'] / phase['predicted_s']:.2f}" in words


def test_the_diagram_is_written_and_nothing_else(written: SimpleNamespace) -> None:
    with Image.open(written.plot) as image:
        assert image.size == (1600, 1100)
    assert sorted(path.name for path in written.folder.iterdir()) == ["tour.json", "tour.png"]
    assert f"Written: {written.plot}" in written.output.replace("\n", "")


# --- run_tour ---------------------------------------------------------------------------------------------------------


def show(tiny: tuple[Transformer, Tokenizer], monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[Tour, str]:
    monkeypatch.setattr(CeilingMeter, "_measure", lambda self: SAMPLE)
    output = StringIO()
    console = Console(file=output, width=120, highlight=False)
    return run_tour(*tiny, console, **({"max_new_tokens": 2} | options)), output.getvalue()


def test_the_prediction_is_made_before_anything_runs(
    tiny: tuple[Transformer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("it runs")

    monkeypatch.setitem(STAGES, "kv_cache", replace(STAGES["kv_cache"], generate=refuse))
    monkeypatch.setattr(CeilingMeter, "_measure", lambda self: SAMPLE)
    output = StringIO()
    with pytest.raises(RuntimeError, match="it runs"):
        run_tour(*tiny, Console(file=output, width=120), stages=["kv_cache"], max_new_tokens=2)
    assert "Predicted, before anything has run" in output.getvalue()
    assert "decode" in output.getvalue()


def test_ceilings_are_sampled_before_the_runs_and_between_them(
    tiny: tuple[Transformer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(CeilingMeter, "sample", lambda self: happened.append("sample") or self._samples.append(SAMPLE))

    def generate(*args: Any, **kwargs: Any) -> Generation:
        happened.append("run")
        return kv_cache.generate(*args, **kwargs)

    monkeypatch.setitem(STAGES, "kv_cache", replace(STAGES["kv_cache"], generate=generate))
    show(tiny, monkeypatch, stages=["kv_cache"])
    first = happened.index("run")
    assert first >= 1
    assert set(happened[:first]) == {"sample"}
    after = happened[first + 1 :]  # the first run is for the text and warms up
    assert after.count("run") >= 3
    runs = [i for i, what in enumerate(after) if what == "run"]
    assert all("sample" in after[start:end] for start, end in zip([0, *runs], runs, strict=False))


def test_stages_run_in_the_order_that_is_asked_for(
    tiny: tuple[Transformer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tour, output = show(tiny, monkeypatch, stages=["kv_cache", "naive"])
    assert [stage["stage"] for stage in tour.as_json()["stages"]] == ["kv_cache", "naive"]  # type: ignore[union-attr]
    assert output.index("kv_cache: ") < output.index("naive: ")


def test_one_token_has_no_decode_and_no_gaps(
    tiny: tuple[Transformer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tour, _ = show(tiny, monkeypatch, max_new_tokens=1)
    for stage in tour.as_json()["stages"]:  # type: ignore[union-attr]
        assert [phase["phase"] for phase in stage["phases"]] == ["prefill"]
        assert stage["metrics"]["itl_p50_s"] is stage["metrics"]["itl_p99_s"] is None
    json.dumps(tour.as_json(), allow_nan=False)


def test_a_prompt_may_hold_what_looks_like_markup(
    tiny: tuple[Transformer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "What does [/b] end, and [red]this[/red]?"
    assert prompt in show(tiny, monkeypatch, stages=["kv_cache"], prompt=prompt)[1]


def test_a_checkpoint_without_a_template_goes_on_from_the_plain_prompt(
    tiny: tuple[Transformer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny
    base = Tokenizer(tokenizer.backend, vocab_size=tokenizer.vocab_size)
    tour, _ = show((model, base), monkeypatch, prompt="Once upon a time", max_new_tokens=NEW_TOKENS)
    assert tour.prompt_tokens == len("Once upon a time")
    expected = kv_cache.generate(model, base.encode("Once upon a time"), NEW_TOKENS).tokens
    exact = [result for result in tour.stages if not result.stage.startswith(QUANTIZED)]
    assert all(run.tokens == expected for result in exact for run in result.median_run)
    assert sum(len(result.median_run) for result in exact) == 4 + 2 * tour_module.USERS


def test_a_stage_that_this_model_cannot_run_is_left_out_with_the_reason(
    tiny: tuple[Transformer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: Transformer) -> Transformer:
        raise MinillmError("int8 has no kernel here: use another device.")

    monkeypatch.setitem(STAGES, "quantization", replace(STAGES["quantization"], prepare=refuse))
    tour, output = show(tiny, monkeypatch, stages=["gqa", "quantization"], max_new_tokens=2)
    assert [result.stage for result in tour.stages] == ["gqa"]
    assert "quantization is left out: int8 has no kernel here: use another device." in output
    monkeypatch.setitem(STAGES, "quantization_int4", replace(STAGES["quantization_int4"], prepare=refuse))
    for stages in (["quantization"], ["quantization", "quantization_int4"]):
        with pytest.raises(MinillmError, match="no kernel here"):
            show(tiny, monkeypatch, stages=stages, max_new_tokens=2)


def test_a_prompt_may_hold_what_looks_like_an_emoji_code(run: Run) -> None:
    status, output, _ = run(
        "tour", "--model", "tiny", "--device", "cpu", "--max-new-tokens", "1", "--prompt", "a[:heart:]"
    )
    assert (status, "a[:heart:]" in output) == (0, True)


def test_a_run_far_from_its_prediction_is_explained_in_a_sentence(
    tiny: tuple[Transformer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CeilingMeter, "_measure", lambda self: (2e14, 1e15, 8e-11))  # a machine of dreams
    stream = StringIO()
    run_tour(*tiny, Console(file=stream, width=500), stages=["kv_cache"], max_new_tokens=3)
    for phase in ("prefill", "decode"):
        [sentence] = [line for line in stream.getvalue().splitlines() if line.startswith(f"kv_cache {phase}: ")]
        assert " of the operators' time, " in sentence
        assert " times its prediction: " in sentence
        assert sentence.rstrip().endswith(".")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": []}, "No stage was named"),
        ({"stages": ["warp"]}, "Unknown stage 'warp'"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 10_000}, "256 positions"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_shown(
    tiny: tuple[Transformer, Tokenizer], options: dict[str, object], message: str
) -> None:
    output = StringIO()
    with pytest.raises(UsageError, match=message):
        run_tour(*tiny, Console(file=output), **options)  # type: ignore[arg-type]
    assert output.getvalue() == ""


def test_a_stage_is_judged_by_its_median_run() -> None:
    runs = [[SimpleNamespace(times=[first, last])] for first, last in ((0.1, 3.0), (0.9, 1.0), (0.2, 2.0))]
    result = StageResult("naive", 1, {}, None, runs=runs)  # type: ignore[arg-type]
    assert result.median_run[0].times == [0.2, 2.0]


def test_a_tour_that_cannot_store_its_results_says_so(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "tour.json"
    status, output, error = run("tour", "--model", "tiny", "--json", str(path))
    assert (status, output) == (1, "")
    assert_one_sentence(error)
    assert f"{path} cannot be written" in error
