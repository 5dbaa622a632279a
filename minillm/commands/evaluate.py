"""`minillm evaluate`: what quantization does to any checkpoint, as one table of bytes, answers and speed."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from minillm.checkpoint import load
from minillm.config import DEFAULT_MODEL
from minillm.device import DTYPE_NAMES, DTYPES, pick_device, pick_dtype
from minillm.errors import MinillmError, UsageError
from minillm.evaluation import check_text, prose
from minillm.files import check_writable, write_json
from minillm.model import Transformer
from minillm.report import figure, make_console, make_table
from minillm.schemes import INT8_CACHE, NEW_TOKENS, Result, Setting, in_dtype, is_own_grid, measure
from minillm.stages.quantization import GROUP_SIZES, SCHEMES
from minillm.values import check_whole

KNOWN = (*DTYPES, *SCHEMES, INT8_CACHE)
DEFAULT_SCHEMES = ("bf16", "int8", "int4", "w8a8", INT8_CACHE)
DEFAULT_GROUPS = (32, 64)
MOST_TOKENS = 1_000_000  # of a text
LONGEST_TOKEN = 100  # characters: so many of a file a token are read, and no more


def evaluate(args: argparse.Namespace) -> None:
    """Print the table. Raises `UsageError` for a wrong command, `MinillmError` also where no scheme that was asked for runs."""
    check_writable(args.json)
    device = pick_device(args.device)
    dtype = DTYPE_NAMES[pick_dtype(args.dtype, device)]
    settings = read_settings(args.schemes, args.group_size, dtype)
    check_whole("tokens", args.tokens, 2, MOST_TOKENS)
    text = _read(args.text, args.tokens)
    model, tokenizer = load(args.model, device, "fp32")
    tokens = tokenizer.encode(text)[: args.tokens]
    check_text(tokens)
    results, left_out = _measured(settings, model, in_dtype(model, DTYPES[dtype]), tokens)

    console, title = make_console(), f"{model.config.name} on {device}, activations in {dtype}"
    console.print(_table(escape(title), results))
    console.print(_legend(results[0].loss.positions, "the package's own prose" if args.text is None else args.text))
    for why, labels in left_out.items():
        console.print(f"Left out: [bold]{'; '.join(labels)}[/bold]. {escape(why)}")
    for group_size in sorted({result.setting.group_size for result in results if result.setting.group_size}):
        if is_own_grid(model, group_size):
            console.print(escape(_own_grid_note(model.config.name, group_size)))
    if args.json:
        names = {"model": model.config.name, "device": str(device), "dtype": dtype, "text": args.text or "prose"}
        write_json(args.json, names | {"tokens": len(tokens), "rows": [result.as_json() for result in results]})
        console.print(f"Written: {args.json}", markup=False)


def read_settings(schemes: str | None, group_sizes: str | None, dtype: str) -> list[Setting]:
    """The rows that the options ask for, fp32 always first. int4 gives two a group: its head in int8, and all of it in int4.

    `dtype` is what an int8 cache leaves the head in. Raises `UsageError` for unknown schemes and groups.
    """
    names = DEFAULT_SCHEMES if schemes is None else [name.strip() for name in schemes.split(",")]
    groups = DEFAULT_GROUPS if group_sizes is None else [_group_size(text.strip()) for text in group_sizes.split(",")]
    if group_sizes is not None and "int4" not in names:
        raise UsageError("Only int4 has groups: leave --group-size out, or add int4 to --schemes.")
    settings = [Setting("fp32", "fp32")]
    for name in names:
        if name not in KNOWN:
            raise UsageError(f"Unknown scheme {name!r}: choose from {', '.join(KNOWN)}.")
        if name == "int4":
            settings += [Setting(name, head, group) for group in groups for head in ("int8", "int4")]
        else:
            settings.append(Setting(name, dtype if name == INT8_CACHE else name))
    return list(dict.fromkeys(settings))  # each once


def _group_size(text: str) -> int:
    if text not in map(str, GROUP_SIZES):
        raise UsageError(f"The group size is {text!r}; choose from {', '.join(map(str, GROUP_SIZES))}.")
    return int(text)


def _read(path: str | None, tokens: int) -> str:
    """The text, or as much of a long one as so many tokens can hold. Raises `UsageError` where it is none."""
    if path is None:
        return prose()
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(LONGEST_TOKEN * tokens)
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text in UTF-8: name another file.") from None
    if not text.strip():
        raise UsageError(f"{path} is empty: name a file with some text.")
    return text


def _measured(
    settings: Sequence[Setting], reference: Transformer, base: Transformer, tokens: list[int]
) -> tuple[list[Result], dict[str, list[str]]]:
    """The rows, and the labels of those left out, by the reason. Raises the reason where none of what was asked for is left."""
    results: list[Result] = []
    left_out: dict[str, list[str]] = {}
    for setting in track(
        settings, "schemes", console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    ):
        try:
            results.append(measure(setting, reference, base, tokens))
        except MinillmError as error:
            left_out.setdefault(str(error), []).append(setting.label)
    if len(results) < 2 and left_out:  # the reference is a row that nobody has to ask for
        raise MinillmError(next(iter(left_out)))
    return results, left_out


def _legend(positions: int, source: str) -> str:
    return (
        f"[dim]KL (nats a token) and agreement are those with the fp32 model, over {positions} tokens of {escape(source)}. "
        "MB: all weights in memory; bits: of a weight of the linear layers, scales and zeros included; "
        f"tokens/s: decode of one sequence, the median of {NEW_TOKENS - 1} steps.[/dim]"
    )


def _own_grid_note(name: str, group_size: int) -> str:
    kind = " (Q4_1)" if name == DEFAULT_MODEL else ""
    return (
        f"{name} was stored in 4 bits with groups of {group_size}{kind}: on the linear layers of its blocks int4 g{group_size} "
        "loses nothing, which is no result about 4 bits, and what it does lose comes from the head."
    )


def _table(title: str, results: Sequence[Result]) -> Table:
    table = make_table(title, "scheme", "MB", "bits", "perplexity", "KL", "agreement", "tokens/s")
    for result in results:
        loss, rate = result.loss, result.tokens_per_s
        table.add_row(
            result.setting.label, f"{result.bytes / 1e6:,.4g}", f"{result.bits_per_weight:.2f}", f"{loss.perplexity:.4g}",
            f"{loss.kl:.4f}", f"{loss.agreement:.1%}", "no speed to show" if rate is None else figure(rate),
        )  # fmt: skip
    return table
