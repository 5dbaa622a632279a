"""The checks of GPUs: what they run, or why PyTorch cannot use them. Each is a function of what machine.py found."""

import re

from minillm.doctor.finding import Finding
from minillm.doctor.machine import Machine, Processor
from minillm.stages import STAGES

OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}  # for each major version of CUDA (its release notes, table 2)
BUILDS = {12: "cu126", 13: "cu130"}  # of PyTorch 2.11 to 2.13, for each major version of CUDA that a driver serves
# The oldest compute capability that builds for CUDA 13 have kernels for; those for 12.6 go back to 5.0.
FIRST_OF_CUDA_13 = (7, 5)


def no_gpu(m: Machine) -> Finding:
    """Why there is no GPU that PyTorch can use, and what would change that. Everything runs on the CPU meanwhile."""
    if m.apple_gpu:
        return Finding(
            "GPU", "note", "Apple's, which is untested: everything runs on the CPU, unless --device mps is given"
        )
    if not m.nvidia_card:
        return Finding("GPU", "ok", "no NVIDIA card: everything runs on the CPU")
    if m.driver is None and m.driver_cuda is None:
        oldest = OLDEST_DRIVER[max(OLDEST_DRIVER)]
        mend = f"install it, {oldest} or newer, such as by sudo ubuntu-drivers install, and restart"
        return _unused(f"an NVIDIA card without NVIDIA's driver: {mend}")
    if m.visible_devices in ("", "-1", "NoDevFiles"):
        return _unused(f"CUDA_VISIBLE_DEVICES is {m.visible_devices!r}, which hides it: unset CUDA_VISIBLE_DEVICES")
    driver = f"driver {m.driver}" if m.driver else "the driver"
    if m.driver_cuda is None:
        words = (
            f"{driver} is loaded, and its library libcuda.so.1 is not here: in a container, start that with --gpus all"
        )
        return _unused(f"{words}; else install the driver anew")
    served = m.driver_cuda[0]
    if m.cuda_build is None:
        if served < min(BUILDS):
            return _unused(f"{driver} serves CUDA {served}, too old for PyTorch: {_update(max(OLDEST_DRIVER))}")
        return _unused(f"PyTorch is built for the CPU: {_torch_for(m, min(served, max(BUILDS)))}")
    built = int(m.cuda_build.split(".")[0])
    if served < built:
        words = f"{driver} serves CUDA {served}, too old for a PyTorch built for CUDA {built}: {_update(built)}"
        return _unused(f"{words}, or {_torch_for(m, served)}" if served in BUILDS else words)
    return _unused(f"PyTorch says why: {m.executable} -c 'import torch; torch.cuda.init()'")


def _unused(words: str) -> Finding:
    return Finding("GPU", "note", f"not used: {words}")


def _update(cuda: int) -> str:
    return f"update the driver to {OLDEST_DRIVER[cuda]} or newer" if cuda in OLDEST_DRIVER else "update the driver"


def has_kernels(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether a build has code for a GPU: compiled for its generation (sm_), or to be compiled for it (compute_)."""
    for arch in archs:
        kind, _, digits = arch.partition("_")
        version = divmod(int(re.sub(r"\D", "", digits) or 0), 10)
        same_generation = version[0] == capability[0]
        if version <= capability and (kind == "compute" or same_generation):
            return True
    return not archs


def gpu_stages(m: Machine, gpu: Processor) -> Finding:
    """What a GPU runs by default. A stage that it cannot run is named with the reason that the stage itself gives."""
    found = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if not has_kernels(m.cuda_archs, gpu.capability):
        mend = _torch_for(m, 12 if gpu.capability < FIRST_OF_CUDA_13 else 13)
        return Finding(
            gpu.device, "missing", f"{found}, for which this PyTorch has no kernels: --device cpu, or {mend}"
        )
    dtypes = "bf16 (default), fp16 and fp32" if gpu.dtype == "bf16" else "fp16 (default) and fp32, no bf16"
    if not gpu.refused:
        return Finding(gpu.device, "ok", f"{found}: {dtypes}; every stage")
    reasons = dict.fromkeys(gpu.refused.values())
    left = [name for name in STAGES if name not in gpu.refused]
    words = f"{found}: {dtypes}; stages {', '.join(left)}; not {', '.join(gpu.refused)}: {' '.join(reasons)}"
    # Chapters choose no device: they take the GPU where they see one.
    return Finding(
        gpu.device,
        "note",
        f"{words} Chapters that need them run on the CPU: CUDA_VISIBLE_DEVICES= .venv/bin/jupyter lab",
    )


def _torch_for(m: Machine, cuda: int) -> str:
    """The command that replaces PyTorch by the same version, built for a major version of CUDA."""
    version = m.torch.split("+")[0]
    return f"{m.pip} --force-reinstall torch=={version} --index-url https://download.pytorch.org/whl/{BUILDS[cuda]}"
