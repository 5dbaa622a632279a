"""Predictions from hand-made costs and ceilings, and from real shapes against the formulas of the literature."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import PLAIN_STAGES, one_thread  # noqa: F401 (a fixture)

from minillm.config import KNOWN_MODELS, ModelConfig
from minillm.errors import UsageError
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.counting import Cost, CountingMode, Operator
from minillm.roofline.hardware import HARDWARE
from minillm.roofline.position import (
    MAX_BATCH,
    MAX_CONTEXT,
    Position,
    bound,
    ceilings_of,
    count_run,
    limits,
    meta_twin,
    phase_costs,
    phase_costs_of_run,
    phase_seconds,
    predict,
    predict_stage,
)
from minillm.stages import STAGES, kv_cache
from minillm.weights import random_model

# Round numbers: 1 GFLOP/s, 100 MB/s, a ridge at 10 FLOP/byte, 1 ms an operator.
CEILINGS = Ceilings("a machine", "fp32", bandwidth=1e8, peak=1e9, overhead=1e-3)
COMPUTE = Operator("product", "", flops=5 * 10**7, read=10**5, written=0, ideal=10**5)  # 50 ms, 1 ms, 1 ms
MEMORY = Operator("copy", "", flops=10**6, read=10**6, written=10**6, ideal=0)  # 1 ms, 20 ms, 1 ms
OVERHEAD = Operator("tiny", "", flops=10, read=10, written=10, ideal=0)  # 1 ms by overhead
H100 = HARDWARE["h100-sxm"].ceilings("bf16")
LLAMA = KNOWN_MODELS["llama-3-8b"]


def cost(**calls: int) -> Cost:
    operators = {"compute": COMPUTE, "memory": MEMORY, "overhead": OVERHEAD}
    return Cost(Counter({operators[name]: n for name, n in calls.items()}))


@cache
def decode(
    model: str | ModelConfig, context: int, batch: int = 1, ceilings: Ceilings = H100, stage: str = "kv_cache"
) -> Position:
    config = KNOWN_MODELS[model] if isinstance(model, str) else model
    return predict_stage(PLAIN_STAGES[stage], config, ceilings, context, batch)[1]


# --- hand-made --------------------------------------------------------------------------------------------------------


def test_an_operator_takes_as_long_as_its_slowest_limit() -> None:
    assert limits(COMPUTE, CEILINGS) == pytest.approx({"compute": 0.05, "memory": 0.001, "overhead": 0.001})
    assert limits(MEMORY, CEILINGS) == pytest.approx({"compute": 0.001, "memory": 0.02, "overhead": 0.001})
    assert predict(cost(compute=1), CEILINGS) == pytest.approx(0.05)
    assert predict(cost(memory=1), CEILINGS) == pytest.approx(0.02)
    assert predict(cost(overhead=1), CEILINGS) == pytest.approx(0.001)


def test_a_prediction_adds_the_maxima_and_does_not_take_the_maximum_of_sums() -> None:
    everything = cost(compute=2, memory=3, overhead=40)
    assert predict(everything, CEILINGS) == pytest.approx(2 * 0.05 + 3 * 0.02 + 40 * 0.001)
    total = everything.flops / CEILINGS.peak, everything.bytes / CEILINGS.bandwidth, 45 * CEILINGS.overhead
    assert predict(everything, CEILINGS) > max(total)


def test_what_binds_is_what_takes_most_time_and_not_what_binds_most_operators() -> None:
    assert bound(cost(compute=1, memory=2, overhead=40), CEILINGS) == "compute"  # 50, 40 and 40 ms
    assert bound(cost(compute=1, memory=3, overhead=40), CEILINGS) == "memory"  # 50, 60 and 40 ms
    assert bound(cost(compute=1, memory=3, overhead=61), CEILINGS) == "overhead"  # 50, 60 and 61 ms


def test_without_overhead_an_operator_waits_for_arithmetic_or_memory() -> None:
    datasheet = replace(CEILINGS, overhead=0.0)
    assert predict(cost(overhead=1), datasheet) == pytest.approx(20 / 1e8)
    assert bound(cost(overhead=1), datasheet) == "memory"


def test_position_of_a_measured_phase() -> None:
    position = Position("decode", cost(memory=4), CEILINGS, measured_s=0.1)
    assert position.predicted_s == pytest.approx(0.08)
    assert position.ratio == pytest.approx(1.25)
    assert position.cost.intensity == pytest.approx(0.5)
    assert position.achieved == pytest.approx(4e6 / 0.1)
    assert position.fraction_of_roofline == pytest.approx(4e7 / 5e7)  # at 0.5 FLOP/byte, 50 MFLOP/s are attainable
    assert position.bound == "memory"


def test_right_of_the_ridge_the_fraction_is_one_of_the_peak() -> None:
    position = Position("prefill", cost(compute=1), CEILINGS, measured_s=0.1)
    assert position.cost.intensity > CEILINGS.ridge
    assert position.fraction_of_roofline == pytest.approx(5e8 / 1e9)


def test_a_pure_prediction_stands_where_its_predicted_time_puts_it() -> None:
    position = Position("decode", cost(memory=1), CEILINGS)
    assert position.ratio is None
    assert position.achieved == pytest.approx(1e6 / 0.02)
    assert position.fraction_of_roofline == pytest.approx(1)


def test_json_of_a_phase_has_the_keys_of_the_contract() -> None:
    prediction = ["phase", "flops", "bytes", "ideal_bytes", "intensity", "predicted_s", "bound"]
    measurement = ["measured_s", "achieved_flop_per_s", "fraction_of_roofline"]
    position = Position("decode", cost(memory=4), CEILINGS)
    assert list(position.as_json()) == prediction
    measured = replace(position, measured_s=0.1)
    assert list(measured.as_json()) == prediction + measurement
    assert measured.as_json() == {
        "phase": "decode",
        "flops": 4 * 10**6,
        "bytes": 8 * 10**6,
        "ideal_bytes": 0,
        "intensity": 0.5,
        "predicted_s": measured.predicted_s,
        "bound": "memory",
        "measured_s": 0.1,
        "achieved_flop_per_s": measured.achieved,
        "fraction_of_roofline": measured.fraction_of_roofline,
    }


# --- phases -----------------------------------------------------------------------------------------------------------


def test_decode_is_n_tokens_minus_one_in_cost_and_in_time() -> None:
    assert phase_seconds([0.5, 0.7, 1.0]) == {"prefill": 0.5, "decode": 0.5}
    assert phase_seconds([0.5, 0.75]) == {"prefill": 0.5, "decode": 0.25}
    assert phase_seconds([0.5]) == {"prefill": 0.5}
    for stage in PLAIN_STAGES.values():
        twin = meta_twin(KNOWN_MODELS["tiny"], torch.float32)
        costs = phase_costs(stage, twin, 5, 6)
        assert list(costs) == ["prefill", "decode"]
        assert costs["prefill"].calls == count_run(stage, twin, 5, 1).calls
        assert (costs["prefill"] + costs["decode"]).calls == count_run(stage, twin, 5, 6).calls


@pytest.mark.parametrize("new_tokens", [1, 2, 6])
def test_phases_of_a_real_run_are_those_that_were_counted_without_one(new_tokens: int) -> None:
    stage, model = PLAIN_STAGES["gqa"], random_model(KNOWN_MODELS["tiny"])
    of_run = phase_costs_of_run(CountingMode(), stage, model, [3, 1, 4, 1, 5], new_tokens)
    counted = phase_costs(stage, model, 5, new_tokens)
    assert list(of_run) == list(counted) == ["prefill", "decode"][:new_tokens]
    for phase, cost in counted.items():
        assert of_run[phase].flops == cost.flops
        assert of_run[phase].ideal_bytes == cost.ideal_bytes


def test_a_stage_whose_work_depends_on_its_tokens_is_not_predicted_alone() -> None:
    with pytest.raises(UsageError, match=r"depends on the tokens it finds, so it cannot be predicted alone"):
        predict_stage(STAGES["speculative"], KNOWN_MODELS["tiny"], H100, 16)


def test_only_the_decode_steps_of_a_launched_stage_have_no_overhead() -> None:
    eager, launched = PLAIN_STAGES["gqa"], replace(PLAIN_STAGES["gqa"], launched=True)
    for stage, phase, overhead in ((eager, "prefill", 1e-3), (eager, "decode", 1e-3), (launched, "prefill", 1e-3)):
        assert ceilings_of(stage, phase, CEILINGS) == replace(CEILINGS, overhead=overhead)
    assert ceilings_of(launched, "decode", CEILINGS) == replace(CEILINGS, overhead=0.0)
    assert ceilings_of(kv_cache, "decode", CEILINGS) == CEILINGS  # type: ignore[arg-type]  # a module in place of a stage
    prefill, step = predict_stage(launched, KNOWN_MODELS["tiny"], CEILINGS, 16)
    assert (prefill.ceilings.overhead, step.ceilings.overhead) == (1e-3, 0.0)


def test_a_stage_that_prepares_a_model_is_predicted_with_the_prepared_one() -> None:
    assert weight_reads("quantization") < 0.6 * weight_reads("gqa")


def weight_reads(stage: str) -> int:
    return predict_stage(STAGES[stage], LLAMA, H100, 16)[1].cost.ideal_bytes


def test_the_decode_step_attends_over_the_whole_context() -> None:
    config, context = KNOWN_MODELS["tiny"], 33
    position = decode(config, context)
    [attention] = [op for op, _ in position.cost if op.name == "scaled_dot_product_attention"]
    assert attention.flops == 4 * config.n_heads * context * config.head_dim
    prefill = predict_stage(PLAIN_STAGES["kv_cache"], config, H100, context)[0]
    [attention] = [op for op, _ in prefill.cost if op.name == "scaled_dot_product_attention"]
    assert attention.flops == 4 * config.n_heads * context**2 * config.head_dim


def test_a_naive_step_costs_a_prefill_of_its_context() -> None:
    prefill, step = predict_stage(PLAIN_STAGES["naive"], KNOWN_MODELS["tiny"], H100, 33)
    assert step.cost.calls == prefill.cost.calls


def test_a_twin_has_the_shapes_and_no_memory() -> None:
    twin = meta_twin(LLAMA, torch.bfloat16, positions=100_000)
    assert twin.dtype == torch.bfloat16
    assert all(parameter.is_meta for parameter in twin.parameters())
    assert sum(parameter.numel() for parameter in twin.parameters()) == LLAMA.parameter_count
    assert twin.config.max_positions == 100_000
    assert meta_twin(LLAMA, torch.bfloat16).config.max_positions == LLAMA.max_positions


# --- real shapes ------------------------------------------------------------------------------------------------------


def weights_and_cache(config: ModelConfig, context: int, batch: int) -> tuple[float, float]:
    """Bytes in 16 bits: weights streamed once, and B sequences' keys and values, one for each *query* head."""
    return 2 * config.streamed_params, 2 * 2 * config.n_layers * config.n_heads * config.head_dim * context * batch


