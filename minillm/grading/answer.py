"""Comparing an answer with the value it should be, and saying in one sentence what is wrong with it.

    ask(tpot, 0.0, [0.5, 0.6]).number(0.1, {"It counts the first token too.": 0.3})

calls the learner's `tpot` and compares. Each wrong value that a known mistake gives may come along with its sentence; the
learner who made that mistake is told so. Nothing of the learner's is ever asked whether it is equal: `ask` has plain values.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.grading.channel import Refused, Remote, brief
from minillm.grading.errors import NotGraded, Wrong

_SCALES = {
    1e3: "It is 1000 times too large: mind the units.",
    1e-3: "It is 1000 times too small: mind the units.",
    1e6: "It is a million times too large: mind the units.",
    1e-6: "It is a million times too small: mind the units.",
    2.0: "It is twice as large: look for a factor of 2.",
    0.5: "It is half of that: look for a factor of 2.",
    8.0: "It is 8 times too large: a byte has 8 bits.",
    0.125: "It is 8 times too small: a byte has 8 bits.",
}
_MOST_NUMBERS = 1_000_000  # of a tensor that is compared as a list
_KINDS = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", tuple: "a tuple"}


class Answer:
    """What the learner's code returned, and the call that it stands for. Each check raises `Wrong`, with a sentence, or holds.

    `likely` has the values that known mistakes give, each by its sentence. `rtol` of 1e-6 lets an answer in float32 pass: its
    rounding is 6e-8 an operation, and no mistake is as small.
    """

    def __init__(self, label: str, value: Any) -> None:
        self.label = label
        self.value = value

    def wrong(self, what: str) -> Wrong:
        """The exception to raise, with a sentence that begins with the call."""
        return Wrong(f"{self.label} {what}")

    def number(
        self, expected: float | None, likely: Mapping[str, float | None] | None = None, rtol: float = 1e-6
    ) -> float | None:
        """The value, which must be this number (within `rtol` of it), or None where None is right."""
        value = self._plain_number()
        if value is expected or (value is not None and expected is not None and _close(value, expected, rtol)):
            return value
        hint = _hint(value, likely or {}, rtol)
        if value is None and not hint:
            raise self.wrong("returns None where a number is due (is there a return?).")
        if not hint and value is not None and expected:
            hint = next((f" {text}" for scale, text in _SCALES.items() if _close(value, expected * scale, rtol)), "")
        raise self.wrong(f"should give {_show(expected)}, not {_show(value)}.{hint}")

    def numbers(
        self, expected: Sequence[float], likely: Mapping[str, Sequence[float]] | None = None, rtol: float = 1e-6
    ) -> None:
        """The value must be a list (or tuple, or tensor) of these numbers."""
        value = self._listed()
        if not isinstance(value, (list, tuple)):
            raise self.wrong(f"returns {self._kind()} where a list of numbers is due.")
        if not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in value):
            raise self.wrong("returns a list that holds something else than numbers.")

        def same(a: Sequence[float], b: Sequence[float]) -> bool:
            return len(a) == len(b) and all(_close(x, y, rtol) for x, y in zip(a, b, strict=True))

        if same(value, expected):
            return
        hint = next((text for text, wrong in (likely or {}).items() if same(value, wrong)), "")
        right, given = (_short([_rounded(x) for x in xs]) for xs in (expected, value))
        raise self.wrong(f"should give {right}, not {given}.{' ' if hint else ''}{hint}")

    def text(self, expected: str, likely: Mapping[str, str] | None = None) -> None:
        """The value must be this word."""
        if type(self.value) is not str:
            raise self.wrong(f"returns {self._kind()} where a word is due, such as {expected!r}.")
        if self.value != expected:
            hint = next((text for text, wrong in (likely or {}).items() if self.value == wrong), "")
            raise self.wrong(f"should give {expected!r}, not {self.value[:40]!r}.{' ' if hint else ''}{hint}")

    def tensor(
        self,
        expected: Tensor,
        likely: Mapping[str, Callable[[], Tensor]] | None = None,
        atol: float = 1e-5,
        dtype: torch.dtype | None = None,
    ) -> None:
        """The value must be a tensor of this shape and, within `atol`, of these numbers; `dtype` where that matters."""
        value = self.value
        if not isinstance(value, Tensor):
            raise self.wrong(f"returns {self._kind()} where a tensor is due.")
        if value.shape != expected.shape:
            raise self.wrong(f"has shape {tuple(value.shape)} where {tuple(expected.shape)} is due.")
        if dtype is not None and value.dtype != dtype:
            raise self.wrong(f"is {value.dtype} where {dtype} is due.".replace("torch.", ""))
        error = (value.double() - expected.double()).abs()
        if not bool(torch.isfinite(value.double()).all()):
            raise self.wrong("holds NaN or infinity where every number is finite.")
        if value.numel() == 0 or float(error.max()) <= atol:
            return
        for text, wrong in (likely or {}).items():
            other = wrong()
            if other.shape == value.shape and float((value.double() - other.double()).abs().max()) <= atol:
                raise self.wrong(f"is wrong. {text}")
        place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise self.wrong(
            f"is wrong by up to {float(error.max()):.2g}: at {place} it has {float(value[place]):.4g} where "
            f"{float(expected[place]):.4g} is right."
        )

    def tokens(self, expected: Sequence[int], likely: Mapping[str, Sequence[int]] | None = None) -> None:
        """The value must be these token ids, as a list or a tensor."""
        value = self._listed()
        if not isinstance(value, (list, tuple)):
            raise self.wrong(f"returns {self._kind()} where token ids are due.")
        value = list(value)
        if not all(type(token) is int for token in value):
            raise self.wrong("returns something else than whole numbers: token ids are ints.")
        if value != list(expected):
            hint = next((text for text, wrong in (likely or {}).items() if value == list(wrong)), "")
            gives = f"gives the tokens {_short(value)} where {_short(list(expected))} are right."
            raise self.wrong(f"{gives}{' ' if hint else ''}{hint}")

    def _listed(self) -> Any:
        """The value, as a list where it is a tensor."""
        if not isinstance(self.value, Tensor):
            return self.value
        if self.value.numel() > _MOST_NUMBERS:  # as a list they take 30 times the memory
            raise self.wrong(f"returns {self._kind()}, which is far more than is due.")
        return self.value.tolist()

    def _plain_number(self) -> float | None:
        value = self.value
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(f"returns {self._kind()} where a number is due.")
        if isinstance(value, float) and math.isnan(value):
            raise self.wrong("returns NaN, which is no number.")
        return value

    def _kind(self) -> str:
        value = self.value
        if value is None:
            return "None (is there a return?)"
        if isinstance(value, Tensor):
            return f"a tensor of shape {tuple(value.shape)}"
        return f"an object of type {value._kind}" if isinstance(value, Remote) else _KINDS.get(type(value), "something")


class Evidence:
    """Answers to all cases, and for each the values that known mistakes give: one case often fits several of these.

    A sentence is said only where its mistake gives every answer that came. (Its values need not differ from the right ones.)
    """

    def __init__(self, rtol: float = 0.0) -> None:
        self.rtol = rtol
        self.cases: list[tuple[Answer, Any, Mapping[str, Any]]] = []

    def add(self, answer: Answer, due: Any, likely: Mapping[str, Any]) -> None:
        """One case: the answer, the number or list of tokens that is due, and what known mistakes give, by their sentences."""
        self.cases.append((answer, due, likely))

    def judge(self) -> None:
        """Raise `Wrong` for the first case that is wrong."""
        texts = [
            text for text in self.cases[0][2] if all(self._same(a.value, table[text]) for a, _, table in self.cases)
        ]
        for answer, due, table in self.cases:
            likely = {text: table[text] for text in texts[:1] if table[text] != due}
            if isinstance(due, list):
                answer.tokens(due, likely)
            else:
                answer.number(due, likely, rtol=self.rtol)

    def _same(self, value: Any, other: Any) -> bool:
        if isinstance(value, Tensor):
            value = value.tolist()
        if isinstance(other, list):
            return isinstance(value, (list, tuple)) and list(value) == other
        if value is None or other is None:
            return value is other
        return type(value) in (int, float) and abs(value) < 1e300 and math.isclose(value, other, rel_tol=self.rtol)


def ask(function: Remote, *args: Any) -> Answer:
    """Call a function or method of the learner's."""
    return Answer(f"{function!r}({', '.join(map(brief, args))})", function(*args))


