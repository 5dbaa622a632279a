"""Results on disk: whole or not at all, and told beforehand when they cannot be written."""

import json
from contextlib import suppress
from pathlib import Path

from minillm.errors import MinillmError


def check_writable(*paths: str | None) -> None:
    """Raise `MinillmError` if a result could not be written, before the work that gives it. Makes missing folders."""
    for name in paths:
        if name is None:
            continue
        path = Path(name)
        if not name or path.is_dir():
            raise MinillmError(f"{name!r} cannot be written: name a file, not a folder.")
        if _is_special(path):
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _part(path).touch()
            _part(path).unlink()
        except OSError as error:
            raise MinillmError(
                f"{name} cannot be written ({error.strerror}): name a file in a folder that you may write to."
            ) from None


def write_file(path: str | Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises `MinillmError` when the disk refuses."""
    path = Path(path)
    part = path if _is_special(path) else _part(path)
    try:
        part.write_bytes(data)
        if part != path:
            part.replace(path)
    except OSError as error:
        raise MinillmError(f"{path} could not be written ({error.strerror}): make room or name another file.") from None
    finally:
        if part != path:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def write_json(path: str | Path, data: object) -> None:
    """Write `data` as JSON, whole or not at all. Raises `MinillmError` when the disk refuses."""
    write_file(path, (json.dumps(data, indent=2) + "\n").encode())


def _part(path: Path) -> Path:
    """Where a file is written before it is moved to its place."""
    return path.with_name(f"{path.name}.part")


def _is_special(path: Path) -> bool:
    """Such as /dev/stdout, which is written to and not replaced."""
    return path.exists() and not path.is_file()
