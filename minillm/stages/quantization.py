"""Chapter 5. Quantization: fewer bytes a weight, so that a step that waits for weights waits less.

Decode of one sequence reads every weight once and does 2 FLOPs with it. With b bytes a weight its intensity is 2 / b:

    fp32 0.5    bf16 1    int8 2    int4, groups of g   2 / (1/2 + 4/g), which is 3.2 at g = 32

*Weight-only* schemes (int8, int4) multiply in 16 bits: the workload moves right on the roofline and the roof stays where it
was. Schemes that quantize activations too (w8a8, fp8) multiply in 8 bits, which raises the roof. Neither helps attention.

    quantize(model, scheme)   a new model that any stage runs: linear layers are replaced from outside, the rest is shared
    quantizers.py             numbers to codes and back, and the law of their error
    quantized_linear.py       the layers, readable and fast
    quantized_cache.py        the same for keys and values

Embedding and norms stay as they are: of the one a row is read, the others are small. A *tied* head is the embedding read as a
matrix, a fifth of SmolLM2-135M. It is quantized like any other layer, from a copy: the embedding keeps its precision.
"""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn

from minillm.device import DTYPE_NAMES
from minillm.errors import MinillmError, UsageError
from minillm.latent_config import LatentConfig
from minillm.model import Transformer
from minillm.stages.quantized_linear import (
    FastFP8Linear,
    FastInt4Linear,
    FastInt8Linear,
    FastW8A8Linear,
    FP8Linear,
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    W8A8Linear,
    over_the_same_memory,
)

SCHEMES = ("int8", "int4", "w8a8", "fp8")
GROUP_SIZES = (32, 64, 128)  # of int4: what the kernels take
_CAPABILITY = {"int8": (8, 0), "int4": (8, 0), "w8a8": (7, 5), "fp8": (8, 9)}  # that a scheme's kernel asks of a GPU
_LARGEST = 2.0**120  # no weight is larger, and differences of two such numbers are still finite


def quantize(
    model: Transformer,
    scheme: str,
    *,
    group_size: int = 32,
    head: str | None = "same",
    readable: bool = False,
) -> Transformer:
    """A new model whose linear layers are quantized, on the same device. The model itself is not changed.

    Embedding and norms are shared with it; activations keep its dtype. `group_size` is int4's. `head` is another scheme for
    the head, None to leave it as it is. `readable` takes the layers that define the values in place of the fast ones. A model
    on the `meta` device gives one on `meta`, for predictions.
    Raises `UsageError` for an unknown scheme, a group that does not divide, a model that is quantized already, has latent
    attention or is of a dtype that the kernels lack; `MinillmError` for a scheme that the device lacks and for weights that are
    not finite.
    """
    head = scheme if head == "same" else head
    schemes = {scheme} | ({head} if head is not None else set())
    _check(model, schemes, readable)
    exchanged: dict[nn.Module, nn.Module] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            chosen = head if layer is model.head else scheme
            if chosen is not None:
                exchanged[layer] = _quantized(name, layer, chosen, group_size, readable)
    return with_layers(model, exchanged)


def with_layers(model: Transformer, exchanged: Mapping[nn.Module, nn.Module]) -> Transformer:
    """A copy of a model in which some layers stand for others. Config and weights are shared with it."""
    # What deepcopy finds in its memo by identity it takes from there: so weights are shared and layers exchanged.
    memo: dict[int, object] = {id(model.config): model.config}
    memo |= {id(p): over_the_same_memory(p) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    memo |= {id(layer): new for layer, new in exchanged.items()}
    return copy.deepcopy(model, memo)


def _check(model: Transformer, schemes: set[str], readable: bool) -> None:
    for scheme in schemes:
        if scheme not in SCHEMES:
            raise UsageError(f"Unknown scheme {scheme!r}: choose one of {', '.join(SCHEMES)}.")
        if not readable:  # which needs no kernel
            _check_device(scheme, model.device)
    if any(isinstance(layer, QuantizedLinear) for layer in model.modules()):
        raise UsageError(f"{model.config.name} is quantized already: quantize the model that it was made from.")
    if isinstance(model.config, LatentConfig):  # its cache multiplies by W_UK and W_UV, and wants them as numbers
        raise UsageError(
            f"{model.config.name} has latent attention, which is not quantized here: run it as it is, by stages.mla."
        )
    if model.dtype not in (torch.float32, torch.bfloat16) and not (readable and model.dtype is torch.float16):
        name = DTYPE_NAMES.get(model.dtype, str(model.dtype).removeprefix("torch."))
        raise UsageError(
            f"{model.config.name} is in {name}, and the kernels take fp32 and bf16: choose one of these (--dtype fp32)."
        )


def _check_device(scheme: str, device: torch.device) -> None:
    if device.type == "cuda":
        needed, found = _CAPABILITY[scheme], torch.cuda.get_device_capability(device)
        if found < needed:
            raise MinillmError(
                f"{scheme} needs a GPU of compute capability {needed[0]}.{needed[1]} and this one has {found[0]}.{found[1]}: "
                "choose another scheme or --device cpu."
            )
    elif device.type not in ("cpu", "meta"):
        raise MinillmError(f"{scheme} has no kernel on {device.type}: use cpu or cuda.")


def _quantized(name: str, linear: nn.Linear, scheme: str, group_size: int, readable: bool) -> QuantizedLinear:
    weight, K = linear.weight, linear.in_features
    if not weight.is_meta and not weight.abs().amax() < _LARGEST:  # which NaN is not either
        raise MinillmError(f"{name} holds a weight that is NaN, infinite or beyond 2^120: fetch the model again.")
    if scheme == "int4":
        if group_size not in GROUP_SIZES:
            raise UsageError(f"The group size is {group_size!r}; choose {', '.join(map(str, GROUP_SIZES))}.")
        if K % group_size:
            raise UsageError(f"Groups of {group_size} do not divide the {K} columns of {name}: choose a smaller group.")
        return (Int4Linear if readable else FastInt4Linear)(linear, group_size)
    slow, fast, divisor = _LAYERS[scheme]
    shape_fits = K % divisor == 0 and (scheme != "fp8" or linear.out_features % divisor == 0)
    if readable or not shape_fits or (scheme == "fp8" and weight.is_cpu):
        return slow(linear)
    return fast(linear)


# For each scheme the readable layer, the fast one, and what the latter wants K to be divisible by.
_LAYERS: dict[str, tuple[Callable[[nn.Linear], QuantizedLinear], Callable[[nn.Linear], QuantizedLinear], int]] = {
    "int8": (Int8Linear, FastInt8Linear, 16),
    "w8a8": (W8A8Linear, FastW8A8Linear, 8),
    "fp8": (FP8Linear, FastFP8Linear, 16),
}


def has_speed(scheme: str, device: torch.device) -> bool:
    """Whether the time of a scheme on a device means anything. fp8 on the CPU shows its numbers and has no speed to show."""
    return not (scheme == "fp8" and device.type == "cpu")


def weight_bytes(model: Transformer) -> int:
    """Bytes of all weights of a model, quantized or not: each tensor once, codes with their scales and zeros."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def streamed_bytes(model: Transformer) -> int:
    """Bytes of weights that a decode step reads: all but an embedding that is not the head too, of which one row is read."""
    tied = getattr(model.head, "weight", None) is model.embed.weight
    return weight_bytes(model) - (0 if tied else model.embed.weight.nbytes)
