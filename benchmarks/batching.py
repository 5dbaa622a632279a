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
import sys
from collections.abc import Sequence
from typing import Any

from batching_steps import LOCKSTEP_PROMPT, Variant, measure_batches, measure_contexts
from batching_trace import MAX_BATCH, OUTPUT_TOKENS, PROMPT_TOKENS, make_trace, measure_trace
from common import (
    check_positions,
    exact_device,
    exit_status,
    pick_dtypes,
    positive,
    positives,
    rounds_parser,
    warn_if_busy,
    write_result,
)
from machine import describe
from rich.console import Console
from steps import Rounds, far_from_predicted, step_cells

import minillm
from minillm.files import check_writable
from minillm.report import figure, make_console, make_table
from minillm.roofline.plot import si
from minillm.side_by_side import figures
from minillm.tour import CLOSE

STEPS_TARGET = 1.05  # continuous batching: steps of the model over the ideal number
THROUGHPUT_TARGET = 1.5  # and tokens a second, as a multiple of static batching's

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
                part["dtype"], str(r["batch"]), *step_cells(r), figure(r["tokens_per_s"]),
                figure(r["tokens_per_s_per_user"]), figure(r["intensity"]), r["bound"],
            )  # fmt: skip
    console.print(table)
    columns = ("dtype", "context", "stage", "a step", "predicted", "ratio", "cache", "limit")
    table = make_table("A decode step of one sequence, by context", *columns)
    for part in result["contexts"]:
        for r in part["rows"]:
            name = str(Variant(r["stage"], r["kv_heads"]))
            table.add_row(
                part["dtype"], str(r["context"]), name, *step_cells(r), f"{si(r['cache_bytes'])}B", r["bound"]
            )
    console.print(table)
    for t in result["trace"]:
        console.print(f"Answers of both that are equal, in {t['dtype']}: {t['equal_answers']} of {requests}.")
    for line in result["missed"]:
        console.print(line)
    warn_if_busy(console, result["others_busy_cores"])


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
        lines += far_from_predicted((f"batch {r['batch']} in {part['dtype']}", r) for r in part["rows"])
    for part in result["contexts"]:
        lines += far_from_predicted(
            (f"{Variant(r['stage'], r['kv_heads'])} at {r['context']} tokens in {part['dtype']}", r)
            for r in part["rows"]
        )
        for gain in part["gains"]:
            if gain["times_as_fast"]["min"] <= 1:
                ours, theirs = Variant(gain["stage"], gain["kv_heads"]), Variant(**gain["beside"])
                lines.append(
                    f"No sure gain: at {gain['context']} tokens in {part['dtype']} {ours} is {figures(gain['times_as_fast'])} "
                    f"times as fast as {theirs}."
                )
    return lines or ["Every target is reached."]


# --- the command ------------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = "Batching, and keys and values that are shared: counted and measured."
    parser = rounds_parser("batching.py", about, rounds=3)
    parser.add_argument("--dtypes", default="fp32,bf16", metavar="A,B", help="fp32, bf16, fp16 (default: fp32,bf16)")
    parser.add_argument("--requests", type=positive, default=200, metavar="N", help="of the trace (default: 200)")
    parser.add_argument(
        "--batches", type=positives, default=[1, 2, 4, 8, 16, 32], metavar="A,B", help="(default: 1,2,4,8,16,32)"
    )
    parser.add_argument(
        "--contexts", type=positives, default=[64, 512, 2048, 4096], metavar="A,B", help="(default: 64,512,2048,4096)"
    )
    parser.add_argument("--steps", type=positive, default=32, metavar="N", help="decode steps of a run (default: 32)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    check_writable(args.json)
    device = exact_device(args.device)
    dtypes = pick_dtypes(args.dtypes, device)
    description, console = describe(device), make_console()
    rounds = Rounds(args.rounds, console)
    parts: dict[str, list[dict[str, Any]]] = {"trace": [], "batches": [], "contexts": []}
    longest = max(LOCKSTEP_PROMPT + args.steps, PROMPT_TOKENS[1] + OUTPUT_TOKENS[1], max(args.contexts) + args.steps)
    for dtype in dtypes:
        model, tokenizer = minillm.load(args.model, device, dtype)
        check_positions(model, longest, "--contexts or --steps")
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
    write_result(console, args.json, result)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    return exit_status("batching.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
