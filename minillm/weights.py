"""Putting weights into a `Transformer`: the tensors of a file by name, or random numbers.

A model is built in three steps, so that a wrong file is refused before it costs memory, and no tensor is held twice for longer
than it takes to copy it:

    1. on the `meta` device, which has shapes and no memory;   2. every shape in the file's header is compared with it;
    3. memory is allocated, and each tensor is read into its place.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.model import Transformer


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, known from the header, and a function that reads it into a tensor of that shape."""

    shape: tuple[int, ...]
    read_into: Callable[[Tensor], object]


def named_parts(model: Transformer) -> dict[str, Tensor]:
    """Every tensor of the model by its name in a Hugging Face checkpoint.

    A checkpoint has q, k and v, and gate and up, apart. Their parts here are views into the rows of one weight.
    """
    parts = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    if not model.config.tied_embeddings:
        parts["lm_head.weight"] = model.head.weight
    block: Any  # a ModuleList does not tell the type of what it holds
    for i, block in enumerate(model.blocks):
        attention, mlp = block.attention, block.mlp
        layer = {
            "input_layernorm.weight": block.attention_norm.weight,
            "self_attn.o_proj.weight": attention.o.weight,
            "post_attention_layernorm.weight": block.mlp_norm.weight,
            "mlp.down_proj.weight": mlp.down.weight,
        }
        layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"] = mlp.gate_up.weight.chunk(2)
        rows = [heads * attention.head_dim for heads in attention.heads]
        for kind in ("weight", "bias") if model.config.qkv_bias else ("weight",):
            for name, part in zip("qkv", getattr(attention.qkv, kind).split(rows), strict=True):
                layer[f"self_attn.{name}_proj.{kind}"] = part
        if model.config.qk_norm:
            layer["self_attn.q_norm.weight"] = attention.q_norm.weight
            layer["self_attn.k_norm.weight"] = attention.k_norm.weight
        parts |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return parts


def _check_tensors(parts: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], config: ModelConfig) -> None:
    """Raise `MinillmError` unless the file holds exactly the tensors that the model needs, in their shapes."""
    if missing := parts.keys() - stored.keys():
        raise MinillmError(f"{config.name} lacks {len(missing)} tensors, among them {min(missing)}: fetch it again.")
    # The frequencies of RoPE are computed, and a tied head is the embedding: old checkpoints store them all the same.
    unexpected = {name for name in stored.keys() - parts.keys() if not name.endswith("rotary_emb.inv_freq")}
    if config.tied_embeddings:
        unexpected.discard("lm_head.weight")
    if unexpected:
        raise MinillmError(
            f"{config.name} holds {len(unexpected)} tensors that a {config.architecture} model does not have, among them "
            f"{min(unexpected)[:100]}: it is another kind of model, which is not supported."
        )
    for name, part in parts.items():
        if stored[name].shape != part.shape:
            found, expected = list(stored[name].shape), list(part.shape)
            raise MinillmError(
                f"{config.name}: {name} has shape {found} in the file and {expected} by its configuration."
            )


_INITIALIZERS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _NoInitialization(TorchFunctionMode):
    """Builds layers without their first random values: they would be written over, and take a second on `meta`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func in _INITIALIZERS else func(*args, **(kwargs or {}))


def _meta_model(config: ModelConfig) -> Transformer:
    try:
        with torch.device("meta"), _NoInitialization():
            return Transformer(config)
    except RuntimeError:  # the number of bytes does not fit in 64 bits
        raise MinillmError(f"{config.name} has weights of an impossible size by its configuration.") from None


def empty_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The model with memory and without values."""
    model = _meta_model(config).to(dtype=dtype)
    try:
        model.to_empty(device=device)
    except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is a RuntimeError
        size = config.parameter_count * dtype.itemsize / 1e9
        raise MinillmError(
            f"{config.name} takes {size:.1f} GB, which {device} does not have free: use a smaller model or dtype."
        ) from None
    if config.tied_embeddings:
        model.head.weight = model.embed.weight  # moving a model from the meta device separates them
    return model


def fill_model(
    config: ModelConfig, stored: Mapping[str, StoredTensor], device: torch.device, dtype: torch.dtype
) -> Transformer:
    """A model with the weights of a file. Raises `MinillmError` if they are not those that its configuration asks for."""
    _check_tensors(named_parts(_meta_model(config)), stored, config)
    model = empty_model(config, device, dtype)
    if device.type != "meta":
        with _one_thread():
            for name, part in named_parts(model).items():
                stored[name].read_into(part)
    return model


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let PyTorch use one thread: on a busy machine, waiting for a second one at each small copy takes most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """A model with random weights, made on the device itself; the same seed gives the same weights there.

    Weights have variance 1/columns, so that a product keeps the scale of its input; those that write to the residual stream
    are smaller by sqrt(2L), for the 2L additions.
    """
    device = torch.device(device)
    model = empty_model(config, device, dtype)
    fill_randomly(model.named_parameters(), config.n_layers, device, seed)
    return model


def fill_randomly(
    parameters: Iterable[tuple[str, nn.Parameter]], n_layers: int, device: torch.device, seed: int
) -> None:
    """Norms become 1 and weights random, in the sizes that `random_model` says."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    for name, parameter in parameters:
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        std = parameter.shape[-1] ** -0.5
        if name.endswith(("attention.o.weight", "mlp.down.weight")):
            std /= math.sqrt(2 * n_layers)
        parameter.normal_(0.0, std, generator=generator)
