"""Files of JSON lines, one value a line, as people write them: each line is judged by itself.

A file takes memory in proportion to its length, which MAX_FILE_BYTES bounds, and the value of one line at most 30 times
MAX_LINE_BYTES, 480 MiB: an empty object has three bytes in the file, and 72 here.
"""

import json
from pathlib import Path

from minillm.errors import MinillmError, UsageError

MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 16 << 20


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
