"""What a learner's file may not do while it is graded: read the answers, write outside its folder, reach others.

Two fences stand one behind the other. An audit hook sees what Python does and refuses it in a sentence; code that goes round
Python, through ctypes, goes round the hook. So on Linux the kernel itself (Landlock: Linux 5.13, network 6.7, signals 6.12)
closes all files to writing but those of the learner's folder, and the network and signals to other processes. Where there is no
Landlock, and for what it cannot close (reading, a bomb of processes), grade strangers' files in a container.
"""

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANSWERS = ("solution.py", "mutants.py", "test_exercise.py")

_NEVER = (
    "os.fork", "os.forkpty", "os.system", "os.posix_spawn", "os.exec", "os.kill", "os.killpg", "subprocess.Popen",
    "os.link", "os.symlink", "os.chmod", "os.chown", "os.setxattr", "sqlite3.connect", "resource.setrlimit", "resource.prlimit",
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg",
)  # fmt: skip
_CHANGES = ("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.truncate", "os.utime")  # and `open` for writing
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def confine(folder: str, exercises: str) -> None:
    """Close this process off for good. It may write in `folder`, unless the answers lie there.

    `exercises` is the folder with the answers of all chapters: links to them are closed, too.
    """
    own = None if any(os.path.exists(os.path.join(folder, name)) for name in ANSWERS) else os.path.realpath(folder)
    found = [path.stat() for name in ANSWERS for path in Path(exercises).glob(f"*/{name}")]
    answers = frozenset((status.st_dev, status.st_ino) for status in found)
    if sys.platform == "linux":
        _landlock(own)
    sys.addaudithook(_hook(own, answers))


def is_answer(path: Any, answers: frozenset[tuple[int, int]]) -> bool:
    """Whether a file is one of the answers: by its name, compiled or not, or as a link to one of them."""
    names = {os.path.basename(os.fsdecode(name)) for name in (path, os.path.realpath(path))}
    if any(name in ANSWERS or name.partition(".")[0] + ".py" in ANSWERS for name in names):
        return True
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return False
    return (status.st_dev, status.st_ino) in answers


def _hook(own: str | None, answers: frozenset[tuple[int, int]]) -> Callable[[str, tuple[Any, ...]], None]:
    def is_own(path: Any) -> bool:
        place = os.path.realpath(os.fsdecode(path))
        return place == os.devnull or (own is not None and place.startswith(own + os.sep))

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in _NEVER:
            raise PermissionError(f"{event} is not for an exercise")
        if event == "open" and not isinstance(args[0], int):
            if is_answer(args[0], answers):
                raise PermissionError("the answers are closed while an exercise is graded")
            if args[2] & _WRITES and not is_own(args[0]):
                raise PermissionError("an exercise may not write files")
        if event in _CHANGES and not all(is_own(path) for path in args if isinstance(path, (str, bytes, os.PathLike))):
            raise PermissionError("an exercise may not change files")

    return refuse


# --- Landlock (https://docs.kernel.org/userspace-api/landlock.html): three system calls, which glibc has no names for

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every processor
_PR_SET_NO_NEW_PRIVS = 38
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))  # remove and make files, folders, links, devices
_REFER, _DEVICE_CONTROL = 1 << 13, 1 << 15  # link and rename between folders; ioctl
# Each version of Landlock knows rights that the ones before it did not, and refuses those that it does not know.
_RIGHTS_SINCE = ((1, _WRITE_FILE | _CHANGE_FOLDER), (2, _REFER), (3, _TRUNCATE), (5, _DEVICE_CONTROL))
_TCP_SINCE, _BIND_AND_CONNECT = 4, 3
_SCOPES_SINCE, _ABSTRACT_SOCKETS_AND_SIGNALS = 6, 3


def _landlock(own: str | None) -> None:
    """Let the kernel refuse every write outside `own`, TCP, and signals to others. Does nothing where it cannot."""
    libc = ctypes.CDLL(None)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return
    rights = sum(bits for since, bits in _RIGHTS_SINCE if version >= since)
    handled = [rights]
    if version >= _TCP_SINCE:
        handled.append(_BIND_AND_CONNECT)
    if version >= _SCOPES_SINCE:
        handled.append(_ABSTRACT_SOCKETS_AND_SIGNALS)
    attributes = struct.pack(f"={len(handled)}Q", *handled)
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if rules < 0:
        return
    allowed = [(os.devnull, rights & (_WRITE_FILE | _TRUNCATE)), *([(own, rights)] if own else [])]
    for path, access in allowed:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", access, descriptor)
            libc.syscall(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint32(0))
            os.close(descriptor)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    os.close(rules)