def test_a_decode_step_takes_the_time_to_read_weights_and_cache() -> None:
    """Step time >= (B KV + weights) / bandwidth: for Llama-3-8B on an H100 15.01 GB and 2.15 GB at 3.35 TB/s, 5.12 ms."""
    weights, cache = weights_and_cache(LLAMA, 4096, 1)
    assert weights == pytest.approx(15.01e9, rel=1e-3)
    position = decode(LLAMA, 4096)
    assert position.predicted_s == pytest.approx((weights + cache) / 3.35e12, rel=0.01)
    assert position.predicted_s > (weights + cache) / 3.35e12
    assert position.bound == "memory"


def test_a_batch_reads_the_weights_once_and_each_cache() -> None:
    one, eight = decode(LLAMA, 2048), decode(LLAMA, 2048, batch=8)
    weights, cache = weights_and_cache(LLAMA, 2048, 1)
    assert eight.cost.flops == 8 * one.cost.flops
    rows = 2 * LLAMA.d_model  # each sequence gathers its own embedding
    assert eight.cost.ideal_bytes - one.cost.ideal_bytes == 7 * (cache + rows)
    assert eight.predicted_s == pytest.approx((weights + 8 * cache) / 3.35e12, rel=0.01)
    assert eight.predicted_s < 2 * one.predicted_s  # eight tokens for less than the price of two


