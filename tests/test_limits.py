"""What a process may use: read from control groups that are made for it, and from this machine."""

import os
from pathlib import Path

import pytest

from minillm import limits


def control_groups(folder: Path, membership: str, files: dict[str, str]) -> limits.Roots:
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        path = folder / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "mounted", folder / "membership"


@pytest.mark.parametrize(
    ("membership", "files", "quotas"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, [1.5]),
        ("0::/\n", {"cpu.max": "max 100000\n"}, []),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000", "cpu.max": "50000 100000"}, [4, 0.5]),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, [2]),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        # A container sees its own group as the root, and is told the path that the host knows.
        ("4:cpu:/docker/12\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, [1]),
        ("4:memory:/\n", {"memory/cpu.max": "100000 100000"}, []),
        ("0::/\n", {"cpu.max": ""}, []),
    ],
)
def test_quotas_of_control_groups(tmp_path: Path, membership: str, files: dict[str, str], quotas: list[float]) -> None:
    assert limits.cpu_quotas(control_groups(tmp_path, membership, files)) == quotas


@pytest.mark.parametrize(
    ("membership", "files", "granted"),
    [
        ("0::/\n", {"memory.max": "8000\n", "memory.current": "3000\n"}, [5000]),
        (
            "0::/\n",
            {"memory.max": "8000\n", "memory.current": "3000\n", "memory.stat": "anon 9\ninactive_file 2000\n"},
            [7000],
        ),
        ("0::/\n", {"memory.max": "8000\n", "memory.current": "3000\n", "memory.stat": "inactive_file 4000\n"}, [8000]),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "3000\n"}, []),
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "3000\n"}, [0]),
        ("5:memory:/x\n", {"memory/x/memory.limit_in_bytes": "90", "memory/x/memory.usage_in_bytes": "40"}, [50]),
        (
            "5:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "90",
                "memory/memory.usage_in_bytes": "40",
                "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 30\n",  # its own, and with the groups in it
            },
            [80],
        ),
    ],
)
def test_memory_that_control_groups_grant(
    tmp_path: Path, membership: str, files: dict[str, str], granted: list[int]
) -> None:
    assert limits.memory_limits(control_groups(tmp_path, membership, files)) == granted


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    roots = (tmp_path, tmp_path / "absent")
    assert limits.cpu_quotas(roots) == limits.memory_limits(roots) == []


def test_the_smallest_of_affinity_and_quotas_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    for quotas, cores in [([], 6), ([1.5, 4], 2), ([64], 6)]:
        monkeypatch.setattr(limits, "cpu_quotas", lambda quotas=quotas: quotas)
        assert limits.allotted_cores() == cores


def test_free_memory_is_what_system_and_control_groups_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    free = limits.free_memory()
    assert free is not None and free > 10**8
    monkeypatch.setattr(limits, "memory_limits", lambda: [12_345])
    assert limits.free_memory() == 12_345
