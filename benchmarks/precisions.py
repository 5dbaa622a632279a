"""Parts of decode.py: each precision alone, and in batches, where quantized weights lose."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from bench import Bench
from common import spread
from engines import Plain
from rich.console import Console
from steps import Rounds, make_meter, step_figures
from turns import Request

from minillm.errors import MinillmError
from minillm.model import Transformer
from minillm.roofline.ceilings import seconds
from minillm.roofline.counting import count
from minillm.roofline.position import meta_twin, phase_costs
from minillm.stages import known_stage
from minillm.stages.quantization import quantize, weight_bytes
from minillm.stages.speculative_gain import pass_over

# What is made of the bf16 model, by `quantize`.
QUANTIZED: dict[str, dict[str, Any]] = {
    "int8": {"scheme": "int8"},
    "int4 g32": {"scheme": "int4"},
    "int4 g32, head int8": {"scheme": "int4", "head": "int8"},
    "int4 g64": {"scheme": "int4", "group_size": 64},
    "int4 g64, head int8": {"scheme": "int4", "group_size": 64, "head": "int8"},
    "w8a8": {"scheme": "w8a8"},
}
ALONE = ("int8", "int4 g32", "int4 g32, head int8", "int4 g64", "w8a8")  # of these, what answers by itself
# What drafts. The checkpoint was stored in groups of 32, so these are of another grid.
TWINS = ("int8", "int4 g64, head int8")
CROSSING = ("bf16", "int8", "int4 g32")  # what is run at several batch sizes, the first beside the others
# How many times as fast what is named first must be, by (phase, what, beside what).
TARGETS = {
    ("decode", "int8", "fp32"): 1.7,
    ("decode", "int4 g32", "fp32"): 2.2,
}
CONTEXT = 64  # tokens before the step of a batch

# --- models -----------------------------------------------------------------------------------------------------------


def make_quantized(console: Console, model: Transformer, names: Iterable[str]) -> dict[str, Transformer]:
    """The model in each of these precisions. One that its shape or the device does not allow is named and left out."""
    made = {}
    for name in names:
        try:
            made[name] = quantize(model, **QUANTIZED[name])
        except MinillmError as error:
            console.print(f"{name} is left out. {error}")
    return made


def shape_of(precision: str, model: Transformer) -> Transformer:
    """The same without numbers, for counting; `model` is in the dtype of its activations."""
    twin = meta_twin(model.config, model.dtype)
    return quantize(twin, **QUANTIZED[precision]) if precision in QUANTIZED else twin


# --- precisions -------------------------------------------------------------------------------------------------------


def measure_precisions(bench: Bench, models: dict[str, Transformer], request: Request) -> list[dict[str, Any]]:
    """Every precision alone, with its decode step beside the prediction."""
    meters = {name: make_meter(model) for name, model in models.items()}
    engines = [Plain(model, name) for name, model in models.items()]
    taken = dict(zip(models, bench.turns("precisions", engines, request, meters.values()), strict=True))
    rows, steps = [], request.new_tokens - 1
    for name, samples in taken.items():
        twin, T = shape_of(name, models[name]), len(request.decode_prompts[0])
        cost = phase_costs(known_stage("gqa"), twin, T, request.new_tokens)["decode"]
        times = [1 / s.decode_tokens_per_s for s in samples]
        rows.append(
            {
                "precision": name,
                "decode_tokens_per_s": spread([s.decode_tokens_per_s for s in samples]),
                "prefill_s": spread([s.prefill_s for s in samples]),
                "weight_bytes": weight_bytes(models[name]),
                "step": step_figures(cost, steps, meters[name].ceilings(), times),
            }
        )
    for what in models:
        for beside in ("fp32", "bf16"):
            if beside in taken and beside != what and (what, beside) != ("fp32", "bf16"):
                for phase in ("decode", "prefill"):
                    target = TARGETS.get((phase, what, beside))
                    bench.compare(phase, (what, taken[what]), (beside, taken[beside]), target)
    return rows


# --- batches ----------------------------------------------------------------------------------------------------------


def measure_batches(
    bench: Bench, models: dict[str, Transformer], batches: Sequence[int], steps: int
) -> list[dict[str, Any]]:
    """A decode step of B sequences, each after CONTEXT tokens, in every precision, beside its prediction."""
    meters = {name: make_meter(model) for name, model in models.items()}
    passes = {(B, name): pass_over(model, 1, CONTEXT, B) for B in batches for name, model in models.items()}
    for run in passes.values():
        run()  # warm-up
    taken: dict[tuple[int, str], list[float]] = {key: [] for key in passes}
    device, rounds = next(iter(models.values())).device, Rounds(bench.rounds, bench.console)
    for _ in rounds.of("batches"):
        for meter in meters.values():
            meter.sample()
        for key, run in passes.items():
            taken[key].append(statistics.median(seconds(run, device) for _ in range(steps)))
    bench.note_others(rounds.others_busy_cores)
    shapes, rows = {name: shape_of(name, model) for name, model in models.items()}, []
    for B in batches:
        steps_of = {
            name: step_figures(count(pass_over(shape, 1, CONTEXT, B)), 1, meters[name].ceilings(), taken[B, name])
            for name, shape in shapes.items()
        }
        first, *others = models
        rows.append({"batch": B, "precision": first, "times_as_fast": None, **steps_of[first]})
        for name in others:
            times = [b / a for a, b in zip(taken[B, name], taken[B, first], strict=True)]
            predicted = steps_of[first]["predicted_s"] / steps_of[name]["predicted_s"]
            beside = {"times_as_fast": spread(times), "predicted_times_as_fast": predicted}
            rows.append({"batch": B, "precision": name, **beside, **steps_of[name]})
    return rows


def crossings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each quantized precision the smallest batch at which it is slower, measured and predicted; None: at none of them."""

    def smallest(mine: Sequence[dict[str, Any]], slower: list[bool]) -> int | None:
        return min((row["batch"] for row, is_slower in zip(mine, slower, strict=True) if is_slower), default=None)

    found = []
    for name in dict.fromkeys(row["precision"] for row in rows if row["times_as_fast"]):
        mine = [row for row in rows if row["precision"] == name]
        found.append(
            {
                "precision": name,
                "measured": smallest(mine, [row["times_as_fast"]["median"] < 1 for row in mine]),
                "predicted": smallest(mine, [row["predicted_times_as_fast"] < 1 for row in mine]),
            }
        )
    return found
