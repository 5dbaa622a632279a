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
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from batching import Rounds, step_figures
from bench import Bench
from common import MODEL, Parser, exit_status, positive, positives, spread, warn_if_busy
from engines import Plain
from machine import describe
from peers import Request, make_request
from rich.console import Console
from speculation import NGRAM_TARGET, QUESTIONS, chat, guesses, measure_ngrams, measure_twins, repeating

import minillm
from minillm.device import pick_device
from minillm.errors import MinillmError, UsageError
from minillm.files import check_writable, write_json
from minillm.model import Transformer
from minillm.report import duration, figure, make_console, make_table
from minillm.roofline.ceilings import CeilingMeter, seconds
from minillm.roofline.counting import count
from minillm.roofline.position import meta_twin, phase_costs
from minillm.side_by_side import figures
from minillm.stages import known_stage
from minillm.stages.quantization import quantize, weight_bytes
from minillm.stages.speculative_gain import pass_over
from minillm.tour import CLOSE

QUANTIZED: dict[str, dict[str, Any]] = {
    "int8": {"scheme": "int8"},
    "int4 g32": {"scheme": "int4"},
    "int4 g32, head int8": {"scheme": "int4", "head": "int8"},
    "int4 g64": {"scheme": "int4", "group_size": 64},
    "int4 g64, head int8": {"scheme": "int4", "group_size": 64, "head": "int8"},
    "w8a8": {"scheme": "w8a8"},
}  # what is made of the bf16 model, by `quantize`
ALONE = ("int8", "int4 g32", "int4 g32, head int8", "int4 g64", "w8a8")  # of these, what answers by itself
TWINS = (
    "int8",
    "int4 g64, head int8",
)  # what drafts: the checkpoint was stored in groups of 32, so these are of another grid
CROSSING = ("bf16", "int8", "int4 g32")  # what is run at several batch sizes, the first beside the others
# How many times as fast what is named first must be, by (phase, what, beside what).
TARGETS = {
    ("decode", "int8", "fp32"): 1.7,
    ("decode", "int4 g32", "fp32"): 2.2,
}
DECODE_PROMPT = 40  # tokens


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


def make_meter(model: Transformer) -> CeilingMeter:
    """Ceilings for a model: in the dtype of its activations, over as many bytes as its weights have."""
    return CeilingMeter(model.device, model.dtype, weight_bytes(model))


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
    lines += [
        f"Not within 15 % of the prediction: {what} takes {row['ratio']:.2f} times as long as predicted."
        for what, row in steps
        if _is_far(row["ratio"])
    ]
    lines += [
        f"Not within 15 % of the prediction: with the {row['drafter']} twin, {guesses(row['lookahead'])}, the speed-up "
        f"is {row['ratio']:.2f} times what F6 says."
        for row in result["twins"]["rows"]
        if _is_far(row["ratio"])
    ]
    return lines or ["Every target is reached, and nothing is slower."]


def _is_far(ratio: float) -> bool:
    return not 1 / CLOSE <= ratio <= CLOSE


def show(console: Console, result: dict[str, Any]) -> None:
    """Four tables, and a sentence for everything that falls short."""
    prompt = result["settings"]["prefill_prompt_tokens"]
    columns = ("precision", "tokens/s", "a step", "predicted", "ratio", "limit", f"prefill of {prompt}, ms")
    table = make_table("One user", *columns)
    for row in result["precisions"]:
        step, middle = row["step"], row["decode_tokens_per_s"]
        table.add_row(
            row["precision"], figures(middle), duration(1 / middle["median"]), duration(step["predicted_s"]),
            f"{step['ratio']:.2f}", step["bound"], figures(row["prefill_s"], 1e3),
        )  # fmt: skip
    console.print(table)
    columns = ("text", "precision", "drafter", "guesses", "alpha", "tokens a round", "tokens/s", "times as fast", "F6")
    table = make_table("Speculation (* the lookahead that F6 picks)", *columns)
    for row in [*result["twins"]["rows"], *result["ngrams"]]:
        mark = "*" if row.get("chosen_by_f6") else ""
        table.add_row(
            row["text"], row["precision"], row["drafter"], f"{row['lookahead']}{mark}", figure(row["alpha"]),
            figure(row["tokens_per_round"]), figure(row["tokens_per_s"]["median"]), figures(row["times_as_fast"]),
            figure(row.get("predicted_times_as_fast")),
        )  # fmt: skip
    console.print(table)
    for twin in result["twins"]["twins"]:
        console.print(
            f"The {twin['twin']} twin: alpha {twin['alpha']:.2f}, c {twin['c']:.2f}, best lookahead {twin['best_lookahead']}."
        )
    columns = ("batch", "precision", "a step", "predicted", "ratio", "limit", "times as fast", "predicted")
    table = make_table(f"A decode step of a batch, beside {CROSSING[0]}", *columns)
    for row in result["batches"]:
        times = row["times_as_fast"]
        table.add_row(
            str(row["batch"]), row["precision"], duration(row["measured_s"]["median"]), duration(row["predicted_s"]),
            f"{row['ratio']:.2f}", row["bound"], figures(times) if times else "-",
            figure(row.get("predicted_times_as_fast")),
        )  # fmt: skip
    console.print(table)
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


# --- the command ------------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="decode.py", description="Decode of one user, with quantized weights and with speculation.")
    parser.add_argument("--model", default=MODEL, help=f"any that minillm loads (default: {MODEL})")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="turns of each engine (default: 5)")
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
    parser.add_argument("--json", metavar="FILE", help="write everything measured as JSON")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    check_writable(args.json)
    if args.max_new_tokens < 2:
        raise UsageError("Decode needs at least 2 new tokens: its time is that of n tokens minus that of 1.")
    device, console, n = pick_device(args.device), make_console(), args.max_new_tokens
    torch.set_float32_matmul_precision("highest")  # no TF32: fp32 means fp32 on a GPU too
    description, bench = describe(device), Bench(console, args.rounds, args.patience)
    fp32, tokenizer = minillm.load(args.model, device, "fp32")
    bf16, _ = minillm.load(args.model, device, "bf16")
    request = make_request(tokenizer, DECODE_PROMPT, args.prefill_prompt, n)
    prompts = [chat(tokenizer, text) for text in QUESTIONS]
    longest = max(request.longest, max(map(len, prompts)) + n)
    if longest > fp32.config.max_positions:
        raise UsageError(
            f"{args.model} has {fp32.config.max_positions} positions and {longest} are asked for: lower --max-new-tokens or "
            "--prefill-prompt."
        )
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
    if args.json:
        write_json(args.json, result)
        console.print(f"Written: {args.json}")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    return exit_status("decode.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
