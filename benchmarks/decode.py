"""Decode of one user, by fewer bytes a weight and by more tokens a pass: what chapters 5 and 6 promise, in one run.

    python benchmarks/decode.py --json benchmarks/results/decode-MACHINE.json

    precisions    fp32, bf16 and quantized weights: decode, prefill, and a step beside its prediction
    speculation   bf16 with its quantized twins as drafters, on chat prompts; n-grams in fp32 and bf16, on a text that repeats
                  its prompt and on one that does not
    batches       a decode step of B sequences: from which B on quantized weights lose

Here minillm is compared with itself; other engines are for peers.py. By its loop and clock, what is compared takes turns within
a round, and ratios are taken within a round.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bench import Bench
from common import (
    check_new_tokens,
    check_positions,
    exact_device,
    exit_status,
    positive,
    positives,
    rounds_parser,
    warn_if_busy,
    write_result,
)
from machine import describe
from precisions import (
    ALONE,
    CONTEXT,
    CROSSING,
    TWINS,
    crossings,
    make_quantized,
    measure_batches,
    measure_precisions,
)
from rich.console import Console
from speculation import NGRAM_TARGET, QUESTIONS, chat, guesses, measure_ngrams, measure_twins, repeating
from steps import far_from_predicted, is_far, step_cells
from turns import make_request

import minillm
from minillm.files import check_writable
from minillm.report import figure, make_console, make_table
from minillm.side_by_side import figures

DECODE_PROMPT = 40  # tokens

# --- what is shown ----------------------------------------------------------------------------------------------------


def missed(result: dict[str, Any]) -> list[str]:
    """One sentence for each target that is missed, each comparison that is lost and each prediction that is not close."""
    lines = []
    for row in result["ratios"]:
        times, target = row["times_as_fast"]["median"], row["target"]
        what = f"{row['phase']} in {row['what']} is {times:.2f} times as fast as in {row['beside']}."
        if target and times < target:
            lines.append(f"Below the target of {target:g}: {what}")
        elif times < 1:
            lines.append(f"Slower: {what}")
    for row in result["crossings"]:
        predicted = f"from {row['predicted']} on" if row["predicted"] else "for none of these batches"
        if row["measured"]:
            lines.append(
                f"Slower: a step in {row['precision']} is slower than in {CROSSING[0]} from a batch of {row['measured']} on; "
                f"the prediction says so {predicted}."
            )
    steps = [(f"a decode step in {r['precision']}", r["step"]) for r in result["precisions"]]
    steps += [(f"a step of batch {r['batch']} in {r['precision']}", r) for r in result["batches"]]
    lines += far_from_predicted(steps)
    lines += [
        f"Not within 15 % of the prediction: with the {row['drafter']} twin, {guesses(row['lookahead'])}, the speed-up "
        f"is {row['ratio']:.2f} times what F6 says."
        for row in result["twins"]["rows"]
        if is_far(row)
    ]
    return lines or ["Every target is reached, and nothing is slower."]


def show(console: Console, result: dict[str, Any]) -> None:
    """Four tables, and a sentence for everything that falls short."""
    _show_precisions(console, result["precisions"], result["settings"]["prefill_prompt_tokens"])
    _show_speculation(console, result["twins"], result["ngrams"])
    _show_batches(console, result["batches"])
    for row in result["agreement"]:
        if row["equal_tokens"] < row["of"]:
            whose = f"{row['precision']} with {row['engine']}"
            console.print(f"Tokens that are equal to plain ones, {whose}: {row['equal_tokens']} of {row['of']}.")
    table = make_table("Targets", "phase", "what", "beside", "times as fast", "target")
    for row in result["ratios"]:
        if row["target"]:
            times = figures(row["times_as_fast"])
            table.add_row(row["phase"], row["what"], row["beside"], times, f"{row['target']:g}")
    console.print(table)
    for line in result["missed"]:
        console.print(line)
    warn_if_busy(console, result["others_busy_cores"])


def _show_precisions(console: Console, rows: Sequence[dict[str, Any]], prompt: int) -> None:
    columns = ("precision", "tokens/s", "a step", "predicted", "ratio", "limit", f"prefill of {prompt}, ms")
    table = make_table("One user", *columns)
    for row in rows:
        step, rate = row["step"], row["decode_tokens_per_s"]
        table.add_row(
            row["precision"], figures(rate), *step_cells(step), step["bound"], figures(row["prefill_s"], 1e3)
        )  # fmt: skip
    console.print(table)


def _show_speculation(console: Console, twins: dict[str, Any], ngrams: Sequence[dict[str, Any]]) -> None:
    columns = ("text", "precision", "drafter", "guesses", "alpha", "tokens a round", "tokens/s", "times as fast", "F6")
    table = make_table("Speculation (* the lookahead that F6 picks)", *columns)
    for row in [*twins["rows"], *ngrams]:
        mark = "*" if row.get("chosen_by_f6") else ""
        table.add_row(
            row["text"], row["precision"], row["drafter"], f"{row['lookahead']}{mark}", figure(row["alpha"]),
            figure(row["tokens_per_round"]), figure(row["tokens_per_s"]["median"]), figures(row["times_as_fast"]),
            figure(row.get("predicted_times_as_fast")),
        )  # fmt: skip
    console.print(table)
    for twin in twins["twins"]:
        console.print(
            f"The {twin['twin']} twin: alpha {twin['alpha']:.2f}, c {twin['c']:.2f}, best lookahead {twin['best_lookahead']}."
        )


def _show_batches(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    columns = ("batch", "precision", "a step", "predicted", "ratio", "limit", "times as fast", "predicted")
    table = make_table(f"A decode step of a batch, beside {CROSSING[0]}", *columns)
    for row in rows:
        times = row["times_as_fast"]
        table.add_row(
            str(row["batch"]), row["precision"], *step_cells(row), row["bound"], figures(times) if times else "-",
            figure(row.get("predicted_times_as_fast")),
        )  # fmt: skip
    console.print(table)


# --- the command ------------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = "Decode of one user, with quantized weights and with speculation."
    parser = rounds_parser("decode.py", about, rounds=5)
    parser.add_argument("--max-new-tokens", type=positive, default=48, metavar="N", help="of an answer (default: 48)")
    parser.add_argument("--prefill-prompt", type=positive, default=256, metavar="N", help="tokens (default: 256)")
    parser.add_argument(
        "--sentences", type=positive, default=4, metavar="N", help="of the text that is repeated (default: 4)"
    )
    parser.add_argument(
        "--batches", type=positives, default=[1, 2, 4, 8, 16, 32], metavar="A,B", help="(default: 1,2,4,8,16,32)"
    )
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="of a batch, a round (default: 8)")
    parser.add_argument(
        "--patience", type=float, default=0, metavar="S",
        help="seconds a part in which disturbed rounds are repeated, batches excepted (default: 0)",
    )  # fmt: skip
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    check_writable(args.json)
    check_new_tokens(args.max_new_tokens)
    device, console, n = exact_device(args.device), make_console(), args.max_new_tokens
    description, bench = describe(device), Bench(console, args.rounds, args.patience)
    fp32, tokenizer = minillm.load(args.model, device, "fp32")
    bf16, _ = minillm.load(args.model, device, "bf16")
    request = make_request(tokenizer, DECODE_PROMPT, args.prefill_prompt, n)
    prompts = [chat(tokenizer, text) for text in QUESTIONS]
    longest = max(request.longest, max(map(len, prompts)) + n)
    check_positions(fp32, longest, "--max-new-tokens or --prefill-prompt")
    plain = {"fp32": fp32, "bf16": bf16}
    repeat, answer = repeating([fp32, bf16], tokenizer, args.sentences)
    quantized = make_quantized(console, bf16, dict.fromkeys((*ALONE, *TWINS)))

    alone = plain | {name: quantized[name] for name in ALONE if name in quantized}
    precisions = measure_precisions(bench, alone, request)
    twins = measure_twins(bench, bf16, {name: quantized[name] for name in TWINS if name in quantized}, tokenizer, n)
    ngrams = measure_ngrams(bench, "repeats", list(plain.values()), repeat, answer, NGRAM_TARGET)
    ngrams += measure_ngrams(bench, "does not repeat", list(plain.values()), prompts[1], n, None)
    several = {name: alone[name] for name in CROSSING if name in alone}
    batches = measure_batches(bench, several, args.batches, args.steps)
    result = description | {
        "settings": {
            "model": args.model, "rounds": args.rounds, "new_tokens": n, "decode_prompt_tokens": DECODE_PROMPT,
            "prefill_prompt_tokens": args.prefill_prompt, "chat_prompt_tokens": list(map(len, prompts)),
            "repeat_prompt_tokens": len(repeat), "repeat_new_tokens": answer, "batch_context": CONTEXT,
        },
        "precisions": precisions, "twins": twins, "ngrams": ngrams, "batches": batches, "crossings": crossings(batches),
        "ratios": bench.ratios, "agreement": bench.agreement,
    }  # fmt: skip
    result["missed"] = missed(result)
    result |= {"others_busy_cores": bench.others_busy_cores, "disturbed_rounds": bench.disturbed_rounds}
    show(console, result)
    write_result(console, args.json, result)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    return exit_status("decode.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
