"""From a list of messages to the text that a chat model was trained on, by the checkpoint's own jinja template."""

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from minillm.errors import MinillmError, UsageError

ROLES = ("system", "user", "assistant", "tool")

MAX_TEMPLATE = 200_000  # characters
# Of one process, which renders up to so many conversations of together so many characters, or one of any length:
TOGETHER = 256
TOGETHER_CHARACTERS = 1_000_000
MAX_OUTPUT = 4_000_000  # characters
MEMORY_BYTES = 1 << 29
CPU_SECONDS = 2
WALL_SECONDS = 20  # on a busy machine two seconds of CPU can take this long
MORE = 0.01  # of both, for each conversation after the first: a real template needs a tenth of that

Conversation: TypeAlias = Sequence[Mapping[str, Any]]

_WORKER = Path(__file__).with_name("template_worker.py")


def check_messages(messages: Conversation) -> None:
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


def render(template: str, messages: Conversation, special_tokens: Mapping[str, str]) -> str:
    """The conversation as text, up to where the assistant is to go on.

    `special_tokens` are further variables of the template, bos_token and eos_token. Raises `MinillmError` for a template
    that fails, or that takes more time, memory or room than any real one.
    """
    return next(render_all(template, [messages], special_tokens))


def render_all(
    template: str, conversations: Iterable[Conversation], special_tokens: Mapping[str, str]
) -> Iterator[str]:
    """What `render` gives for each conversation, in their order. A process is started for many of them at a time."""
    if len(template) > MAX_TEMPLATE:
        raise MinillmError(f"The chat template has {len(template):,} characters, and {MAX_TEMPLATE:,} are allowed.")
    for together in _parts(conversations):
        yield from _render(template, together, special_tokens)


def _parts(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    """As many conversations at a time as one process renders."""
    part: list[Conversation] = []
    characters = 0
    for messages in conversations:
        size = sum(len(message["content"]) for message in messages)
        if part and (len(part) == TOGETHER or characters + size > TOGETHER_CHARACTERS):
            yield part
            part, characters = [], 0
        part.append(messages)
        characters += size
    if part:
        yield part


def _render(template: str, conversations: Sequence[Conversation], special_tokens: Mapping[str, str]) -> list[str]:
    longer = 1 + MORE * (len(conversations) - 1)
    variables = {
        "add_generation_prompt": True,
        # Templates are written for callers that always name these two.
        "tools": None,
        "documents": None,
        **special_tokens,
    }
    request = {
        "template": template,
        "conversations": [[dict(message) for message in messages] for messages in conversations],
        "variables": variables,
        "cpu_seconds": math.ceil(CPU_SECONDS * longer),
        "memory_bytes": MEMORY_BYTES,
        "max_output": MAX_OUTPUT + 1,
    }
    try:
        # -P: the worker's folder is this package, whose modules must not hide the standard library's.
        command = [sys.executable, "-P", str(_WORKER)]
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=WALL_SECONDS * longer, check=False
        )
    except subprocess.TimeoutExpired:
        raise MinillmError("The chat template of this checkpoint does not come to an end.") from None
    except OSError as error:
        raise MinillmError(f"Cannot start {sys.executable} to render the chat template: {error}.") from None
    if done.returncode == 1 and done.stdout:
        reason = " ".join(done.stdout.decode("utf-8", "replace").split())[:200]
        raise MinillmError(f"The chat template of this checkpoint fails ({reason}).")
    if done.returncode != 0:
        raise MinillmError("The chat template of this checkpoint takes too much time or memory.")
    texts: list[str] = json.loads(done.stdout)
    if sum(map(len, texts)) > MAX_OUTPUT:
        raise MinillmError(f"The chat template of this checkpoint writes more than {MAX_OUTPUT:,} characters.")
    return texts
