"""The grader's side: what a grader calls instead of the learner's function, and the way there.

A grader gets a `Remote` for each thing it needs from the learner's file and calls it like the thing itself. Arguments travel to
the learner's process, the result travels back as plain values (see wire.py), and whatever goes wrong there arrives as one of
the sentences of errors.py. In a notebook the learner's code stands in the same process: a `LocalChannel` takes the same road,
without the protection.
"""

import contextlib
import os
import reprlib
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import minillm
from minillm.grading import wire
from minillm.grading.errors import NotGraded, NotWritten, Wrong
from minillm.grading.worker import STILL_RUNNING, Host

TIME_LIMIT = 30.0  # seconds that an exercise may keep the grader waiting, all calls together
_PATIENCE = 2.0  # seconds for a process that has hung up to be gone
_START_SECONDS = 120.0  # for Python and PyTorch to start, from a cold disk
_CAN_FORK = sys.platform == "linux"


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

    def call(self, remote: Remote, args: tuple[Any, ...]) -> Any:
        label = f"{remote._label}({', '.join(map(brief, args))})"
        method = remote._method
        target = Remote(self, remote._number, remote._kind) if method else remote
        reply = self._ask({"do": "call", "target": target, "method": method, "args": list(args)}, label)
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
        kind = str(kinds[0]) if isinstance(kinds, list) and kinds else "an error"
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
            answer = self._callbacks[request["callback"]](*request["args"])
        except Exception as error:
            name = getattr(self._callbacks[0], "__name__", "a function")
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
    if hasattr(value, "n_layers"):
        return str(value.name)
    if callable(value) and not isinstance(value, Remote):
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
        with _alarm(self._time_limit):
            reply = self._host.handle(message)
        if _TimeUp.__name__ in wire.unpack(reply, self._resolve).get("raised", []):
            raise Wrong(_endless(label, self._time_limit))
        return reply


class _TimeUp(BaseException):
    pass


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise _TimeUp

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _endless(label: str, seconds: float) -> str:
    return f"{label} has not returned after {seconds:g} s: look for a loop that never ends."


# --- in a process of its own


