"""What engines are held to: who is set beside whom, with which target, and whether they answer the same."""

from collections.abc import Sequence
from typing import Any

import torch
from common import spread
from engines import QUANTIZED_STAGES, Compiled, Engine, LlamaCpp, Minillm, Transformers
from turns import Request, Sample, times_as_fast

from minillm.device import DTYPE_NAMES
from minillm.errors import MinillmError

TARGETS = {"decode": 1.15, "prefill": 1.0}  # how many times as fast as transformers, in the same precision
# And beside the others, by (precision, peer). Quantized weights help decode; nothing is promised of their prefill.
DECODE_TARGETS = {
    ("int4", LlamaCpp.name): 0.8,
    (Compiled.precision, LlamaCpp.name): 1.2,
    (Compiled.precision, Minillm.name): 1.4,  # eager int4
}
ACTIVATIONS = torch.bfloat16  # of quantized weights; transformers in it is what they are set beside


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


def equal_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers share before they part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


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
