"""From a list of messages to the text that a chat model was trained on, by the checkpoint's own jinja template."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError, UsageError

ROLES = ("system", "user", "assistant", "tool")

MAX_TEMPLATE = 200_000  # characters
MAX_OUTPUT = 4_000_000  # characters
CPU_SECONDS = 2
MEMORY_BYTES = 1 << 29
WALL_SECONDS = 20  # on a busy machine two seconds of CPU can take this long

_WORKER = Path(__file__).with_name("template_worker.py")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UsageError` unless each message has a known role and a text."""
    if not messages:
        raise UsageError("There are no messages: give at least one.")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise UsageError("A message must be a mapping with a 'role' and, as text, its 'content'.")
        if message.get("role") not in ROLES:
            raise UsageError(f"Unknown role {str(message.get('role'))[:80]!r}: choose one of {', '.join(ROLES)}.")
        try:
            message["content"].encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            raise UsageError("A message is not valid Unicode.") from None


def render(template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str]) -> str:
    """The conversation as text, up to where the assistant is to go on.

    `special_tokens` are further variables of the template, bos_token and eos_token. Raises `MinillmError` for a template
    that fails, or that takes more time, memory or room than any real one.
    """
    if len(template) > MAX_TEMPLATE:
        raise MinillmError(f"The chat template has {len(template):,} characters, and {MAX_TEMPLATE:,} are allowed.")
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        # Templates are written for callers that always name these two.
        "tools": None,
        "documents": None,
        **special_tokens,
    }
    request = {
        "template": template,
        "variables": variables,
        "cpu_seconds": CPU_SECONDS,
        "memory_bytes": MEMORY_BYTES,
        "max_output": MAX_OUTPUT + 1,
    }
    try:
        # -P: the worker's folder is this package, whose modules must not hide the standard library's.
        command = [sys.executable, "-P", str(_WORKER)]
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=WALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise MinillmError("The chat template of this checkpoint does not come to an end.") from None
    except OSError as error:
        raise MinillmError(f"Cannot start {sys.executable} to render the chat template: {error}.") from None
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode == 1 and text:
        raise MinillmError(f"The chat template of this checkpoint fails ({' '.join(text.split())[:200]}).")
    if done.returncode != 0:
        raise MinillmError("The chat template of this checkpoint takes too much time or memory.")
    if len(text) > MAX_OUTPUT:
        raise MinillmError(f"The chat template of this checkpoint writes more than {MAX_OUTPUT:,} characters.")
    return text