def moved_bytes(function: Remote, *args: Any) -> int:
    """Bytes that a call reads and writes, counted beside the learner's code and not by it."""
    value = function._channel.call(function, args, "count")
    if type(value) is not int or not 0 <= value < 2**60:
        raise Wrong(
            f"{function!r} spoils the count of its bytes: compute with PyTorch's operators, and leave minillm alone."
        )
    return value


def captured(function: Remote, *args: Any) -> Remote:
    """The call of a function as a CUDA graph would record it (capture.py): to be called with other tensors of these shapes."""
    recording = function._channel.call(function, args, "capture")
    if not isinstance(recording, Remote):
        raise Wrong(f"{function!r} spoils its recording: compute with PyTorch's operators, and leave minillm alone.")
    return recording


def needs_triton() -> None:
    """Raise `NotGraded` where Triton is not installed. Where it is, kernels of the learner's run in its interpreter."""
    if importlib.util.find_spec("triton") is None:
        raise NotGraded(
            "not graded, because its kernel needs the package triton, which is not here: pip install triton."
        )


def refuses(function: Remote, *args: Any, because: str) -> None:
    """The learner's code must raise a ValueError for these arguments, with a message."""
    label = f"{function!r}({', '.join(map(brief, args))})"
    try:
        function(*args)
    except Refused:
        return
    raise Wrong(f"{label} must raise a ValueError, {because}, and does not.")


def _close(a: float, b: float, rtol: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=rtol, abs_tol=1e-12 if b == 0 else 0.0)
    except OverflowError:  # a whole number beyond all floats
        return False


def _hint(value: float | None, likely: Mapping[str, float | None], rtol: float) -> str:
    """The sentence to the known mistake whose value comes nearest to this one, if any comes near enough."""
    near: list[tuple[float, str]] = []
    for text, wrong in likely.items():
        if value is None or wrong is None:
            near += [(0.0, text)] if value is wrong else []
        elif _close(value, wrong, rtol):
            near.append((abs(value - wrong), text))
    return f" {min(near)[1]}" if near else ""


def _show(value: float | None) -> str:
    try:
        return f"{value:.6g}" if value is not None else "None"
    except OverflowError:
        return "a whole number of more than 300 digits"


def _rounded(x: float) -> float:
    try:
        return float(f"{x:.6g}")
    except OverflowError:  # a whole number beyond all floats
        return math.inf if x > 0 else -math.inf


def _short(values: Sequence[float]) -> str:
    return str(list(values)) if len(values) <= 12 else f"{str(list(values[:12]))[:-1]}, ... {len(values)} in all]"
