"""Cores and memory that this process may use: what a container or a batch system allots of what the machine has."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias


def allotted_cores() -> int:
    """Cores that this process may use: its affinity, or a smaller quota of its control group, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(math.ceil(quota) for quota in cpu_quotas())])


def free_memory() -> int | None:
    """Bytes that this process can still take, None where the system does not say."""
    sizes = []
    try:
        text = Path("/proc/meminfo").read_text()
        sizes.append(int(re.findall(r"MemAvailable:\s*(\d+)", text)[0]) * 1024)
    except (OSError, IndexError):
        if hasattr(os, "sysconf"):  # macOS: all there is
            sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min([*sizes, *memory_limits()], default=None)


Roots: TypeAlias = tuple[Path, Path]  # where control groups are mounted, and the file that names those of this process
ROOTS = (Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))


def cpu_quotas(roots: Roots = ROOTS) -> list[float]:
    """Cores that control groups grant, of version 2 (cpu.max) and of version 1 (cpu.cfs_quota_us)."""
    quotas = []
    for folder in _groups("cpu", roots):
        words = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():  # neither "max" nor -1
            quotas.append(int(words[0]) / int(words[1]))
    return quotas


def memory_limits(roots: Roots = ROOTS) -> list[int]:
    """Bytes that control groups still grant: the limit less what is in use.

    A group counts files that were read as in use, though the system gives up those not looked at lately when memory is short.
    """
    limits = []
    for folder in _groups("memory", roots):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limit and used and limit[0].isdigit():
            statistics = _words(folder / "memory.stat")
            inactive = dict(zip(statistics[::2], statistics[1::2], strict=False))
            files = int(inactive.get("total_inactive_file", inactive.get("inactive_file", 0)))  # of version 1, or of 2
            limits.append(max(0, int(limit[0]) - max(0, int(used[0]) - files)))
    return limits


def _groups(controller: str, roots: Roots) -> Iterator[Path]:
    """The control groups of this process and all above them. In a container its own may be mounted as the root."""
    mounted, membership = roots
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mounted / controller if controllers else mounted
        group = root / path.strip("/")
        yield from [group, *(parent for parent in group.parents if parent.is_relative_to(root))]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