GROUPED = pytest.mark.parametrize("stage", ["gqa", "batching_static", "batching"])


@GROUPED
def test_a_step_with_shared_heads_reads_g_times_fewer_keys_and_values(stage: str) -> None:
    """Llama-3-8B, G = 4: 32 sequences of 2,048 tokens keep 34.4 GB with a key for each query head, and 8.6 GB without."""
    weights, cache = weights_and_cache(LLAMA, 2048, 32)
    expanded, grouped = decode(LLAMA, 2048, 32), decode(LLAMA, 2048, 32, stage=stage)
    assert cache == pytest.approx(34.4e9, rel=1e-2)
    assert grouped.cost.flops == expanded.cost.flops
    assert expanded.cost.ideal_bytes - grouped.cost.ideal_bytes == cache * 3 / 4
    assert 1 < grouped.predicted_s / ((weights + cache / 4) / 3.35e12) < 1.03  # 32 rows of activations come on top
    assert grouped.bound == "memory"


def test_intensity_of_a_batch_nears_the_limit_that_keys_and_values_set() -> None:
    """(2 P + 4 S A L) FLOPs of a token over the bytes of its keys and values: as B grows, the weights no longer count."""
    S, A, L = 2048, LLAMA.n_heads * LLAMA.head_dim, LLAMA.n_layers
    P = L * LLAMA.layer_matmul_params + LLAMA.vocab_size * LLAMA.d_model
    limit = (2 * P + 4 * S * A * L) / (weights_and_cache(LLAMA, S, 1)[1] / 4)
    positions = [decode(LLAMA, S, B, stage="batching_static") for B in (1, 8, 64, 512)]
    ideal = [position.cost.flops / position.cost.ideal_bytes for position in positions]
    assert ideal == sorted(ideal)
    assert ideal[-1] < limit < 1.2 * ideal[-1]
    assert limit < H100.ridge  # so a batch of this context never leaves the memory's side


