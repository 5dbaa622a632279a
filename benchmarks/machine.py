"""What a result needs to be understood later: the machine, the versions and the commit. `python machine.py FILE` writes it."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from minillm.device import pick_device
from minillm.roofline.ceilings import device_name

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "llama_cpp_python", "numpy", "tokenizers", "gguf")
MEASURED_CODE = ("minillm", "benchmarks/*.py", "benchmarks/*.sh")


def describe(device: torch.device) -> dict[str, Any]:
    """Machine, versions, commit and date, as they stand when this is called."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        # Only the code that is measured counts: an unfinished chapter beside it changes no figure.
        "dirty": bool(_git("status", "--porcelain", "--", *MEASURED_CODE)),
        "machine": {
            "device": device_name(device),
            "processor": device_name(torch.device("cpu")),
            "cores": usable_cores(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
            "load_average": list(os.getloadavg()),
        },
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **_versions()},
    }


def usable_cores() -> int:
    """Cores that this process may run on, which may be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Neighbours:
    """How many cores other processes kept busy since this was made. On a shared machine, a figure is worth what this says."""

    def __init__(self) -> None:
        self._start = self._read()

    def busy_cores(self) -> float | None:
        """None where the system does not tell (it does on Linux)."""
        now = self._read()
        if now is None or self._start is None:
            return None
        (wall, everyone, we), (wall_0, everyone_0, we_0) = now, self._start
        return max(0.0, (everyone - everyone_0) - (we - we_0)) / (wall - wall_0)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _idle, _waiting, irq, soft_irq, stolen = map(int, fields)
        ticks = user + nice + system + irq + soft_irq + stolen
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


def worst(*cores: float | None) -> float | None:
    """The most that others kept busy, in several rounds; None where the system told of none."""
    return max((n for n in cores if n is not None), default=None)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}  # with its build, as in +cpu


def _git(*arguments: str) -> str | None:
    """What git says, or None where the sources are no git checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(describe(pick_device(*sys.argv[2:3])), indent=2) + "\n")
