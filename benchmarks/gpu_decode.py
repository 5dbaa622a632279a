"""Decode steps on a GPU, in the shape of Llama-3-8B: part `decode` of gpu.sh.

    launched      bf16, int8 and int4, by PyTorch's kernels and by Triton's, captured or not, compiled or not: the fraction of
                  the measured read bandwidth beside its target
    stages        each on prompts that it reads itself, prefill and decode beside their predictions
    contexts      larger batches and longer contexts, on caches that are filled with random numbers in place of a prompt
    speculative   a model whose own int8 twin drafts

The most important figures come first, since time may run out.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from common import exit_status
from gpu_part import MeasuredCeilings, Part, config_of, make_model, make_parser, need
from gpu_plot import draw
from gpu_steps import INT4, INT8, PLAIN, Weights, count_step, fill_cache, least_bytes, step_seconds

from minillm.config import ModelConfig
from minillm.device import DTYPE_NAMES
from minillm.generation import Recorder
from minillm.model import Transformer
from minillm.report import duration, make_table
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.counting import Cost
from minillm.roofline.position import Position, ceilings_of, meta_twin, phase_costs, phase_seconds
from minillm.sampling import greedy
from minillm.stages import STAGES, Stage
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.kernels import Launched
from minillm.stages.kv_cache import KVCache
from minillm.stages.quantization import streamed_bytes
from minillm.stages.static_cache import StaticKVCache

# Fractions of the measured read bandwidth at batch 1: what is to be reached, and what gpt-fast reached of an A100's
# (github.com/pytorch-labs/gpt-fast, README at 6ecad9b: 1397, 1069 and 863 GB/s).
TARGETS = {"bf16": 0.85, "int8": 0.70, "int4": 0.60}
PUBLISHED = {"bf16": 0.82, "int8": 0.63, "int4": 0.51}
ANSWER = 16  # tokens of a stage, of which the last attends over the context that is asked for


@dataclass(frozen=True)
class How:
    """How a decode step is launched."""

    captured: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        return " and ".join(word for word in ("captured", "compiled") if getattr(self, word)) or "eager"


# --- the bench --------------------------------------------------------------------------------------------------------


class Bench:
    """The model, its quantized copies as they are asked for, and the ceilings."""

    def __init__(self, part: Part, config: ModelConfig) -> None:
        self.part = part
        self.config = config
        self.model = make_model(part, config)
        self.twin = meta_twin(config, part.dtype)
        self.ceilings = MeasuredCeilings(part, streamed_bytes(self.model))
        self.stored = lru_cache(maxsize=5)(lambda weights: weights.of(self.model))
        self.shape = lru_cache(maxsize=None)(lambda weights: weights.of(self.twin))

    def row(self, cost: Cost, ceilings: Ceilings, measured_s: float, least: int, batch: int) -> dict[str, Any]:
        place = Position("decode", cost, ceilings, measured_s)
        return {
            "measured_s": measured_s,
            "predicted_s": place.predicted_s,
            "ratio": measured_s / place.predicted_s,
            "fraction_of_bandwidth": least / measured_s / ceilings.bandwidth,
            "fraction_of_roofline": place.fraction_of_roofline,
            "tokens_per_s": batch / measured_s,
            "least_bytes": least,
            "bytes": cost.bytes,
            "flops": cost.flops,
            "bound": place.bound,
        }

    def launched(self, weights: Weights, how: How, batch: int, context: int) -> None:
        """A step on the static cache of chapter 8."""

        def work() -> dict[str, Any]:
            ceilings = self.ceilings()
            launches = STAGES["kernels"] if how != How() else STAGES["gqa"]
            model = self.stored(weights)
            launched = Launched(model, captured=how.captured, compiled=how.compiled)
            need(launched.compiled == how.compiled, "nothing can be compiled here")
            cache = launched.cache(context, batch)
            fill_cache(cache)
            measured = step_seconds(launched, cache, self.part.device, context, batch)
            cost = count_step(self.shape(weights), StaticKVCache(self.twin, context, batch), context, batch)
            row = self.row(
                cost, ceilings_of(launches, "decode", ceilings), measured, least_bytes(model, batch, context), batch
            )
            target = TARGETS.get(stored["scheme"])
            return {"kind": "launched", **stored, "how": str(how), **about(batch, context), **row, "target": target}

        stored = {"scheme": weights.scheme or DTYPE_NAMES[self.part.dtype], "kernel": weights.kernel}
        name = " ".join(stored.values()) if weights.scheme else stored["scheme"]
        self.part.measure(f"{name} {how}, batch {batch}, context {context}", work)

    def grown(self, cache: type[KVCache] | type[GroupedKVCache], batch: int, context: int) -> None:
        """An eager step on the cache of chapter 2 or 3."""
        name = "kv_cache" if cache is KVCache else "gqa"

        def work() -> dict[str, Any]:
            ceilings = self.ceilings()
            memory = cache(self.model, context, batch)
            fill_cache(memory)
            measured = step_seconds(self.model, memory, self.part.device, context, batch)
            cost = count_step(self.twin, cache(self.twin, context, batch), context, batch)
            row = self.row(cost, ceilings, measured, least_bytes(self.model, batch, context), batch)
            return {"kind": "context", "stage": name, **about(batch, context), **row}

        self.part.measure(f"{name}, batch {batch}, context {context}", work)

    def stage(self, name: str, batch: int, context: int) -> None:
        """Prefill and decode of a stage, as the tour has them, for several prompts at once."""
        self.part.measure(f"stage {name}, batch {batch}, context {context}", lambda: self._stage(name, batch, context))

    def _stage(self, name: str, batch: int, context: int) -> dict[str, Any]:
        stage, ceilings = STAGES[name], self.ceilings()
        new = min(ANSWER, context // 2)
        prompt = context + 1 - new
        measured = run_stage(stage, stage.prepared(self.model), prompt, new, batch)
        costs = phase_costs(stage, stage.prepared(self.twin), prompt, new, batch)
        places = [Position(p, costs[p], ceilings_of(stage, p, ceilings), measured[p]) for p in costs]
        decode = places[-1]
        return {
            "kind": "stage", "stage": name, **about(batch, context),
            "measured_s": measured["decode"] / (new - 1), "predicted_s": decode.predicted_s / (new - 1),
            "ratio": decode.ratio, "bound": decode.bound, "new_tokens": new,
            "phases": [place.as_json() | {"ratio": place.ratio} for place in places],
        }  # fmt: skip

    def speculative(self, context: int) -> None:
        """Tokens a second of a model whose int8 twin drafts for it, and how many of its guesses were accepted."""

        def work() -> dict[str, Any]:
            prompt = torch.arange(context // 2) % self.config.vocab_size
            stage = STAGES["speculative"]
            stage.prepared(self.model)
            answers = [stage.generate(self.model, prompt.tolist(), context // 4) for _ in range(2)]
            times, found = answers[-1].times, answers[-1].speculation  # type: ignore[attr-defined]
            per_token = (times[-1] - times[0]) / (len(times) - 1)
            return {
                "kind": "speculative", **about(1, context), "measured_s": per_token, "tokens_per_s": 1 / per_token,
                "acceptance_rate": found.acceptance_rate, "tokens_per_round": found.tokens_per_round,
            }  # fmt: skip

        self.part.measure(f"speculative, context {context}", work)


def about(batch: int, context: int) -> dict[str, int]:
    return {"batch": batch, "context": context}


@torch.inference_mode()
def run_stage(stage: Stage, model: Transformer, prompt: int, new: int, batch: int) -> dict[str, float]:
    """Seconds of prefill and of all decode steps, after a warm-up."""
    run = stage.run
    assert run is not None
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (batch, prompt), generator=generator).to(model.device)
    times: list[float] = []
    for n in (2, new):
        recorder = Recorder(model.device)
        run(model, tokens, n, greedy, recorder)
        times = recorder.finish().times
    return phase_seconds(times)


# --- the order of the measurements --------------------------------------------------------------------------------------

ALL_WEIGHTS = (PLAIN, INT8, INT4, Weights("int8"), Weights("int4"))
CAPTURED, COMPILED, BOTH = How(captured=True), How(compiled=True), How(captured=True, compiled=True)


def plan(bench: Bench, batches: Sequence[int], contexts: Sequence[int]) -> None:
    """Every measurement, the most important ones first."""
    first, short = min(batches), min(contexts)

    def launched(weights: Sequence[Weights], how: How, batch: int, context: int) -> None:
        if how.captured and bench.part.device.type != "cuda":
            return
        for stored in weights:
            bench.launched(stored, how, batch, context)

    launched(ALL_WEIGHTS, CAPTURED, first, short)
    launched(ALL_WEIGHTS, BOTH, first, short)
    launched((PLAIN, INT8, INT4), How(), first, short)
    launched((PLAIN, INT4), COMPILED, first, short)
    for name, stage in STAGES.items():
        if stage.run is not None and not stage.launched:
            bench.stage(name, first, short)
    bench.speculative(short)
    for batch in batches[1:]:
        launched((PLAIN, INT8, INT4), CAPTURED, batch, short)
        for name in ("gqa", "batching", "quantization"):
            bench.stage(name, batch, short)
    for context in contexts[1:]:
        for batch in batches:
            launched((PLAIN, INT4), CAPTURED, batch, context)
            bench.grown(GroupedKVCache, batch, context)
        bench.grown(KVCache, first, context)
        launched((PLAIN,), BOTH, first, context)
    launched((PLAIN,), BOTH, batches[-1], short)


# --- what is shown ----------------------------------------------------------------------------------------------------


def fractions(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each scheme the largest fraction of the measured read bandwidth at batch 1, beside target and published figure."""
    found = {}
    for scheme, target in TARGETS.items():
        mine = [r for r in rows if r["kind"] == "launched" and r["batch"] == 1 and r["scheme"] == scheme]
        if mine:
            best = max(mine, key=lambda row: row["fraction_of_bandwidth"])
            keys = ("fraction_of_bandwidth", "tokens_per_s", "kernel", "how", "context")
            found[scheme] = {key: best[key] for key in keys} | {"target": target, "published": PUBLISHED[scheme]}
    return found


