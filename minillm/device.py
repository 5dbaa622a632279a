"""Choosing where and in which precision to run, and saying in one sentence when it cannot be done."""

import torch

from minillm.errors import MinillmError, UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pick_device(name: str | torch.device | None = None) -> torch.device:
    """The device called `name`; by default CUDA where there is one, else the CPU. Apple's mps is accepted and untested.

    Raises `UsageError` for a name that is no device, `MinillmError` for a device that this machine lacks.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"Unknown device {name!r}: choose cpu, cuda (or cuda:1, ...) or mps.") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
            raise MinillmError(
                f"No CUDA device can be used here (this PyTorch is built for {build}): use --device cpu, or see minillm doctor."
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise MinillmError(f"There is no {device}: this machine has {torch.cuda.device_count()} CUDA device(s).")
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            raise MinillmError("No Apple GPU can be used here: use --device cpu.")
    elif device.type not in ("cpu", "meta"):
        raise UsageError(f"Device {name!r} is not supported: choose cpu, cuda or mps.")
    return device


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that was asked of it. A CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def pick_dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype called `name` (fp32, bf16 or fp16); by default 16 bits on CUDA and float32 elsewhere.

    bfloat16 needs compute capability 8.0: older GPUs only emulate it, at a fraction of the speed, so it is refused there.
    Raises `UsageError` for an unknown name, `MinillmError` for a dtype that the device lacks.
    """
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if name is None:
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if has_bf16 else torch.float16
    dtype = DTYPES.get(name) if isinstance(name, str) else name
    if dtype not in DTYPE_NAMES:
        raise UsageError(f"Unknown dtype {name!r}: choose {', '.join(DTYPES)}.")
    if dtype == torch.bfloat16 and not has_bf16:
        raise MinillmError(f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic: use --dtype fp16.")
    return dtype
