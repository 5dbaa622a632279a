"""What a check says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line: the part that was looked at, ok, note or missing, and words that end in the command where there is one."""

    part: str
    status: str
    words: str
