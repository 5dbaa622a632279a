"""minillm's stages beside Hugging Face transformers and llama.cpp: greedy, the same weights, in the same minutes.

    python benchmarks/peers.py --json benchmarks/results/peers-MACHINE.json
    python benchmarks/peers.py --batch 16 --json benchmarks/results/peers-batch-16-MACHINE.json

turns.py times them, and comparison.py says who is set beside whom: a ratio is taken within a round, and its median over the
rounds is what counts.

Whatever an engine does once (compiling, above all) it does before, in its first calls, and their seconds stand apart.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from common import (
    MODEL,
    check_new_tokens,
    check_positions,
    exact_device,
    exit_status,
    pick_dtypes,
    positive,
    rounds_parser,
    warn_if_busy,
    write_result,
)
from comparison import ACTIVATIONS, TARGETS, check_answers, summarize
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
from machine import describe
from rich.console import Console
from turns import Request, first_calls, make_request, measure

import minillm
from minillm.device import DTYPE_NAMES
from minillm.errors import UsageError
from minillm.files import check_writable
from minillm.report import make_console, make_table
from minillm.side_by_side import Rows, published, ratios, shortfalls, speeds

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
    parser = rounds_parser("peers.py", "A Llama in minillm beside Hugging Face transformers and llama.cpp.", rounds=7)
    parser.add_argument("--dtypes", default="fp32,bf16", metavar="A,B", help="fp32, bf16, fp16 (default: fp32,bf16)")
    parser.add_argument(
        "--engines", metavar="A,B", help=f"{', '.join(PACKAGE_OF)} (default: what is installed and can run)"
    )
    parser.add_argument("--batch", type=positive, default=1, metavar="B", help="prompts at once (default: 1)")
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


def _make_engines(args: argparse.Namespace, names: Sequence[str], device: torch.device) -> tuple[list[Engine], Request]:
    """The engines in the order of their turns: by precision, so that those to be compared run one after the other."""
    dtypes = pick_dtypes(args.dtypes, device)
    own = [name for name in names if name in (*QUANTIZED_STAGES, KERNELS)]
    engines: list[Engine] = []
    quantized: list[Engine] = []
    for dtype in dict.fromkeys((*dtypes, *([ACTIVATIONS] if own else []))):
        model, tokenizer = minillm.load(args.model, device, dtype)
        request = make_request(tokenizer, args.decode_prompt, args.prefill_prompt, args.max_new_tokens, args.batch)
        check_positions(model, request.longest, "--decode-prompt, --prefill-prompt or --max-new-tokens")
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
    check_new_tokens(args.max_new_tokens)
    names = _pick_engines(args.engines, args.model, args.batch)
    console, device = make_console(), exact_device(args.device)
    engines, request = _make_engines(args, names, device)
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
    write_result(console, args.json, result)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    return exit_status("peers.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