class Workers:
    """Starts the learners' processes. One object serves many exercises; `close` ends what it started."""

    def __init__(self, fork: bool = _CAN_FORK) -> None:
        self._fork = fork
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        if fork:
            self._start_server()

    def _start_server(self) -> None:
        self.close()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_START_SECONDS)
        with theirs:
            self._server = _start_python("fork", str(theirs.fileno()), descriptor=theirs.fileno())

    def start(self) -> "tuple[socket.socket, int | subprocess.Popen[bytes]]":
        """A new process, confined and waiting, and the socket to it. Raises `NotGraded` when there can be none."""
        for _ in range(2 if self._fork else 0):  # a learner's process may have ended the server: start it again
            with contextlib.suppress(OSError, struct.error):
                return self._fork_one()
            self._start_server()
        return _start_process()

    def _fork_one(self) -> tuple[socket.socket, int]:
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            (pid,) = struct.unpack("=q", self._control.recv(8))
        except BaseException:
            ours.close()
            raise
        return ours, pid

    def end(self, process: "int | subprocess.Popen[bytes]") -> int:
        """End a process and all it started. Returns its exit code, negative where a signal ended it."""
        if isinstance(process, int):
            code = self._exit_code(process, _PATIENCE)
            _kill(process)
            return code if code != STILL_RUNNING else self._exit_code(process, _PATIENCE)
        try:
            return process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return -signal.SIGTERM
        finally:
            _kill(process.pid)
            process.kill()
            process.wait()

    def _exit_code(self, pid: int, patience: float) -> int:
        try:
            assert self._control is not None
            self._control.sendall(struct.pack("=qd", pid, patience))
            return int(struct.unpack("=q", self._control.recv(8))[0])
        except (OSError, struct.error):
            return STILL_RUNNING

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._control = self._server = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_python(*args: str, descriptor: int | None = None, token: str = "") -> "subprocess.Popen[bytes]":
    """`python -m minillm.grading.worker`, quiet, on one thread, in a process group of its own."""
    root = str(Path(minillm.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-m", "minillm.grading.worker", *args],
        env={**os.environ, **single, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "MINILLM_GRADING_TOKEN": token},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=() if descriptor is None else (descriptor,),
        start_new_session=True,
    )


def _start_process() -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    token = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = _start_python("connect", str(listener.getsockname()[1]), token=token)
        listener.settimeout(_START_SECONDS)
        try:
            sock, _address = listener.accept()
            sock.settimeout(10)
            if wire._receive_exactly(sock, len(token), None).decode(errors="replace") == token:
                return sock, process
        except (OSError, EOFError):
            pass
    process.kill()
    process.wait()
    raise NotGraded("not graded, because a process for the learner's code could not be started.")


def _kill(pid: int) -> None:
    kill, number = (os.killpg, signal.SIGKILL) if hasattr(os, "killpg") else (os.kill, signal.SIGTERM)
    with contextlib.suppress(OSError):
        kill(pid, number)


class ProcessChannel(Channel):
    """The learner's file in a process of its own. Use it in a `with` statement."""

    def __init__(self, workers: Workers, path: Path, time_limit: float = TIME_LIMIT) -> None:
        super().__init__()
        self._workers, self._path, self._time_limit, self._waited = workers, path, time_limit, 0.0
        self._sock, self._process = workers.start()
        self._ended = False

    def __enter__(self) -> "ProcessChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        if not self._ended:
            self._end(impatient=False)

    def load(self) -> None:
        """Run the learner's file. Raises `NotGraded`, for the whole file, when that fails."""
        name = self._path.name
        try:
            reply = self._ask({"do": "load", "path": str(self._path)}, f"{name}, imported,")
        except Wrong as error:
            raise NotGraded(f"not graded, because of this: {error}", whole_file=True) from None
        if "returned" in reply:
            return
        kinds = [str(kind) for kind in reply.get("raised", [])] or ["an error"]
        line = f"line {reply['line']} of " if isinstance(reply.get("line"), int) else ""
        message = " ".join(str(reply.get("message")).split())[:200].rstrip(".")
        if "SyntaxError" in kinds:
            reason = f"{line}{name} is not Python: {message}"
        else:
            reason = f"{line}{name} raises {kinds[0]} when it is imported: {message}"
        raise NotGraded(f"not graded, because {reason}.", whole_file=True)

    def get(self, name: str) -> Remote:
        """What the learner's file calls `name`. Raises `Wrong` when nothing there can be called so."""
        found = self._ask({"do": "get", "name": name}, name).get("found")
        if not isinstance(found, Remote):
            has = "defines no" if found is None else f"has {brief(found)} in place of a"
            raise Wrong(f"{self._path.name} {has} function or class {name}: keep the name that the stub had.")
        found._label = name
        return found

    def roundtrip(self, message: bytes, label: str) -> bytes:
        deadline = time.monotonic() + self._time_limit - self._waited
        try:
            wire.send(self._sock, message)
            while True:
                began = time.monotonic()
                reply = wire.receive(self._sock, deadline)
                self._waited += time.monotonic() - began
                if not reply[4:].startswith(b'{"callback"'):
                    return reply
                paused = time.monotonic()
                answer = self.answer_callback(reply)
                if self._stopped is not None:
                    return b""
                wire.send(self._sock, answer)
                deadline += time.monotonic() - paused  # the grader's own work is not the learner's time
        except TimeoutError:
            self._end(impatient=True)
            raise Wrong(_endless(label, self._time_limit)) from None
        except (EOFError, OSError):
            raise Wrong(_how_it_ended(label, self._end(impatient=False))) from None

    def _end(self, impatient: bool) -> int:
        self._ended = True
        if impatient and isinstance(self._process, int):
            _kill(self._process)
        return self._workers.end(self._process)


def _how_it_ended(label: str, code: int) -> str:
    if code >= 0 and code != STILL_RUNNING:
        return f"{label} ends Python (os._exit or the like): return instead."
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else "a signal"
    return f"{label} crashes Python ({name})."
