"""Renders conversations by one chat template in a process of its own. Run by chat_template.py, never imported.

A template is a program that came with a checkpoint. jinja2's sandbox keeps it from reaching anything, but not from looping
forever or building a string of many gigabytes: limits of the operating system do. Standard input holds the template, the
conversations and the other variables as JSON, standard output a JSON list of one text a conversation, or after exit status 1
a message. Any other status means that a limit was met.
"""

import contextlib
import datetime
import json
import sys
from typing import Any, NoReturn


def limit_resources(cpu_seconds: int, memory_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: the time limit of the parent process is left
        return
    for kind, limit in ((resource.RLIMIT_CPU, cpu_seconds), (resource.RLIMIT_AS, memory_bytes)):
        # Where a lower limit is set already, or the system has none of this kind, it stays as it is.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def render(template: str, conversations: list[Any], variables: dict[str, Any], max_output: int) -> list[str]:
    """The texts, under the settings and with the helpers that templates are written for.

    Once they have `max_output` characters all together, the rest is left out.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    compiled, texts = environment.from_string(template), []
    for messages in conversations:
        texts.append(compiled.render(messages=messages, **variables)[:max_output])
        max_output -= len(texts[-1])
    return texts


def main() -> int:
    request = json.load(sys.stdin.buffer)
    limit_resources(request["cpu_seconds"], request["memory_bytes"])
    limit: int = request["max_output"]
    try:
        texts = render(request["template"], request["conversations"], request["variables"], limit)
        # Half of a surrogate pair, which a template can write, becomes a question mark.
        output, status = json.dumps(texts, ensure_ascii=False).encode("utf-8", "replace"), 0
    except MemoryError:
        return 2
    except Exception as error:  # whatever a template can raise is its author's message to us
        output, status = f"{type(error).__name__}: {error}"[:limit].encode("utf-8", "replace"), 1
    sys.stdout.buffer.write(output)
    return status


if __name__ == "__main__":
    sys.exit(main())
