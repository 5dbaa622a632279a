"""A part of batching.py: requests that all wait at the start, in static batches and in continuous ones."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from common import make_prompts, spread
from steps import Rounds

from minillm.device import DTYPE_NAMES
from minillm.generation import Generation
from minillm.model import Transformer
from minillm.stages import batching
from minillm.tokenizer import Tokenizer
from minillm.workload import ideal_steps

MAX_BATCH = 16  # sequences at a time
PROMPT_TOKENS, OUTPUT_TOKENS = (8, 64), (8, 80)  # of the requests: lowest and highest


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
