"""The process that a learner's file runs in, confined, with a `Host` that answers the grader.

It is started as `python -m minillm.grading.worker`, in one of two ways. On Linux a *fork server* imports PyTorch once and then
forks a process for each exercise, in milliseconds; elsewhere a process is started for each. Either way an endless loop, a
crash or a huge allocation ends that process, and nothing else. It ends with the grader, however that ends.
"""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import time

import torch

from minillm.grading import wire
from minillm.grading.host import Host

MEMORY_LIMIT = 2 << 30  # bytes beyond what Python and PyTorch take
STILL_RUNNING = 1_000  # in place of an exit code, which none is
CPU_SECONDS = (
    300  # the grader's own limit comes first; where there is no `_end_with`, this ends what a dead grader left
)
FILE_BYTES = 1 << 26  # of a file that it writes
_PR_SET_PDEATHSIG = 1


def serve(sock: socket.socket) -> None:
    """Answer the grader until it hangs up."""

    def ask_back(message: bytes) -> bytes:
        wire.send(sock, message)
        return wire.receive(sock)

    host = Host(ask_back, confined=True)
    with contextlib.suppress(EOFError, OSError):
        while True:
            wire.send(sock, host.handle(wire.receive(sock)))


def _end_with(parent: int) -> None:
    """Let the kernel (Linux) end this process with its parent. A dead grader hangs up, but code in a loop does not look."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # gone already
            os._exit(1)


def _confine() -> None:
    """Limit this process: memory, processor time, what it writes, no output. Loading a file closes the rest (fence.py)."""
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
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))


def _fork_server(control: socket.socket) -> None:
    """Fork a process on request and hand it the socket that came along; tell how a process ended. Ends with the grader."""
    server = os.getpid()
    while True:
        request, descriptors, _flags, _address = socket.recv_fds(control, 64, 1)
        if not request:
            return
        if descriptors:
            pid = os.fork()
            if pid == 0:
                _end_with(server)
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
        from minillm.roofline.counting import count

        count(lambda: torch.ones(1) + 1)  # the first count in a process imports hundreds of PyTorch's modules
        _fork_server(socket.socket(fileno=int(argv[1])))
    else:
        grader = os.getppid()
        sock = socket.create_connection(("127.0.0.1", int(argv[1])))
        _end_with(grader)
        sock.sendall(os.environ.pop("MINILLM_GRADING_TOKEN").encode())
        _confine()
        serve(sock)


if __name__ == "__main__":
    main(sys.argv[1:])
