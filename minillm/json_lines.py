"""Files of JSON lines, one value a line, as people write them: each line is judged by itself.

A file takes memory in proportion to its length, which MAX_FILE_BYTES bounds, and the value of one line at most 30 times
MAX_LINE_BYTES, 480 MiB: an empty object has three bytes in the file, and 72 here.
"""

import json
from pathlib import Path
from typing import TypeAlias

from minillm.errors import MinillmError, UsageError

MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 16 << 20

Id: TypeAlias = str | int


def numbered_lines(path: str | Path) -> list[tuple[int, bytes]]:
    """The lines that are not blank, each with its number, from 1 on. Raises `MinillmError` for a file that cannot be read."""
    lines: list[bytes] = []
    size = 0
    try:
        with open(path, "rb") as file:
            while line := file.readline(MAX_FILE_BYTES - size + 1):
                lines.append(line)
                size += len(line)
                if size > MAX_FILE_BYTES:
                    raise MinillmError(
                        f"{path} has more than {MAX_FILE_BYTES >> 20:,} MiB: split it into several files."
                    )
            return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise MinillmError(f"{path} cannot be read ({error.strerror}): name a file of JSON lines.") from None


def parse_line(line: bytes, most: int = MAX_LINE_BYTES) -> object:
    """The value of one line. Raises `UsageError` where it is not JSON, or has more than `most` bytes."""
    if len(line) > most:
        raise UsageError(f"It has more than {most >> 20} MiB.")
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # or no UTF-8, a number of 5,000 digits; brackets in brackets in brackets
        raise UsageError("It is not valid JSON.") from None


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
