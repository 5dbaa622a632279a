"""The learner's file in a process of its own: starting it, calling it, and ending it when it loops, crashes or grows.

What runs in that process is worker.py. The grader waits for it no longer than the time limit of the exercise.
"""

import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import minillm
from minillm.grading import wire
from minillm.grading.channel import TIME_LIMIT, Channel, Remote, TimeUp, alarm, brief, endless
from minillm.grading.errors import NotGraded, Wrong
from minillm.grading.worker import STILL_RUNNING

_PATIENCE = 2.0  # seconds for a process that has hung up to be gone
_START_SECONDS = 120.0  # for Python and PyTorch to start, from a cold disk
_CAN_FORK = sys.platform == "linux"
_WORK = 4.0  # time limits of an exercise that the grader itself may work on the calls of the learner's code
_MAX_CALL = 1 << 14  # bytes of such a call: some thousand tokens, so that no call is much work


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
        """The socket to a new process, confined and waiting, and the process: its id if the server forked it.

        Raises `NotGraded` when there can be none.
        """
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
    """`python -m minillm.grading.worker`, quiet, on one thread, in a process group of its own; Triton interprets there."""
    root = str(Path(minillm.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-m", "minillm.grading.worker", *args],
        env={
            **os.environ,
            **single,
            "PYTHONPATH": paths,
            "PYTHONSAFEPATH": "1",
            "MINILLM_GRADING_TOKEN": token,
            "TRITON_INTERPRET": "1",
        },
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
            if wire.receive_exactly(sock, len(token)).decode(errors="replace") == token:
                return sock, process
        except (OSError, EOFError):
            pass
    process.kill()
    process.wait()
    raise NotGraded("not graded, because a process for the learner's code could not be started.")


def _kill(pid: int) -> None:
    """Kill a process and its group; the process alone where there are no groups. One that is gone already is no error."""
    kill, number = (os.killpg, signal.SIGKILL) if hasattr(os, "killpg") else (os.kill, signal.SIGTERM)
    with contextlib.suppress(OSError):
        kill(pid, number)


class ProcessChannel(Channel):
    """The learner's file in a process of its own. Use it in a `with` statement.

    It lasts no longer than five times the time limit: once for the learner's code, and four times for what that asks of the
    grader. `exercises` is the folder whose answers are closed to it.
    """

    def __init__(self, workers: Workers, path: Path, exercises: Path, time_limit: float = TIME_LIMIT) -> None:
        super().__init__()
        self._workers, self._path, self._exercises, self._time_limit = workers, path, exercises, time_limit
        self._waited = self._worked = 0.0  # seconds for the learner's code, and on its calls
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
            request = {"do": "load", "path": str(self._path), "exercises": str(self._exercises)}
            reply = self._ask(request, f"{name}, imported,")
        except Wrong as error:
            raise NotGraded(f"not graded, because of this: {error}", whole_file=True) from None
        if "returned" in reply:
            return
        raised = reply.get("raised")
        kinds = [str(kind)[:60] for kind in raised] if isinstance(raised, list) and raised else ["an error"]
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
        try:
            while True:
                began = time.monotonic()
                deadline = began + self._time_limit - self._waited
                self._sock.settimeout(max(deadline - began, 1e-3))
                wire.send(self._sock, message)
                reply = wire.receive(self._sock, deadline)
                self._waited += time.monotonic() - began
                if not reply[4:].startswith(b'{"callback"'):
                    return reply
                message = self._answer(reply, label)
                if self._stopped is not None:
                    return b""
        except TimeoutError:
            self._end(impatient=True)
            raise Wrong(endless(label, self._time_limit)) from None
        except (EOFError, OSError):
            raise Wrong(_how_it_ended(label, self._end(impatient=False))) from None

    def _answer(self, call: bytes, label: str) -> bytes:
        """What a function of the grader's gives that the learner's code called. Its time has a limit of its own."""
        if len(call) > _MAX_CALL:
            raise Wrong(
                f"{label} gives a function that it calls {len(call):,} bytes: that is more than any right answer does."
            )
        began, limit = time.monotonic(), _WORK * self._time_limit
        try:
            with alarm(max(limit - self._worked, 1e-3)):
                return self.answer_callback(call)
        except TimeUp:
            raise Wrong(
                f"{label} keeps the grader at work for more than {limit:g} s: look for calls without an end."
            ) from None
        finally:
            self._worked += time.monotonic() - began

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