def test_a_longer_context_adds_its_cache_and_nothing_else() -> None:
    short, long = decode(LLAMA, 1000), decode(LLAMA, 3000)
    _, cache = weights_and_cache(LLAMA, 2000, 1)
    assert long.cost.bytes - short.cost.bytes == cache
    assert long.cost.flops - short.cost.flops == 4 * LLAMA.n_layers * LLAMA.n_heads * LLAMA.head_dim * 2000


def test_prefill_of_a_long_prompt_is_bound_by_compute() -> None:
    prefill = predict_stage(PLAIN_STAGES["kv_cache"], LLAMA, H100, 4096)[0]
    assert prefill.bound == "compute"
    P, A, T = LLAMA.n_layers * LLAMA.layer_matmul_params, LLAMA.n_heads * LLAMA.head_dim, 4096
    head = 2 * LLAMA.vocab_size * LLAMA.d_model
    assert prefill.cost.flops == 2 * P * T + 4 * A * LLAMA.n_layers * T**2 + head
    assert prefill.predicted_s > prefill.cost.flops / H100.peak


def test_a_70b_model_and_a_context_beyond_its_positions() -> None:
    config = KNOWN_MODELS["llama-3-70b"]
    context = 20 * config.max_positions
    weights, cache = weights_and_cache(config, context, 1)
    position = decode(config, context)
    assert position.predicted_s == pytest.approx((weights + cache) / 3.35e12, rel=0.01)


def test_overhead_binds_a_small_model_on_a_big_gpu() -> None:
    position = decode("smollm2-135m", 100, ceilings=replace(H100, overhead=5e-6))
    assert position.bound == "overhead"
    assert position.predicted_s > 5 * decode("smollm2-135m", 100).predicted_s


