"""Numbers that a learner says before anything runs, against what minillm counts operator by operator."""

from collections.abc import Sequence

from torch import Tensor

from minillm.grading.answer import Answer
from minillm.grading.errors import Wrong

Reason = tuple[str, str, str]  # what a guess is about, what to think of where it is too low, and where it is too high


def judge_guesses(
    answer: Answer, counted: Sequence[float], within: float, what: str, reasons: Sequence[Reason]
) -> list[float]:
    """The guesses, each of which lies within `within` (a share) of the number that is counted.

    Raises `Wrong` for the first that does not, and where the answer is something else than `what` ("two numbers: ...").
    """
    value = answer.value.tolist() if isinstance(answer.value, Tensor) else answer.value
    if not isinstance(value, (tuple, list)) or len(value) != len(counted) or not all(map(_is_number, value)):
        raise answer.wrong(f"must return {what}.")
    for guess, right, (where, low, high) in zip(value, counted, reasons, strict=True):
        if not (1 - within) * right <= guess <= (1 + within) * right:
            shown = max(-1e9, min(guess, 1e9))  # a whole number may be too large to be written as a float
            reason = low if guess < right else high
            raise Wrong(f"{where} minillm counts another number than {shown:.4g}; think again: {reason}.")
    return list(value)


def _is_number(x: object) -> bool:
    return type(x) is int or (type(x) is float and x == x)  # NaN is not equal to itself
