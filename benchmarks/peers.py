"""minillm's stages beside Hugging Face transformers and llama.cpp: greedy, the same weights, in the same minutes.

    python benchmarks/peers.py --json benchmarks/results/peers-MACHINE.json
    python benchmarks/peers.py --batch 16 --json benchmarks/results/peers-batch-16-MACHINE.json

Every engine is timed from outside and in the same way: wall-clock seconds from a call with B lists of ids, of one length, until
the answers are lists of ids. Engines take turns within a round, since a shared machine drifts; a ratio is taken within a round,
and its median over the rounds is what counts.

    prefill   seconds of a call for 1 token after long prompts, the median of a few calls
    decode    B (n - 1) / (seconds for n tokens - seconds for 1 token), tokens a second after short prompts

Whatever an engine does once (compiling, above all) it does before, in its first calls, and their seconds stand apart.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from common import BUSY, MODEL, Parser, exit_status, make_prompts, positive, spread, warn_if_busy
from engines import (
    KERNELS,
    PACKAGE_OF,
    QUANTIZED_STAGES,
    Compiled,
    Engine,
    LlamaCpp,
    Minillm,
    Quantized,
    Transformers,
    is_installed,
)
from machine import Neighbours, describe
from rich.console import Console

import minillm
from minillm.device import DTYPE_NAMES, pick_device, pick_dtype
from minillm.errors import MinillmError, UsageError
from minillm.files import check_writable, write_json
from minillm.report import make_console, make_table
from minillm.side_by_side import Rows, published, ratios, shortfalls, speeds
from minillm.tokenizer import Tokenizer

TARGETS = {"decode": 1.15, "prefill": 1.0}  # how many times as fast as transformers, in the same precision
# And beside the others, by (precision, peer). Quantized weights help decode; nothing is promised of their prefill.
DECODE_TARGETS = {
    ("int4", LlamaCpp.name): 0.8,
    (Compiled.precision, LlamaCpp.name): 1.2,
    (Compiled.precision, Minillm.name): 1.4,  # eager int4
}
ACTIVATIONS = torch.bfloat16  # of quantized weights; transformers in it is what they are set beside
PREFILLS = 3  # calls a round; one alone is short enough to be hit by noise
WARM_UPS = 2  # uncounted runs of each engine: pages, plans, the allocator


@dataclass(frozen=True)
class Request:
    """What every engine is asked: B short prompts with many new tokens, and B long prompts with one.

    Within each of the two, the prompts are of one length.
    """

    decode_prompts: list[list[int]]
    prefill_prompts: list[list[int]]
    new_tokens: int

    @property
    def batch(self) -> int:
        return len(self.decode_prompts)

    @property
    def longest(self) -> int:
        return max(len(self.decode_prompts[0]) + self.new_tokens, len(self.prefill_prompts[0]) + 1)


@dataclass(frozen=True)
class Sample:
    """One engine in one round."""

    decode_tokens_per_s: float  # of all users together
    prefill_s: float  # of all prompts together


def make_request(
    tokenizer: Tokenizer, decode_tokens: int, prefill_tokens: int, new_tokens: int, batch: int = 1
) -> Request:
    """Prompts of the given numbers of tokens, those of a batch equal in length and different in their tokens."""
    return Request(
        make_prompts(tokenizer, decode_tokens, batch), make_prompts(tokenizer, prefill_tokens, batch), new_tokens
    )


# --- measuring --------------------------------------------------------------------------------------------------------


def seconds(engine: Engine, prompts: list[list[int]], n: int) -> float:
    """Wall-clock seconds of a call. The answers are read by the host, so a GPU has finished too."""
    start = time.perf_counter()
    answers = engine.generate(prompts, n)
    elapsed = time.perf_counter() - start
    if len(answers) != len(prompts):
        raise MinillmError(f"{engine.name} gave {len(answers)} answers to {len(prompts)} prompts.")
    for tokens in answers:
        if len(tokens) != n:
            raise MinillmError(
                f"{engine.name} gave {len(tokens)} tokens where {n} were asked for: the times cannot be compared."
            )
    return elapsed


def first_calls(engine: Engine, request: Request) -> float:
    """Seconds of the first prompt and the first answer of an engine, which do what is done once: compile, fill caches."""
    return seconds(engine, request.prefill_prompts, 1) + seconds(engine, request.decode_prompts, request.new_tokens)


def sample(engine: Engine, request: Request) -> Sample:
    """Time one engine once in each phase."""
    prefill = statistics.median(seconds(engine, request.prefill_prompts, 1) for _ in range(PREFILLS))
    first = statistics.median(seconds(engine, request.decode_prompts, 1) for _ in range(PREFILLS))
    whole = seconds(engine, request.decode_prompts, request.new_tokens)
    if whole <= first:
        raise MinillmError(
            f"{request.new_tokens} tokens of {engine.name} took no longer than 1: ask for more with --max-new-tokens."
        )
    return Sample(request.batch * (request.new_tokens - 1) / (whole - first), prefill)


@dataclass
class Measured:
    """For each engine its samples, one a round. `others_busy_cores` is what other processes took in the worst of them."""

    samples: list[list[Sample]]
    others_busy_cores: float | None = None
    disturbed_rounds: int = 0  # thrown away and repeated


def measure(
    engines: Sequence[Engine],
    request: Request,
    rounds: int,
    patience: float = 0.0,
    on_round: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Let the engines take turns: A, B, C, A, B, C, ...

    For up to `patience` seconds, a round in which other processes kept more than `BUSY` cores busy is repeated. What decides
    is what they did, never the times that were measured.
    """
    for engine in engines:
        for _ in range(WARM_UPS):
            engine.generate(request.prefill_prompts, 1)
            engine.generate(request.decode_prompts, min(request.new_tokens, 8))
    measured, start, done = Measured([[] for _ in engines]), time.perf_counter(), 0
    while done < rounds:
        neighbours = Neighbours()
        taken = [sample(engine, request) for engine in engines]
        busy = neighbours.busy_cores()
        if busy is not None and busy > BUSY and time.perf_counter() - start < patience:
            measured.disturbed_rounds += 1
            on_round(f"a round was disturbed ({busy:.2f} cores busy with other work): again")
            continue
        done += 1
        on_round(f"round {done} done")
        if busy is not None:
            measured.others_busy_cores = max(busy, measured.others_busy_cores or 0.0)
        for samples, one in zip(measured.samples, taken, strict=True):
            samples.append(one)
    return measured