@pytest.mark.parametrize(("context", "batch"), [(1, 1), (0, 1), (-5, 1), (10, 0), (10, -1), (10**12, 1), (10, 10**12)])
def test_a_context_or_batch_that_cannot_be_is_refused(context: int, batch: int) -> None:
    with pytest.raises(UsageError, match=r"^The (context|batch) is -?\d+; it must lie between .*\.$"):
        predict_stage(PLAIN_STAGES["kv_cache"], KNOWN_MODELS["tiny"], H100, context, batch)


@pytest.mark.parametrize(("context", "batch"), [(2, 1), (MAX_CONTEXT, 1), (2, MAX_BATCH)])
def test_the_least_and_the_most_that_can_be_counted_are(context: int, batch: int) -> None:
    step = predict_stage(PLAIN_STAGES["kv_cache"], KNOWN_MODELS["tiny"], H100, context, batch)[1]
    assert step.cost.ideal_bytes > batch * weights_and_cache(KNOWN_MODELS["tiny"], context, 1)[1]


@pytest.mark.parametrize(("context", "batch"), [(MAX_CONTEXT + 1, 1), (2, MAX_BATCH + 1)])
def test_one_more_than_the_most_is_refused(context: int, batch: int) -> None:
    with pytest.raises(UsageError, match=r"; it must lie between "):
        predict_stage(PLAIN_STAGES["kv_cache"], KNOWN_MODELS["tiny"], H100, context, batch)


@pytest.mark.parametrize("stage", PLAIN_STAGES)
def test_every_stage_is_counted_beyond_the_positions_of_its_model(stage: str) -> None:
    config = KNOWN_MODELS["tiny"]
    short, long = (decode(config, config.max_positions + n, stage=stage) for n in (0, 1))
    assert long.cost.flops > short.cost.flops


# --- the command ------------------------------------------------------------------------------------------------------

# Runs the command as a user does, and says how much memory the process had at its fullest.
WITH_PEAK_MEMORY = """
import sys
from minillm.cli import main
status = main(sys.argv[1:])
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print("peak kB", line.split()[1], file=sys.stderr)
sys.exit(status)
"""


def run_predict(tmp_path: Path, *arguments: str) -> tuple[dict[str, object], str]:
    """JSON and standard error of `minillm predict`, in a process of its own: within 20 s and 1 GiB, or it fails."""
    path = tmp_path / "prediction.json"
    command = [sys.executable, "-c", WITH_PEAK_MEMORY, "predict", *arguments, "--json", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MINILLM_CACHE": str(tmp_path / "no-models")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text()), result.stderr


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_predicting_llama_3_8b_on_an_h100_takes_20_seconds_1_gib_and_no_weights(tmp_path: Path) -> None:
    arguments = ["--model", "llama-3-8b", "--hardware", "h100-sxm", "--stage", "kv_cache", "--context", "4096"]
    data, errors = run_predict(tmp_path, *arguments)
    weights, cache = weights_and_cache(LLAMA, 4096, 1)
    assert list(data) == ["model", "hardware", "stage", "batch", "context", "phases"]
    assert {key: data[key] for key in list(data)[:5]} == {
        "model": "llama-3-8b",
        "hardware": "h100-sxm",
        "stage": "kv_cache",
        "batch": 1,
        "context": 4096,
    }
    prefill, step = data["phases"]
    keys = ["phase", "flops", "bytes", "ideal_bytes", "intensity", "predicted_s", "bound"]
    assert list(prefill) == list(step) == keys
    assert (prefill["phase"], step["phase"]) == ("prefill", "decode")
    assert step["predicted_s"] == pytest.approx((weights + cache) / 3.35e12, rel=0.01)
    assert step["bound"] == "memory"
    assert step["intensity"] == step["flops"] / step["bytes"]
    assert int(errors.split("peak kB")[1]) < 2**20
    assert not (tmp_path / "no-models").exists()
