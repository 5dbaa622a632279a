"""The learner's side: a process that loads one file and answers calls of what the file defines.

It is started as `python -m minillm.grading.worker`, in one of two ways. On Linux a *fork server* imports PyTorch once and then
forks a process for each exercise, in milliseconds; elsewhere a process is started for each. Either way an endless loop, a
crash or a huge allocation ends that process, and nothing else.
"""

import contextlib
import io
import os
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch

from minillm.grading import wire

MEMORY_LIMIT = 2 << 30  # bytes beyond what Python and PyTorch take
STILL_RUNNING = 1_000
CPU_SECONDS = 300  # the grader's own limit comes first; this one ends what a dead grader left behind
_FORBIDDEN = (
    "os.fork",
    "os.forkpty",
    "os.system",
    "os.posix_spawn",
    "os.exec",
    "os.kill",
    "os.killpg",
    "subprocess.Popen",
)


class Host:
    """Holds the learner's functions and objects by number, and answers the grader's messages.

    `ask_back` carries a message to the grader and brings its answer: that is how the learner's code calls a function of the
    grader's, such as a model.
    """

    def __init__(self, ask_back: Callable[[bytes], bytes], confined: bool = False) -> None:
        self._ask_back = ask_back
        self._confined = confined
        self._objects: list[Any] = []
        self._callbacks: dict[int, Callable[..., Any]] = {}
        self._path = ""
        self._module: types.ModuleType | None = None
        self._printed = _Counter()

    def handle(self, message: bytes) -> bytes:
        request = wire.unpack(message, self._resolve)
        self._printed.count = 0
        try:
            with contextlib.redirect_stdout(self._printed), contextlib.redirect_stderr(self._printed):
                reply = self._perform(request)
            reply["printed"] = self._printed.count
            return self._pack(reply)
        except BaseException as error:  # also sys.exit, and a result that cannot be written
            return self._pack(self._describe(error) | {"printed": self._printed.count})

    def add(self, value: Any) -> dict[str, Any]:
        """A reference by which the grader can call `value`."""
        number = next((i for i, known in enumerate(self._objects) if known is value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return {"object": number, "type": type(value).__name__}

    def _perform(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "load":
            self._load(request["path"])
            return {"returned": None}
        if request["do"] == "get":
            return {"found": getattr(self._module, request["name"], None)}
        target, method, args = request["target"], request["method"], request["args"]
        if method is not None:
            target = getattr(target, method)
        before = self._pack({"args": args})
        result = target(*args)
        if self._pack({"args": args}) != before:
            return {"mutated": None}
        return {"returned": result}

    def _load(self, path: str) -> None:
        self._path = path
        module = types.ModuleType("exercise")
        module.__file__ = path
        sys.modules["exercise"] = module
        sys.path.insert(0, os.path.dirname(path))
        with open(path, "rb") as file:
            source = file.read()
        if self._confined:
            sys.addaudithook(_hide_answers)
        exec(compile(source, path, "exec"), module.__dict__)
        self._module = module

    def _describe(self, error: BaseException) -> dict[str, Any]:
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == self._path else None
        for frame, number in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == self._path:
                line = number
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"raised": kinds, "message": str(message)[:2000], "line": line}

    def _pack(self, message: dict[str, Any]) -> bytes:
        return wire.pack(message, self._special)

    def _special(self, value: Any) -> dict[str, Any]:
        for number, function in self._callbacks.items():
            if function is value:
                return {"callback": number}
        return self.add(value)

    def _resolve(self, value: dict[str, Any]) -> Any:
        if "object" in value:
            return self._objects[value["object"]]
        number = value["callback"]
        return self._callbacks.setdefault(number, lambda *args: self._call_back(number, args))

    def _call_back(self, number: int, args: tuple[Any, ...]) -> Any:
        answer = self._ask_back(self._pack({"callback": number, "args": list(args)}))
        return wire.unpack(answer, self._resolve)["answer"]


class _Counter(io.TextIOBase):
    """Stands in for standard output: counts the characters and keeps none."""

    count = 0

    def write(self, text: str) -> int:
        self.count += len(text)
        return len(text)


# --- the process


def serve(sock: socket.socket) -> None:
    """Answer the grader until it hangs up."""

    def ask_back(message: bytes) -> bytes:
        wire.send(sock, message)
        return wire.receive(sock)

    host = Host(ask_back, confined=True)
    with contextlib.suppress(EOFError, OSError):
        while True:
            wire.send(sock, host.handle(wire.receive(sock)))


def _confine() -> None:
    """Limit this process: memory, processor time, no output, no processes of its own."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_LIMIT
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_refuse)


def _refuse(event: str, _args: tuple[Any, ...]) -> None:
    if event in _FORBIDDEN:
        raise RuntimeError(f"{event} is not for an exercise")


def _hide_answers(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and os.path.basename(str(args[0])) in ("solution.py", "mutants.py", "test_exercise.py"):
        raise RuntimeError("the answers are closed while an exercise is graded")


def _fork_server(control: socket.socket) -> None:
    """Fork a process on request and hand it the socket that came along; tell how a process ended."""
    while True:
        request, descriptors, _flags, _address = socket.recv_fds(control, 64, 1)
        if not request:
            return
        if descriptors:
            pid = os.fork()
            if pid == 0:
                control.close()
                os.setsid()
                _confine()
                serve(socket.socket(fileno=descriptors[0]))
                os._exit(0)
            os.close(descriptors[0])
            control.sendall(struct.pack("=q", pid))
        else:
            pid, patience = struct.unpack("=qd", request)
            control.sendall(struct.pack("=q", _exit_code(pid, patience)))


def _exit_code(pid: int, patience: float) -> int:
    """How a process ended (negative: the signal that ended it); STILL_RUNNING if it has not within `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # the child of an earlier server
            break
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return STILL_RUNNING


def main(argv: list[str]) -> None:
    if argv[0] == "fork":
        import minillm.stages  # noqa: F401  warm, for what the learner's file imports

        _fork_server(socket.socket(fileno=int(argv[1])))
    else:
        sock = socket.create_connection(("127.0.0.1", int(argv[1])))
        sock.sendall(os.environ.pop("MINILLM_GRADING_TOKEN").encode())
        _confine()
        serve(sock)


if __name__ == "__main__":
    main(sys.argv[1:])
