"""The grader's side: what a grader calls instead of the learner's function, and the way there.

A grader gets a `Remote` for each thing it needs from the learner's file and calls it like the thing itself. Arguments travel to
the learner's process, the result travels back as plain values (see wire.py), and whatever goes wrong there arrives as one of
the sentences of errors.py. In a notebook the learner's code stands in the same process: a `LocalChannel` takes the same road,
without the protection.
"""

import contextlib
import reprlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minillm.grading import wire
from minillm.grading.errors import NotWritten, Wrong
from minillm.grading.host import Host

TIME_LIMIT = 30.0  # seconds that an exercise may keep the grader waiting, all calls together


class Remote:
    """A function, class or object of the learner's. Calling it, or a method of it, asks the other side."""

    def __init__(self, channel: "Channel", number: int, kind: str, label: str = "", method: str | None = None) -> None:
        self._channel, self._number, self._kind, self._label, self._method = channel, number, kind, label, method

    def __call__(self, *args: Any) -> Any:
        return self._channel.call(self, args)

    def __getattr__(self, name: str) -> "Remote":
        if name.startswith("_"):
            raise AttributeError(name)
        return Remote(self._channel, self._number, self._kind, f"{self._label}.{name}", name)

    def __repr__(self) -> str:
        return self._label or f"a {self._kind}"


class Channel:
    """Calls to the learner's side. `roundtrip` carries one message there and its reply back."""

    def __init__(self) -> None:
        self.printed = 0  # characters that the learner's code wrote to standard output
        self._callbacks: list[Callable[..., Any]] = []
        self._stopped: Exception | None = None  # what a callback of the grader's found wrong

    def roundtrip(self, message: bytes, label: str) -> bytes:
        raise NotImplementedError

    def call(self, remote: Remote, args: tuple[Any, ...], do: str = "call") -> Any:
        """What the learner's code returns; with `do` = "count", the bytes that the call moves, with "capture" its recording."""
        label = f"{remote._label}({', '.join(map(brief, args))})"
        method = remote._method
        target = Remote(self, remote._number, remote._kind) if method else remote
        reply = self._ask({"do": do, "target": target, "method": method, "args": list(args)}, label)
        if "mutated" in reply:
            raise Wrong(f"{label} changes what it was given: work on a copy, its caller still needs the original.")
        if "returned" in reply:
            result = reply["returned"]
            if isinstance(result, Remote):
                result._label = remote._label
            return result
        raise self._failure(reply, label)

    def _ask(self, request: dict[str, Any], label: str) -> dict[str, Any]:
        self._stopped = None
        try:
            reply = wire.unpack(self.roundtrip(wire.pack(request, self._special), label), self._resolve)
        except wire.Unreadable:
            raise Wrong(
                f"{label} returns something that cannot be read: return plain numbers, lists or tensors."
            ) from None
        finally:
            if self._stopped is not None:
                raise self._stopped
        printed = reply.get("printed")
        self.printed += printed if isinstance(printed, int) else 0
        return reply

    def _failure(self, reply: dict[str, Any], label: str) -> Exception:
        """The exception that the learner's code ended with, as a sentence."""
        kinds, message, line = reply.get("raised"), str(reply.get("message", "")), reply.get("line")
        kind = str(kinds[0])[:60] if isinstance(kinds, list) and kinds else "an error"
        text = " ".join(message.split())[:200].rstrip(".")
        if kind == "NotImplementedError":
            return NotWritten(f"{text or 'Write this function'}.")
        where = f" in line {line}" if isinstance(line, int) else ""
        if kind == "SystemExit":
            return Wrong(f"{label} calls sys.exit(){where}: return instead.")
        if kind == "MemoryError" or "can't allocate memory" in message:
            return Wrong(f"{label} asks for more memory than an exercise may have (2 GiB){where}: look at the shapes.")
        if kind == "RecursionError":
            return Wrong(f"{label} calls itself without an end{where}: give the recursion a last step.")
        refusal = isinstance(kinds, list) and "ValueError" in kinds
        return (Refused if refusal else Wrong)(f"{label} raises {kind}{where}{': ' if text else ''}{text}.")

    def answer_callback(self, message: bytes) -> bytes:
        """Run a function of the grader's that the learner's code called, and pack its result."""
        request = wire.unpack(message, self._resolve)
        try:
            function, args = self._callbacks[request["callback"]], list(request["args"])
        except (LookupError, TypeError):
            raise wire.Unreadable("a call of nothing") from None
        try:
            answer = function(*args)
        except Exception as error:
            name = getattr(function, "__name__", "a function")
            wrong = Wrong(f"{name} is called wrongly: {' '.join(str(error).split())[:200]}.")
            self._stopped, answer = error if isinstance(error, Wrong) else wrong, None
        return wire.pack({"answer": answer}, self._special)

    def _special(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"object": value._number}
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} cannot be sent to the learner's side")
        if value not in self._callbacks:
            self._callbacks.append(value)
        return {"callback": self._callbacks.index(value)}

    def _resolve(self, value: dict[str, Any]) -> Any:
        if "callback" in value:
            return self._callbacks[value["callback"]]
        return Remote(self, int(value["object"]), str(value["type"])[:60])


class Refused(Wrong):
    """The learner's code raised a ValueError: wrong, unless the grader asked for a refusal."""


def brief(value: Any) -> str:
    """An argument as it stands in a sentence."""
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)}" if value.numel() > 6 else str(value.tolist())
    if not isinstance(value, Remote) and hasattr(value, "n_layers"):
        return str(value.name)
    if not isinstance(value, Remote) and callable(value):
        return str(getattr(value, "__name__", "function"))
    short = reprlib.Repr()
    short.maxlist = short.maxtuple = 5
    return f"{value:.6g}" if isinstance(value, float) else short.repr(value)


# --- in the same process


class LocalChannel(Channel):
    """For functions that stand in a notebook. An endless loop is interrupted where the platform has timers."""

    def __init__(self, time_limit: float = TIME_LIMIT) -> None:
        super().__init__()
        self._host = Host(self.answer_callback)
        self._time_limit = time_limit

    def wrap(self, value: Any, label: str) -> Remote:
        reference = self._host.add(value)
        return Remote(self, reference["object"], reference["type"], label)

    def roundtrip(self, message: bytes, label: str) -> bytes:
        with alarm(self._time_limit):
            reply = self._host.handle(message)
        if TimeUp.__name__ in wire.unpack(reply, self._resolve).get("raised", []):
            raise Wrong(endless(label, self._time_limit))
        return reply


# --- time


class TimeUp(BaseException):
    """The time of an `alarm` is over. No `except Exception` stops it."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` in what runs longer, on the main thread of a platform with timers. Elsewhere it has no limit."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise TimeUp

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def endless(label: str, seconds: float) -> str:
    return f"{label} has not returned after {seconds:g} s: look for a loop that never ends."
