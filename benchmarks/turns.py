"""The clock and the loop of peers.py and decode.py: what engines are asked, and how they take turns at it.

Every engine is timed from outside and in the same way: wall-clock seconds from a call with B lists of ids, of one length, until
the answers are lists of ids. Engines take turns within a round, since a shared machine drifts.

    prefill   seconds of a call for 1 token after long prompts, the median of a few calls
    decode    B (n - 1) / (seconds for n tokens - seconds for 1 token), tokens a second after short prompts
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common import BUSY, make_prompts
from engines import Engine
from machine import Neighbours, worst

from minillm.errors import MinillmError
from minillm.tokenizer import Tokenizer

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
        measured.others_busy_cores = worst(measured.others_busy_cores, busy)
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