def times_as_fast(ours: Sequence[Sample], theirs: Sequence[Sample]) -> dict[str, list[float]]:
    """For each phase and round, how many times as fast `ours` was: above 1 is faster, also for prefill."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "decode": [a.decode_tokens_per_s / b.decode_tokens_per_s for a, b in pairs],
        "prefill": [b.prefill_s / a.prefill_s for a, b in pairs],
    }


def equal_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers share before they part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- from samples to a result -----------------------------------------------------------------------------------------


def summarize(engines: Sequence[Engine], samples: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """The figures of each engine, and of minillm beside every other: in its own precision, llama.cpp beside each of ours.

    Quantized weights stand beside transformers in 16 bits, and compiled steps beside eager ones.
    """
    figures = [
        {
            "engine": engine.name,
            "precision": engine.precision,
            "decode_tokens_per_s": spread([s.decode_tokens_per_s for s in taken]),
            "prefill_s": spread([s.prefill_s for s in taken]),
        }
        for engine, taken in zip(engines, samples, strict=True)
    ]
    pairs = [
        (ours, theirs, phase, values)
        for ours, our_samples in zip(engines, samples, strict=True)
        for theirs, their_samples in zip(engines, samples, strict=True)
        for phase, values in times_as_fast(our_samples, their_samples).items()
        if phase in phases_compared(ours, theirs)
    ]
    compared = [
        {
            "phase": phase,
            "precision": ours.precision,
            "peer": theirs.name,
            "peer_precision": theirs.precision,
            "times_as_fast": spread(values),
            "target": target_of(phase, ours, theirs),
        }
        for ours, theirs, phase, values in pairs
    ]
    return {"engines": figures, "ratios": compared}


def phases_compared(ours: Engine, theirs: Engine) -> tuple[str, ...]:
    """In which phases the first is set beside the second."""
    if ours.name != Minillm.name:
        return ()
    if theirs.name == Minillm.name:  # a compiled step beside the eager one; their prompts are read by the same code
        return ("decode",) if (ours.precision, theirs.precision) == (Compiled.precision, "int4") else ()
    in_16_bits = theirs.precision == DTYPE_NAMES[ACTIVATIONS] and ours.precision in (
        *QUANTIZED_STAGES.values(),
        Compiled.precision,
    )
    return tuple(TARGETS) if theirs.name == LlamaCpp.name or theirs.precision == ours.precision or in_16_bits else ()


def target_of(phase: str, ours: Engine, theirs: Engine) -> float | None:
    if theirs.name == Transformers.name:
        return TARGETS[phase] if theirs.precision == ours.precision else None
    return DECODE_TARGETS.get((ours.precision, theirs.name)) if phase == "decode" else None


def check_answers(engines: Sequence[Engine], request: Request) -> list[dict[str, Any]]:
    """How far each engine's answers agree with minillm's in the same precision (llama.cpp's: with the first).

    Compiled steps are set beside eager ones; what quantizing changes in an answer is no matter of engines.

    Equal tokens of all prompts are added. Raises `MinillmError` where fp32 answers differ: engines that compute different
    things cannot be compared.
    """
    answers = [engine.generate(request.decode_prompts, request.new_tokens) for engine in engines]
    ours = {e.precision: found for e, found in zip(engines, answers, strict=True) if e.name == Minillm.name}
    agreement = []
    for engine, found in zip(engines, answers, strict=True):
        is_compiled = engine.precision == Compiled.precision and "int4" in ours
        if (engine.name == Minillm.name and not is_compiled) or not ours:
            continue
        reference = ours.get("int4" if is_compiled else engine.precision, next(iter(ours.values())))
        equal = [equal_tokens(a, b) for a, b in zip(found, reference, strict=True)]
        if engine.precision == "fp32" and min(equal) < request.new_tokens:
            row = equal.index(min(equal))
            raise MinillmError(
                f"In fp32 {engine.name} and minillm differ at new token {equal[row] + 1} of prompt {row + 1}: the engines do "
                "not compute the same function, so their times cannot be compared."
            )
        agreement.append(
            {
                "engine": engine.name,
                "precision": engine.precision,
                "equal_tokens": sum(equal),
                "of": request.batch * request.new_tokens,
            }
        )
    return agreement


# --- what is shown ----------------------------------------------------------------------------------------------------


def show(console: Console, result: dict[str, Any], device: torch.device) -> None:
    """Two tables, a third of published figures on a GPU, and a sentence for everything that is slower or below its target."""
    _print(console, f"Batch {result['settings']['batch']}, medians (lowest to highest)", speeds(result))
    _print(console, "minillm: how many times as fast", ratios(result))
    if device.type == "cuda":
        _print(console, "For reference only: published by gpt-fast, not measured here", published())
    for line in shortfalls(result["ratios"]):
        console.print(line)
    for row in result["agreement"]:
        whose = f"{row['engine']} ({row['precision']})"
        console.print(f"Greedy tokens of {whose} equal to minillm's: {row['equal_tokens']} of {row['of']}.")
    warn_if_busy(console, result["others_busy_cores"])


def _print(console: Console, title: str, rows: Rows) -> None:
    table = make_table(title, *rows.columns)
    for row in rows.rows:
        table.add_row(*row)
    console.print(table)


# --- the command ------------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="peers.py", description="minillm beside Hugging Face transformers and llama.cpp.")
    parser.add_argument("--model", default=MODEL, help=f"any Llama that minillm loads (default: {MODEL})")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--dtypes", default="fp32,bf16", metavar="A,B", help="fp32, bf16, fp16 (default: fp32,bf16)")
    parser.add_argument(
        "--engines", metavar="A,B", help=f"{', '.join(PACKAGE_OF)} (default: what is installed and can run)"
    )
    parser.add_argument("--batch", type=positive, default=1, metavar="B", help="prompts at once (default: 1)")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="turns of each engine (default: 7)")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="of decode (default: 64)")
    parser.add_argument("--decode-prompt", type=positive, default=40, metavar="N", help="its prompt (default: 40)")
    parser.add_argument("--prefill-prompt", type=positive, default=256, metavar="N", help="tokens (default: 256)")
    parser.add_argument(
        "--patience",
        type=float,
        default=0,
        metavar="S",
        help="seconds in which disturbed rounds are repeated (default: 0)",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured as JSON")
    return parser.parse_args(argv)


def _pick_engines(asked: str | None, model: str, batch: int) -> list[str]:
    """The names of the engines to run. Raises `UsageError` for one that is unknown or cannot run."""
    if asked is None:
        return [name for name in PACKAGE_OF if is_installed(name) and not _reason_against(name, model, batch)]
    names = [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in PACKAGE_OF:
            raise UsageError(f"Unknown engine {name!r}: choose from {', '.join(PACKAGE_OF)}.")
        if not is_installed(name):
            raise UsageError(f"The engine {name} is not installed: install it, or leave it out with --engines.")
        if reason := _reason_against(name, model, batch):
            raise UsageError(f"{reason}: leave it out with --engines.")
    return list(dict.fromkeys(names))


def _reason_against(engine: str, model: str, batch: int) -> str | None:
    """Why an engine cannot run this, None where it can."""
    if engine in (KERNELS, LlamaCpp.name) and batch > 1:
        return f"{engine} is run for one prompt at a time"
    return f"llama.cpp runs the file of {MODEL} only" if engine == LlamaCpp.name and model != MODEL else None


def _make_engines(args: argparse.Namespace, names: Sequence[str]) -> tuple[list[Engine], Request]:
    """The engines in the order of their turns: by precision, so that those to be compared run one after the other."""
    device = pick_device(args.device)
    dtypes = [pick_dtype(name.strip(), device) for name in args.dtypes.split(",")]
    own = [name for name in names if name in (*QUANTIZED_STAGES, KERNELS)]
    engines: list[Engine] = []
    quantized: list[Engine] = []
    for dtype in dict.fromkeys((*dtypes, *([ACTIVATIONS] if own else []))):
        model, tokenizer = minillm.load(args.model, device, dtype)
        request = make_request(tokenizer, args.decode_prompt, args.prefill_prompt, args.max_new_tokens, args.batch)
        if request.longest > model.config.max_positions:
            raise UsageError(f"{args.model} has {model.config.max_positions} positions: ask for shorter prompts.")
        if dtype == ACTIVATIONS:
            quantized = [
                Compiled(model) if name == KERNELS else Quantized(model, QUANTIZED_STAGES[name]) for name in own
            ]
        if Minillm.name in names and dtype in dtypes:
            engines.append(Minillm(model))
        if Transformers.name in names and dtype in dtypes:
            engines.append(Transformers(model))
    engines += quantized
    if LlamaCpp.name in names:
        engines.append(LlamaCpp(device, request.longest))
    return engines, request


@contextmanager
def nothing_compiled_before() -> Iterator[None]:
    """Compiled code is kept on disk from run to run; here in a folder that is empty at first, so that compiling is timed."""
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
    ):
        yield


def run(args: argparse.Namespace) -> None:
    check_writable(args.json)
    if args.max_new_tokens < 2:
        raise UsageError("Decode needs at least 2 new tokens: its time is that of n tokens minus that of 1.")
    names = _pick_engines(args.engines, args.model, args.batch)
    console = make_console()
    torch.set_float32_matmul_precision("highest")  # no TF32: fp32 means fp32 on a GPU too
    device = pick_device(args.device)
    engines, request = _make_engines(args, names)
    description = describe(device)
    console.print(f"{description['machine']['device']}, {len(engines)} engines, {args.rounds} rounds")
    if args.engines is None:
        for name in PACKAGE_OF:
            if is_installed(name) and (reason := _reason_against(name, args.model, args.batch)):
                console.print(f"{reason}: it is left out.")
    with nothing_compiled_before():
        first = [first_calls(engine, request) for engine in engines]
        agreement = check_answers(engines, request)
        measured = measure(engines, request, args.rounds, args.patience, lambda text: console.print(text, style="dim"))
    summary = summarize(engines, measured.samples)
    for row, taken in zip(summary["engines"], first, strict=True):
        row["first_calls_s"] = taken
    result = description | {
        "settings": {
            "model": args.model, "batch": args.batch, "rounds": args.rounds, "decode_prompt_tokens": args.decode_prompt,
            "new_tokens": args.max_new_tokens, "prefill_prompt_tokens": args.prefill_prompt,
            "activations_of_quantized": DTYPE_NAMES[ACTIVATIONS], "targets_beside_transformers": TARGETS,
        },
        **summary,
        "agreement": agreement,
        "others_busy_cores": measured.others_busy_cores,
        "disturbed_rounds": measured.disturbed_rounds,
    }  # fmt: skip
    show(console, result, device)
    if args.json:
        write_json(args.json, result)
        console.print(f"Written: {args.json}")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    return exit_status("peers.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
