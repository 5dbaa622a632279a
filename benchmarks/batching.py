"""Batching, and keys and values that are shared: what chapters 3 and 4 promise, counted and measured.

    python benchmarks/batching.py --json benchmarks/results/batching-MACHINE.json

    trace      requests that all wait at the start, with outputs spread 10 to 1: static batches beside continuous ones, in steps
               of the model and in tokens a second
    batches    B sequences in lockstep: a decode step predicted and measured
    contexts   one sequence that holds S tokens: a decode step of the kv_cache and the gqa stage, and of twins of the model with
               as many KV heads as query heads (MHA) and with one (MQA)

What is compared takes turns within a round; a ratio is taken within a round, and its median over the rounds counts. The
ceilings of the predictions are sampled between the runs.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from common import MODEL, Parser, exit_status, make_prompts, positive, positives, spread, warn_if_busy
from machine import Neighbours, describe
from rich.console import Console

import minillm
from minillm.device import DTYPE_NAMES, pick_device, pick_dtype
from minillm.errors import UsageError
from minillm.files import check_writable, write_json
from minillm.generation import Generation, Recorder
from minillm.model import Transformer
from minillm.report import duration, figure, make_console, make_table
from minillm.roofline.ceilings import CeilingMeter, Ceilings
from minillm.roofline.counting import Cost, count
from minillm.roofline.plot import si
from minillm.roofline.position import bound, meta_twin, phase_costs, phase_seconds, predict
from minillm.sampling import greedy
from minillm.side_by_side import figures
from minillm.stages import batching, known_stage
from minillm.stages.gqa import GroupedKVCache, with_kv_heads
from minillm.stages.kv_cache import KVCache, prefill_and_decode
from minillm.tokenizer import Tokenizer
from minillm.tour import CLOSE
from minillm.workload import ideal_steps

MAX_BATCH = 16  # of the trace
PROMPT_TOKENS, OUTPUT_TOKENS = (8, 64), (8, 80)  # of its requests: lowest and highest
LOCKSTEP_PROMPT = 40
STEPS_TARGET = 1.05  # continuous batching: steps of the model over the ideal number
THROUGHPUT_TARGET = 1.5  # and tokens a second, as a multiple of static batching's
STAGE = known_stage("batching")  # whose batches are swept


@dataclass
class Rounds:
    """Counts rounds, says that they are done, and keeps what other processes took in the worst of them."""

    number: int
    console: Console
    others_busy_cores: float | None = None

    def of(self, what: str) -> Iterator[None]:
        for i in range(self.number):
            neighbours = Neighbours()
            yield
            busy = neighbours.busy_cores()
            if busy is not None:
                self.others_busy_cores = max(busy, self.others_busy_cores or 0.0)
            self.console.print(f"{what}: round {i + 1} of {self.number} done", style="dim")


# --- the trace --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    prompts: list[list[int]]
    limits: list[int]  # how many tokens each answer has


def make_trace(tokenizer: Tokenizer, requests: int) -> Trace:
    """The same requests in every run: lengths of prompts and of answers, each drawn evenly from its range."""
    rng = random.Random(0)
    texts = make_prompts(tokenizer, PROMPT_TOKENS[1], requests)
    prompts = [text[: rng.randint(*PROMPT_TOKENS)] for text in texts]
    return Trace(prompts, [rng.randint(*OUTPUT_TOKENS) for _ in prompts])


class Answered(NamedTuple):
    """One run of the trace."""

    seconds: float
    steps: int
    answers: list[list[int]]


@contextmanager
def counted_passes(model: Transformer) -> Iterator[list[None]]:
    """A list that grows by one entry with every pass of the model."""
    passes: list[None] = []
    hook = model.norm.register_forward_hook(lambda *_: passes.append(None))  # the last norm: once a pass
    try:
        yield passes
    finally:
        hook.remove()


def answer_trace(generate: Callable[..., list[Generation]], model: Transformer, trace: Trace) -> Answered:
    """Seconds from the call until the host has all answers."""
    with counted_passes(model) as passes:
        start = time.perf_counter()
        generations = generate(model, trace.prompts, trace.limits, max_batch=MAX_BATCH)
        answers = [generation.tokens for generation in generations]
        return Answered(time.perf_counter() - start, len(passes), answers)


def measure_trace(rounds: Rounds, model: Transformer, trace: Trace) -> dict[str, Any]:
    """Static beside continuous batching, in turns."""
    ways: dict[str, Callable[..., list[Generation]]] = {
        "static": batching.generate_static,
        "continuous": batching.generate,
    }
    few = Trace(trace.prompts[:MAX_BATCH], [4] * len(trace.prompts[:MAX_BATCH]))
    for generate in ways.values():
        answer_trace(generate, model, few)  # warm-up
    taken: dict[str, list[Answered]] = {name: [] for name in ways}
    for _ in rounds.of(f"trace in {DTYPE_NAMES[model.dtype]}"):
        for name, generate in ways.items():
            taken[name].append(answer_trace(generate, model, trace))
    static, continuous = taken["static"], taken["continuous"]
    tokens, ideal = sum(trace.limits), ideal_steps(trace.limits, MAX_BATCH)
    pairs = zip(static[0].answers, continuous[0].answers, strict=True)
    return {
        "dtype": DTYPE_NAMES[model.dtype],
        "prompt_tokens": sum(map(len, trace.prompts)),
        "output_tokens": tokens,
        "ideal_steps": ideal,
        **{
            name: {"steps": runs[0].steps, "tokens_per_s": spread([tokens / run.seconds for run in runs])}
            for name, runs in taken.items()
        },
        "steps_over_ideal": continuous[0].steps / ideal,
        "times_as_fast": spread([a.seconds / b.seconds for a, b in zip(static, continuous, strict=True)]),
        "equal_answers": sum(a == b for a, b in pairs),
    }


# --- steps, predicted and measured ------------------------------------------------------------------------------------


def step_figures(cost: Cost, steps: int, ceilings: Ceilings, seconds_a_step: Sequence[float]) -> dict[str, Any]:
    """One decode step: `cost` is that of all `steps` together. `ratio` is measured over predicted."""
    predicted, measured = predict(cost, ceilings) / steps, spread(seconds_a_step)
    return {
        "flops": cost.flops / steps,
        "bytes": cost.bytes / steps,
        "intensity": cost.intensity,
        "bound": bound(cost, ceilings),
        "predicted_s": predicted,
        "measured_s": measured,
        "ratio": measured["median"] / predicted,
    }


def make_meter(model: Transformer) -> CeilingMeter:
    return CeilingMeter(model.device, model.dtype, sum(p.nbytes for p in model.parameters()))


# --- the batches ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def lockstep_seconds(model: Transformer, prompts: list[list[int]], steps: int) -> float:
    """Seconds of a decode step of B sequences that run in lockstep."""
    recorder = Recorder(model.device)
    STAGE.run(model, torch.tensor(prompts, device=model.device), steps + 1, greedy, recorder)
    return phase_seconds(recorder.finish().times)["decode"] / steps


def measure_batches(
    rounds: Rounds, model: Transformer, tokenizer: Tokenizer, batches: Sequence[int], steps: int
) -> dict[str, Any]:
    """A decode step at each batch size, after prompts of one length."""
    twin, meter = meta_twin(model.config, model.dtype), make_meter(model)
    prompts = make_prompts(tokenizer, LOCKSTEP_PROMPT, max(batches))
    for B in batches:
        lockstep_seconds(model, prompts[:B], 2)  # warm-up
    taken: dict[int, list[float]] = {B: [] for B in batches}
    for _ in rounds.of(f"batches in {DTYPE_NAMES[model.dtype]}"):
        for B in batches:
            meter.sample()
            taken[B].append(lockstep_seconds(model, prompts[:B], steps))
    rows = []
    for B, seconds in taken.items():
        cost = phase_costs(STAGE, twin, LOCKSTEP_PROMPT, steps + 1, B)["decode"]
        row = step_figures(cost, steps, meter.ceilings(), seconds)
        user = 1 / row["measured_s"]["median"]
        rows.append({"batch": B, **row, "tokens_per_s": B * user, "tokens_per_s_per_user": user})
    return {"dtype": DTYPE_NAMES[model.dtype], "ceilings": meter.ceilings().as_json(), "rows": rows}


# --- the contexts -----------------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """A stage on the model with this number of KV heads."""

    stage: str
    kv_heads: int

    def __str__(self) -> str:
        return f"{self.stage}, {self.kv_heads} KV heads" if self.kv_heads > 1 else f"{self.stage}, 1 KV head"

    def cache(self, model: Transformer, capacity: int) -> "KVCache | GroupedKVCache":
        return (KVCache if self.stage == "kv_cache" else GroupedKVCache)(model, capacity)


def comparisons(n_heads: int, n_kv_heads: int) -> list[tuple[Variant, Variant]]:
    """What is set beside what: gqa beside kv_cache on the model as it is, and fewer KV heads beside one a query head."""
    pairs = [(Variant("gqa", n_kv_heads), Variant("kv_cache", n_kv_heads))]
    fewer = [heads for heads in dict.fromkeys((n_kv_heads, 1)) if heads < n_heads]
    return pairs + [(Variant("gqa", heads), Variant("gqa", n_heads)) for heads in fewer]


@torch.inference_mode()
def decode(model: Transformer, cache: "KVCache | GroupedKVCache", context: int, steps: int) -> Generation:
    """`steps` decode steps, the first of which adds a token to the `context` tokens that the cache holds."""
    cache.length = context
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    recorder = Recorder(model.device)
    prefill_and_decode(model, cache, token, steps, greedy, recorder)
    return recorder.finish()


def context_seconds(model: Transformer, cache: "KVCache | GroupedKVCache", context: int, steps: int) -> float:
    """Seconds of a decode step after `context` tokens."""
    return decode(model, cache, context, steps).times[-1] / steps


def filled_cache(variant: Variant, model: Transformer, capacity: int) -> "KVCache | GroupedKVCache":
    """A cache of random numbers. They are small, so that all tokens have a share of attention and none is an outlier."""
    cache = variant.cache(model, capacity)
    for memory in (cache.keys, cache.values):
        memory.normal_(std=0.02)
    return cache


def measure_contexts(rounds: Rounds, model: Transformer, contexts: Sequence[int], steps: int) -> dict[str, Any]:
    """A decode step of one sequence at each length of its context, for each variant."""
    config, meter = model.config, make_meter(model)
    pairs = comparisons(config.n_heads, config.n_kv_heads)
    variants = sorted(
        {variant for pair in pairs for variant in pair}, key=lambda v: (v.stage != "kv_cache", -v.kv_heads)
    )
    twins = {heads: with_kv_heads(model, heads) for heads in {v.kv_heads for v in variants} - {config.n_kv_heads}}
    models = {config.n_kv_heads: model, **twins}
    caches = {v: filled_cache(v, models[v.kv_heads], max(contexts) + steps) for v in variants}
    for v in variants:
        context_seconds(models[v.kv_heads], caches[v], min(contexts), 2)  # warm-up
    taken: dict[tuple[int, Variant], list[float]] = {(S, v): [] for S in contexts for v in variants}
    for _ in rounds.of(f"contexts in {DTYPE_NAMES[model.dtype]}"):
        for S in contexts:
            meter.sample()
            for v in variants:
                taken[S, v].append(context_seconds(models[v.kv_heads], caches[v], S, steps))
    rows = []
    for (S, v), seconds in taken.items():
        cost = count_context(v, model, S, steps)
        cache_bytes = (caches[v].keys.nbytes + caches[v].values.nbytes) * S // caches[v].capacity
        row = step_figures(cost, steps, meter.ceilings(), seconds)
        rows.append({"context": S, **v._asdict(), "cache_bytes": cache_bytes, **row})
    gains = [
        {
            "context": S,
            **ours._asdict(),
            "beside": theirs._asdict(),
            "times_as_fast": spread([b / a for a, b in zip(taken[S, ours], taken[S, theirs], strict=True)]),
        }
        for ours, theirs in pairs
        for S in contexts
    ]
    return {"dtype": DTYPE_NAMES[model.dtype], "ceilings": meter.ceilings().as_json(), "rows": rows, "gains": gains}


def count_context(variant: Variant, model: Transformer, context: int, steps: int) -> Cost:
    """What `context_seconds` times, counted on shapes alone."""
    config = replace(model.config, n_kv_heads=variant.kv_heads)
    twin = meta_twin(config, model.dtype)
    cache = variant.cache(twin, context + steps)
    return count(lambda: decode(twin, cache, context, steps))


# --- what is shown ----------------------------------------------------------------------------------------------------


def show(console: Console, result: dict[str, Any]) -> None:
    """Three short tables, and a sentence for everything that misses its target."""
    requests = result["settings"]["requests"]
    columns = ("dtype", "steps: ideal", "static", "continuous", "tokens/s: static", "continuous", "times as fast")
    table = make_table(f"A trace of {requests} requests, {MAX_BATCH} at a time", *columns)
    for t in result["trace"]:
        static, continuous = t["static"], t["continuous"]
        table.add_row(
            t["dtype"], str(t["ideal_steps"]), str(static["steps"]), str(continuous["steps"]),
            figure(static["tokens_per_s"]["median"]), figure(continuous["tokens_per_s"]["median"]),
            figures(t["times_as_fast"]),
        )  # fmt: skip
    console.print(table)
    columns = ("dtype", "batch", "a step", "predicted", "ratio", "tokens/s", "a user's", "FLOP/byte", "limit")
    table = make_table("A decode step, by batch", *columns)
    for part in result["batches"]:
        for r in part["rows"]:
            table.add_row(
                part["dtype"], str(r["batch"]), *_measured(r), figure(r["tokens_per_s"]),
                figure(r["tokens_per_s_per_user"]), figure(r["intensity"]), r["bound"],
            )  # fmt: skip
    console.print(table)
    columns = ("dtype", "context", "stage", "a step", "predicted", "ratio", "cache", "limit")
    table = make_table("A decode step of one sequence, by context", *columns)
    for part in result["contexts"]:
        for r in part["rows"]:
            name = str(Variant(r["stage"], r["kv_heads"]))
            table.add_row(part["dtype"], str(r["context"]), name, *_measured(r), f"{si(r['cache_bytes'])}B", r["bound"])
    console.print(table)
    for t in result["trace"]:
        console.print(f"Answers of both that are equal, in {t['dtype']}: {t['equal_answers']} of {requests}.")
    for line in result["missed"]:
        console.print(line)
    warn_if_busy(console, result["others_busy_cores"])


def _measured(row: dict[str, Any]) -> tuple[str, str, str]:
    return duration(row["measured_s"]["median"]), duration(row["predicted_s"]), f"{row['ratio']:.2f}"


def missed(result: dict[str, Any]) -> list[str]:
    """One sentence for each figure that misses its target, each prediction that is not close and each gain that is not seen."""
    lines = []
    for t in result["trace"]:
        if t["steps_over_ideal"] > STEPS_TARGET:
            steps, ideal = t["continuous"]["steps"], t["ideal_steps"]
            lines.append(
                f"Above the target of {STEPS_TARGET:g} times the ideal: in {t['dtype']} continuous batching takes {steps} "
                f"steps, ideal are {ideal}."
            )
        if (times := t["times_as_fast"]["median"]) < THROUGHPUT_TARGET:
            lines.append(
                f"Below the target of {THROUGHPUT_TARGET:g}: in {t['dtype']} continuous batching gives {times:.2f} times as "
                "many tokens/s as static."
            )
    for part in result["batches"]:
        lines += [_far(f"batch {r['batch']} in {part['dtype']}", r) for r in part["rows"] if _is_far(r)]
    for part in result["contexts"]:
        for r in part["rows"]:
            if _is_far(r):
                name = Variant(r["stage"], r["kv_heads"])
                lines.append(_far(f"{name} at {r['context']} tokens in {part['dtype']}", r))
        for gain in part["gains"]:
            if gain["times_as_fast"]["min"] <= 1:
                ours, theirs = Variant(gain["stage"], gain["kv_heads"]), Variant(**gain["beside"])
                lines.append(
                    f"No sure gain: at {gain['context']} tokens in {part['dtype']} {ours} is {figures(gain['times_as_fast'])} "
                    f"times as fast as {theirs}."
                )
    return lines or ["Every target is reached."]


def _is_far(row: dict[str, Any]) -> bool:
    return not 1 / CLOSE <= row["ratio"] <= CLOSE


def _far(what: str, row: dict[str, Any]) -> str:
    return f"Not within 15 % of the prediction: {what} takes {row['ratio']:.2f} times as long as predicted."


# --- the command ------------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="batching.py", description="Batching, and keys and values that are shared: counted and measured."
    )
    parser.add_argument("--model", default=MODEL, help=f"any that minillm loads (default: {MODEL})")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--dtypes", default="fp32,bf16", metavar="A,B", help="fp32, bf16, fp16 (default: fp32,bf16)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="of each part (default: 3)")
    parser.add_argument("--requests", type=positive, default=200, metavar="N", help="of the trace (default: 200)")
    parser.add_argument(
        "--batches", type=positives, default=[1, 2, 4, 8, 16, 32], metavar="A,B", help="(default: 1,2,4,8,16,32)"
    )
    parser.add_argument(
        "--contexts", type=positives, default=[64, 512, 2048, 4096], metavar="A,B", help="(default: 64,512,2048,4096)"
    )
    parser.add_argument("--steps", type=positive, default=32, metavar="N", help="decode steps of a run (default: 32)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured as JSON")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    check_writable(args.json)
    device = pick_device(args.device)
    dtypes = dict.fromkeys(pick_dtype(name.strip(), device) for name in args.dtypes.split(","))
    torch.set_float32_matmul_precision("highest")  # no TF32: fp32 means fp32 on a GPU too
    description, console = describe(device), make_console()
    rounds = Rounds(args.rounds, console)
    parts: dict[str, list[dict[str, Any]]] = {"trace": [], "batches": [], "contexts": []}
    longest = max(LOCKSTEP_PROMPT + args.steps, PROMPT_TOKENS[1] + OUTPUT_TOKENS[1], max(args.contexts) + args.steps)
    for dtype in dtypes:
        model, tokenizer = minillm.load(args.model, device, dtype)
        if longest > model.config.max_positions:
            raise UsageError(
                f"{args.model} has {model.config.max_positions} positions and {longest} are asked for: lower --contexts or "
                "--steps."
            )
        parts["trace"].append(measure_trace(rounds, model, make_trace(tokenizer, args.requests)))
        parts["batches"].append(measure_batches(rounds, model, tokenizer, args.batches, args.steps))
        parts["contexts"].append(measure_contexts(rounds, model, args.contexts, args.steps))
    result = description | {
        "settings": {
            "model": args.model, "rounds": args.rounds, "requests": args.requests, "max_batch": MAX_BATCH,
            "lockstep_prompt_tokens": LOCKSTEP_PROMPT, "steps": args.steps,
            "targets": {"steps_over_ideal": STEPS_TARGET, "times_as_fast": THROUGHPUT_TARGET, "ratio": CLOSE},
        },
        **parts,
        "missed": missed(parts),
        "others_busy_cores": rounds.others_busy_cores,
    }  # fmt: skip
    show(console, result)
    if args.json:
        write_json(args.json, result)
        console.print(f"Written: {args.json}")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    return exit_status("batching.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
