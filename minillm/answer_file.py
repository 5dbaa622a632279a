"""A file of answers that grows one line at a time, survives whatever stops the command, and is taken up again.

Invariant: every line but perhaps the last is a whole answer. An answer is appended in one piece and on the disk (fsync) before
the next one counts, so a kill or a power cut loses at most the line that was being written, and that one is cut off here.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from minillm.errors import MinillmError, UsageError
from minillm.files import check_writable
from minillm.json_lines import MAX_LINE_BYTES, parse_line
from minillm.values import Id, check_id, shown

_BEGINNING = b'{"id": '  # of every line
_MAX_LINE_BYTES = 8 * MAX_LINE_BYTES  # the prompt, in which a letter of two bytes can take six, and the answer


class _Contents(NamedTuple):
    done: set[Id]  # whose answers are there
    good: int  # bytes up to the end of the last whole answer
    ends: bool  # whether that answer has its newline


def answered(path: Path, prompts: Mapping[Id, str]) -> set[Id]:
    """Which of these prompts, by id, have an answer in the file. Changes nothing.

    Raises `MinillmError` for a file that holds anything but answers to them, or cannot be read or written.
    """
    check_writable(str(path))
    return _read(path, prompts).done


def _read(path: Path, prompts: Mapping[Id, str]) -> _Contents:
    if not path.is_file():  # not there yet, or such as /dev/stdout
        return _Contents(set(), 0, True)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MinillmError(f"{path} cannot be read ({error.strerror}): name another file with --out.") from None
    *lines, last = content.split(b"\n")
    done = {_check(path, number, line, prompts) for number, line in enumerate(lines, 1)}
    if not last:
        return _Contents(done, len(content), True)
    if last.startswith(_BEGINNING) or _BEGINNING.startswith(last):
        try:
            parse_line(last, _MAX_LINE_BYTES)
        except UsageError:  # half-written
            return _Contents(done, len(content) - len(last), True)
    return _Contents(done | {_check(path, len(lines) + 1, last, prompts)}, len(content), False)


def _check(path: Path, number: int, line: bytes, prompts: Mapping[Id, str]) -> Id:
    """The id of a line that answers one of the prompts. Raises `MinillmError` for any other line."""
    another = "name another file with --out"
    try:
        answer = parse_line(line, _MAX_LINE_BYTES)
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
            raise UsageError("It has no text.")
        id = check_id(answer.get("id"))
    except UsageError:
        raise MinillmError(f"Line {number} of {path} is no answer, and the file is left as it is: {another}.") from None
    if id not in prompts or prompts[id] != answer.get("prompt"):
        raise MinillmError(f"{path} belongs to other prompts (line {number}, id {shown(id)}): {another}.")
    return id


class AnswerFile:
    """The file, open for this run alone, with half an answer at its end cut off. Use it in a `with` statement.

    Raises `MinillmError` as `answered` does, and for a file that another run is writing.
    """

    def __init__(self, path: Path, prompts: Mapping[Id, str]) -> None:
        self.path = path
        self._prompts = prompts
        self._is_special = path.exists() and not path.is_file()
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise self._failed(error, "name a file that you may write to with --out") from None
        try:
            self._lock()
            self.done, self._size, ends = _read(path, prompts)
            if not self._is_special:
                os.ftruncate(self._file, self._size)
            if not ends:
                self._write(b"\n")
        except BaseException:
            os.close(self._file)
            raise

    def append(self, id: Id, answer: Mapping[str, object]) -> None:
        """Write the answer to a prompt and wait until it is on the disk. Raises `MinillmError` when the disk is full."""
        self._write(json.dumps({"id": id, "prompt": self._prompts[id], **answer}).encode() + b"\n")
        self.done.add(id)

    def _write(self, data: bytes) -> None:
        try:
            left = data
            while left:  # a disk that fills takes a part
                left = left[os.write(self._file, left) :]
            if not self._is_special:
                os.fsync(self._file)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            kept = f"{len(self.done)} of {len(self._prompts)} prompts have their answers in it"
            raise self._failed(error, f"{kept}; make room, and the same command goes on from there") from None
        self._size += len(data)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows: two runs at a time are not noticed
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MinillmError(
                f"Another run is writing {self.path}: wait for it, or name another file with --out."
            ) from None
        except OSError:  # a file system without locks
            pass

    def _failed(self, error: OSError, advice: str) -> MinillmError:
        return MinillmError(f"{self.path} could not be written ({error.strerror}): {advice}.")

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