def show(part: Part) -> None:
    table = make_table("Decode at batch 1", "scheme", "best by", "of the bandwidth", "target", "published", "tokens/s")
    for scheme, best in part.extra["fractions"].items():
        table.add_row(
            scheme, f"{best['kernel']}, {best['how']}", f"{best['fraction_of_bandwidth']:.0%}",
            f"{best['target']:.0%}", f"{best['published']:.0%}", f"{best['tokens_per_s']:.1f}",
        )  # fmt: skip
    part.console.print(table)
    table = make_table("Measured beside predicted", "a step of", "measured", "predicted", "ratio", "limit")
    for row in part.rows:
        if "ratio" in row:
            measured, predicted = duration(row["measured_s"]), duration(row["predicted_s"])
            table.add_row(row["what"], measured, predicted, f"{row['ratio']:.2f}", row["bound"])
    part.console.print(table)


def run(args: argparse.Namespace) -> None:
    part = Part("decode", args)
    bench = Bench(part, config_of(args.model, max(args.contexts) + 1))
    plan(bench, sorted(args.batches), sorted(args.contexts))
    part.finish({"fractions": fractions(part.rows)})
    draw(part.path)
    show(part)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return make_parser(
        "gpu_decode.py", "Decode steps beside their predictions, by launch, stage, batch and context."
    ).parse_args(argv)


if __name__ == "__main__":
    sys.exit(exit_status("gpu_decode.py", lambda: run(parse())))
