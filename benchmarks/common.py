"""What the commands here share: arguments, prompts, the spread of a figure over rounds, and one sentence for an error."""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rich.console import Console

from minillm.errors import MinillmError, UsageError
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


def exit_status(program: str, work: Callable[[], None]) -> int:
    """Do the work: 0 done, 1 it failed, 2 the command was wrong. An error is one sentence."""
    try:
        work()
    except MinillmError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0
