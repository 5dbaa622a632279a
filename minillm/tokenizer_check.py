"""What a tokenizer.json may ask for: a few lines of one can make "a" become a gigabyte, and the library would do it.

Only the parts are let through that tokenizers of the supported models are made of, in sizes that these never reach. A text of
n characters then becomes at most MAX_GROWTH times as many, and the library takes memory in proportion to that.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError

MAX_GROWTH = 64  # how many times longer all replacements of a text together can make it
MAX_REPEATS = 1_000  # of a part of a regular expression, {1,3} being 3; those within each other multiply
MAX_ENTRIES = 64  # of what is put around a text

_KNOWN = {
    "normalizer": ("Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace"),
    "decoder": ("Sequence", "ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"),
}


def check_tokenizer(content: Mapping[str, Any], path: Path) -> None:
    """Raise `MinillmError` for the contents of a tokenizer.json that ask for what no supported model has."""

    def refusal(what: str) -> MinillmError:
        return MinillmError(f"{path} {what}, which is not supported.")

    model = content.get("model")
    if isinstance(model, dict) and model.get("continuing_subword_prefix") and model.get("type") != "WordPiece":
        # No language model has one, and with merges that do not match it the library ends the whole process.
        raise refusal("marks the inside of words with a prefix")
    for section, known in _KNOWN.items():
        parts = list(_objects(content.get(section)))
        for part in parts:
            if "type" in part and part["type"] not in known:
                raise refusal(f"has a {section} of type {str(part['type'])[:80]!r}")
            if any(isinstance(part.get(key), int) and part[key] > MAX_GROWTH for key in ("start", "stop")):
                raise refusal(f"has a {section} that strips more than {MAX_GROWTH} characters")
        written = (part[key] for part in parts for key in ("content", "prepend") if isinstance(part.get(key), str))
        if math.prod(1 + len(text) for text in written) > MAX_GROWTH:
            raise refusal(f"has a {section} that makes text more than {MAX_GROWTH} times longer")
    for part in _objects([content.get("normalizer"), content.get("pre_tokenizer"), content.get("decoder")]):
        pattern = part.get("Regex")
        if isinstance(pattern, str) and _repeats(pattern) > MAX_REPEATS:
            raise refusal(f"has a regular expression that repeats a part more than {MAX_REPEATS:,} times")
    if sum("Sequence" in part for part in _objects(content.get("post_processor"))) > MAX_ENTRIES:
        raise refusal(f"puts more than {MAX_ENTRIES} copies of a text together")


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    """Every JSON object within a value, itself included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _repeats(pattern: str) -> int:
    """No fewer than the times that any part of a regular expression is written out."""
    return math.prod(max(int(n[:9]), 1) for n in re.findall(r"\{(?:\d*,)?(\d+),?\}", pattern))
