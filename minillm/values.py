"""Values that someone wrote, in an option or in a line of a file: each is good, or told in a sentence."""

from typing import TypeAlias

from minillm.errors import UsageError

Id: TypeAlias = str | int


def check_id(value: object) -> Id:
    """A name for a request. Raises `UsageError` unless it is text or a whole number."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise UsageError(f"id is {shown(value)}; give text or a whole number.")
    return value


def check_whole(name: str, value: object, least: int, most: int) -> int:
    """Raises `UsageError` unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{name} is {shown(value)}; it must be a whole number from {least} to {most:,}.")
    return value


def check_number(name: str, value: object, most: float) -> float:
    """Raises `UsageError` unless `value` is a number from 0 to `most`, which NaN is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise UsageError(f"{name} is {shown(value)}; it must be a number from 0 to {most:,.0f}.")
    return value


def shown(value: object) -> str:
    """A value as an error shows it: on one line, and not the whole of a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
