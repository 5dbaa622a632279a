"""What this machine has: plain facts, found out without changing anything. checks.py and gpu_checks.py say what they mean."""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minillm.config import known_model
from minillm.cpu import processor_name
from minillm.device import DTYPE_NAMES, pick_dtype
from minillm.download import MODEL_FILE, cache_folder, is_intact
from minillm.errors import MinillmError
from minillm.limits import allotted_cores, free_memory
from minillm.stages import STAGES
from minillm.weights import random_model

NOTEBOOK_PACKAGES = {"jupyterlab": "jupyter", "ipykernel": "jupyter", "jupytext": "jupytext", "nbval": "nbval"}


@dataclass(frozen=True)
class Processor:
    """The CPU, or one GPU that PyTorch can use. Memory is in bytes. `capability` is (0, 0) for a CPU."""

    device: str
    name: str
    capability: tuple[int, int]
    memory: int | None  # that is free, None where nobody says
    dtype: str  # the default one
    refused: dict[str, str] = field(default_factory=dict)  # stages that it cannot run in it, each with the reason


@dataclass(frozen=True)
class Machine:
    """All that a check looks at."""

    system: str  # as sys.platform has it: linux, darwin, win32
    python: tuple[int, int, int]
    executable: str
    in_environment: bool
    torch: str
    cuda_build: str | None  # the CUDA version that PyTorch was built for
    cuda_archs: tuple[str, ...]  # what its kernels were compiled for, such as sm_75
    nvidia_card: bool
    driver: str | None
    driver_cuda: tuple[int, int] | None  # the newest CUDA that the driver serves
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES
    apple_gpu: bool
    cpu: Processor
    gpus: tuple[Processor, ...]
    cores: int  # in the machine
    allotted: int  # of these, what this process may use
    threads: int  # that PyTorch works with
    load: float  # cores that all programs together kept busy over the last minute
    notebook_packages: tuple[str, ...]  # that are missing
    kernel: str | None  # the Python that Jupyter's kernel "python3" starts
    compiler: str | None
    python_headers: bool
    triton: str | None
    model: Path
    model_found: bool
    model_intact: bool
    folder: Path  # the part of the cache folder's path that is there
    folder_writable: bool
    disk_free: int

    @property
    def pip(self) -> str:
        """The command that installs packages here, and nowhere else."""
        return f"{self.executable} -m pip install"


def look() -> Machine:
    """This machine. Takes a second or two: the model's checksum is computed, and each stage is asked on each GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own about old drivers and old GPUs, which the checks put better
        return _look()


def _look() -> Machine:
    has_cuda = torch.cuda.is_available()
    driver = _driver()
    driver_cuda = _driver_cuda()
    model = cache_folder() / MODEL_FILE
    folder = next(parent for parent in model.parents if parent.exists())
    return Machine(
        system=sys.platform,
        python=sys.version_info[:3],
        executable=sys.executable,
        in_environment=sys.prefix != sys.base_prefix,
        torch=torch.__version__,
        cuda_build=torch.version.cuda,
        cuda_archs=tuple(torch.cuda.get_arch_list()) if has_cuda else (),
        nvidia_card=has_cuda or driver is not None or driver_cuda is not None or has_nvidia_card(),
        driver=driver,
        driver_cuda=driver_cuda,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        apple_gpu=torch.backends.mps.is_available(),
        cpu=Processor("cpu", processor_name(), (0, 0), free_memory(), "fp32"),
        gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())) if has_cuda else (),
        cores=os.cpu_count() or 1,
        allotted=allotted_cores(),
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        notebook_packages=tuple(name for name in NOTEBOOK_PACKAGES if importlib.util.find_spec(name) is None),
        kernel=_kernel(),
        compiler=_compiler(),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        triton=_version("triton"),
        model=model,
        model_found=model.exists(),
        model_intact=is_intact(model),
        folder=folder,
        folder_writable=folder.is_dir() and os.access(folder, os.W_OK | os.X_OK),
        disk_free=shutil.disk_usage(folder).free,
    )


# --- The GPU and its driver


def _gpu(index: int) -> Processor:
    device = torch.device("cuda", index)
    return Processor(
        device=str(device),
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        memory=torch.cuda.mem_get_info(device)[0],
        dtype=DTYPE_NAMES[pick_dtype(None, device)],
        refused=refused_stages(device),
    )


def refused_stages(device: torch.device) -> dict[str, str]:
    """Stages that cannot run on a device in its default dtype, with what they say: each is asked with a tiny random model."""
    try:
        model = random_model(known_model("tiny"), device=device, dtype=pick_dtype(None, device))
    except RuntimeError as error:  # a GPU that this PyTorch has no kernels for
        return dict.fromkeys(STAGES, str(error).splitlines()[0])
    refused = {}
    for name, stage in STAGES.items():
        try:
            stage.prepared(model)
        except (MinillmError, RuntimeError) as error:
            refused[name] = str(error).splitlines()[0]
    return refused


def _driver() -> str | None:
    """The version of the loaded NVIDIA driver. Linux keeps it in a file; elsewhere nvidia-smi is asked."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        command = shutil.which("nvidia-smi")
        if command is None:
            return None
        try:
            query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
            text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
    return driver_version(text)


def driver_version(text: str) -> str | None:
    """The first thing in a text that looks like a version of NVIDIA's driver, such as 535.104.05."""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else None


def _driver_cuda() -> tuple[int, int] | None:
    """What the driver's own library says: it knows without a GPU, and without PyTorch being built for it."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        number = ctypes.c_int()
        failed = library.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed or not number.value else (number.value // 1000, number.value % 1000 // 10)


def has_nvidia_card(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether Linux sees a display controller (PCI class 03) of NVIDIA (vendor 10de), driver or not."""
    for device in devices.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        if vendor.startswith("0x10de") and kind.startswith("0x03"):
            return True
    return False


# --- Notebooks and compilers


def _kernel() -> str | None:
    """The Python of Jupyter's kernel "python3", as Jupyter would start it."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        return None
    try:
        command = KernelSpecManager().get_kernel_spec("python3").argv
    except (NoSuchKernel, OSError, json.JSONDecodeError):
        return None
    # A bare name stands for the Python that Jupyter itself runs in.
    return sys.executable if not command or Path(command[0]).name == command[0] else command[0]


def _compiler() -> str | None:
    """The C++ compiler that PyTorch's own compiler would call."""
    names = [os.environ.get("CXX"), "g++", "clang++"] if sys.platform != "win32" else [os.environ.get("CXX"), "cl"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
