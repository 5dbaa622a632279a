"""What the commands here share: arguments, prompts, the spread of a figure over rounds, and one sentence for an error."""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from rich.console import Console

from minillm.device import pick_device, pick_dtype
from minillm.errors import MinillmError, UsageError
from minillm.files import write_json
from minillm.model import Transformer
from minillm.tokenizer import Tokenizer

MODEL = "smollm2-135m"
BUSY = 0.1  # cores that other processes may use before the output warns

TEXT = (
    "The roofline model asks two questions of a program: how many operations does it do, and how many bytes does it move? "
    "Their quotient is the arithmetic intensity. A machine has a highest rate of operations and a highest rate of bytes, and "
    "whichever is reached first limits the program. A matrix that is multiplied with one vector is read once and used once, so "
    "memory is the limit. A matrix that is multiplied with a thousand vectors is read once and used a thousand times, so the "
    "arithmetic units are the limit. When a language model reads its prompt, it multiplies each weight with every token of the "
    "prompt at once. When it writes its answer, it multiplies each weight with a single token, over and over. That is why the "
    "first token of an answer takes a while, and why those that follow come at an even pace. "
)


def make_prompts(tokenizer: Tokenizer, length: int, count: int) -> list[list[int]]:
    """`count` prompts of `length` tokens, cut from an English text that repeats. Each starts at another place of it.

    They begin to repeat when there are more of them than the text has tokens.
    """
    period = len(tokenizer.encode(TEXT))
    repeats = 2
    while len(ids := tokenizer.encode(TEXT * repeats)) < length + period:
        repeats *= 2
    starts = [i * period // count if count < period else i % period for i in range(count)]
    return [ids[start : start + length] for start in starts]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """A figure in a result: the value of every round, and their median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": list(values)}


def warn_if_busy(console: Console, cores: float | None) -> None:
    """Say so where other processes took enough of the machine to disturb the figures."""
    if cores is not None and cores > BUSY:
        console.print(f"Do not trust these figures: other processes kept up to {cores:.2f} cores busy.")


# --- commands ---------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Ends a wrong command in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message[:1].upper()}{message[1:]}. See {self.prog} --help.\n")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def rounds_parser(program: str, description: str, rounds: int) -> Parser:
    """With the options that every command has whose engines or parts take turns in rounds."""
    parser = Parser(prog=program, description=description)
    parser.add_argument("--model", default=MODEL, help=f"any that minillm loads (default: {MODEL})")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument(
        "--rounds", type=positive, default=rounds, metavar="N", help=f"of what takes turns (default: {rounds})"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured as JSON")
    return parser


def exact_device(name: str | None) -> torch.device:
    """The device of that name, on which fp32 means fp32 from now on: no TF32 on a GPU. Raises `UsageError`."""
    device = pick_device(name)
    torch.set_float32_matmul_precision("highest")
    return device


def pick_dtypes(names: str, device: torch.device) -> list[torch.dtype]:
    """Those named in "fp32,bf16", each once. Raises `UsageError`."""
    return list(dict.fromkeys(pick_dtype(name.strip(), device) for name in names.split(",")))


def check_new_tokens(n: int) -> None:
    if n < 2:
        raise UsageError("Decode needs at least 2 new tokens: its time is that of n tokens minus that of 1.")


def check_positions(model: Transformer, longest: int, options: str) -> None:
    """Raises `UsageError`, with the options to lower, where a model has fewer positions than `longest`."""
    if longest > model.config.max_positions:
        raise UsageError(
            f"{model.config.name} has {model.config.max_positions} positions and {longest} are asked for: lower {options}."
        )


def write_result(console: Console, path: str | None, result: dict[str, Any]) -> None:
    """Into the file of `--json`, where there is one."""
    if path:
        write_json(path, result)
        console.print(f"Written: {path}")


def exit_status(program: str, work: Callable[[], None]) -> int:
    """Do the work: 0 done, 1 it failed, 2 the command was wrong. An error is one sentence."""
    try:
        work()
    except MinillmError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0
