"""A checkpoint's own description of its model, as a `ModelConfig`: from config.json or from GGUF metadata.

What `Transformer` does not compute is refused here by name: a model that runs and is subtly wrong is worse than none.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm.config import SUPPORTED, ModelConfig, llama3_rope_factors
from minillm.errors import MinillmError

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # "llama" also stands for Mistral and SmolLM
MAX_JSON_BYTES = 40 << 20  # the largest tokenizer.json, with 262,144 tokens, has 33 MB
MAX_HEAD_DIM = 4096


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `MinillmError` if it is missing or is not one.

    It takes at most 30 times MAX_JSON_BYTES of memory, 1.2 GiB: an empty object has three bytes in the file, and 72 here.
    """
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for its writer
            raise MinillmError(f"{path} is not a file: fetch it again.")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise MinillmError(f"{path} is too large to be the file that it is named as.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except MinillmError:  # which is a ValueError
        raise
    except OSError as error:
        raise MinillmError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise MinillmError(f"{path} is not valid JSON: fetch it again.") from None
    if not isinstance(content, dict):
        raise MinillmError(f"{path} does not hold a JSON object: fetch it again.")
    return content


def _integer(source: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    """A whole number that the configuration must hold, unless there is a default. Its range is checked by ModelConfig."""
    value = source.get(key, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise MinillmError(
            f"{name}: {key} must be a whole number in the model's configuration, not {str(value)[:80]!r}."
        )
    return value


def _positive(source: Mapping[str, Any], key: str, name: str, default: float | None = None) -> float:
    """A positive number that the configuration must hold, unless there is a default."""
    value = source.get(key, default)
    value = default if value is None else value
    # The comparison holds for integers of any size, which cannot all be floats.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e300:
        raise MinillmError(
            f"{name}: {key} must be a positive number in the model's configuration, not {str(value)[:80]!r}."
        )
    return float(value)


def config_from_hf(source: Mapping[str, Any], name: str) -> ModelConfig:
    """The config in the contents of a Hugging Face config.json, of transformers 5 or older.

    Keys that may be left out have the defaults of transformers' configuration classes. Raises `MinillmError` for what is
    missing, impossible or not supported.
    """
    architecture = source.get("model_type")
    if architecture not in SUPPORTED:
        raise MinillmError(f"{name} is a {str(architecture)[:80]} model; supported are {', '.join(SUPPORTED)}.")
    _refuse_unsupported(source, name)
    n_heads = _integer(source, "num_attention_heads", name)
    d_model = _integer(source, "hidden_size", name)
    head_dim = _integer(source, "head_dim", name, 128 if architecture == "qwen3" else d_model // max(n_heads, 1))
    theta, factors = _hf_rope(source, head_dim, name)
    window = source.get("sliding_window", 4096) if architecture == "mistral" else None
    return ModelConfig(
        name=name,
        n_layers=_integer(source, "num_hidden_layers", name),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=_integer(source, "num_key_value_heads", name, n_heads),
        head_dim=head_dim,
        d_ff=_integer(source, "intermediate_size", name),
        vocab_size=_integer(source, "vocab_size", name),
        max_positions=_integer(source, "max_position_embeddings", name),
        tied_embeddings=bool(source.get("tie_word_embeddings", False)),
        rope_theta=theta,
        rope_factors=factors,
        norm_eps=_positive(source, "rms_norm_eps", name),
        qk_norm=architecture == "qwen3",
        qkv_bias=architecture == "qwen2",
        sliding_window=window or None,  # 0 is no window either
        architecture=str(architecture),
    )


def _refuse_unsupported(source: Mapping[str, Any], name: str) -> None:
    """Raise `MinillmError` for a setting that would change the arithmetic in a way that `Transformer` does not follow."""
    allowed: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),  # a bias on the output projection too
        "mlp_bias": (False, None),
        "use_sliding_window": (False, None),
        "partial_rotary_factor": (1, None),
        "quantization_config": (None,),
    }
    for key, values in allowed.items():
        if source.get(key) not in values:
            raise MinillmError(f"{name} is not supported: its config.json sets {key} to {str(source[key])[:80]}.")


def _hf_rope(source: Mapping[str, Any], head_dim: int, name: str) -> tuple[float, tuple[float, ...] | None]:
    """theta and the divisors of the rotary frequencies, from `rope_parameters` (transformers 5) or the older two keys."""
    rope = source.get("rope_parameters") or source.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise MinillmError(f"{name}: the RoPE settings in config.json are not a mapping.")
    theta = _positive(rope if "rope_theta" in rope else source, "rope_theta", name, 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1) != 1:
        raise MinillmError(f"{name} turns only part of each head by its position, which is not supported.")
    if kind in (None, "default"):
        return theta, None
    if kind != "llama3":
        raise MinillmError(f"{name} uses RoPE scaling of type {str(kind)[:80]!r}; supported are default and llama3.")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, positions = (_positive(rope, key, name) for key in keys)
    # The head size is checked by ModelConfig, but the factors are computed before.
    if high <= low or not 1 < head_dim <= MAX_HEAD_DIM:
        raise MinillmError(f"{name}: the llama3 RoPE settings in config.json are impossible.")
    return theta, llama3_rope_factors(head_dim, theta, factor, low, high, int(positions))


def config_from_gguf(
    metadata: Mapping[str, Any], vocab_size: int, tied: bool, rope_factors: tuple[float, ...] | None, name: str
) -> ModelConfig:
    """The config in a GGUF file's metadata. The last arguments are told by its tensors.

    Raises `MinillmError` for what is missing, impossible or not supported.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        supported = ", ".join(GGUF_ARCHITECTURES)
        raise MinillmError(f"{name} holds a {str(architecture)[:80]} model; supported in GGUF files are {supported}.")
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    scaling = own.get("rope.scaling.type", "none")
    if scaling != "none":
        raise MinillmError(
            f"{name} uses RoPE scaling of type {str(scaling)[:80]!r}, which is not supported in GGUF files."
        )
    n_heads = _integer(own, "attention.head_count", name)
    d_model = _integer(own, "embedding_length", name)
    head_dim = _integer(own, "attention.key_length", name, d_model // max(n_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise MinillmError(
                f"{name} is not supported: its {key} is {own[key]}, but its heads have {head_dim} numbers."
            )
    return ModelConfig(
        name=name,
        n_layers=_integer(own, "block_count", name),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=_integer(own, "attention.head_count_kv", name, n_heads),
        head_dim=head_dim,
        d_ff=_integer(own, "feed_forward_length", name),
        vocab_size=vocab_size,
        max_positions=_integer(own, "context_length", name),
        tied_embeddings=tied,
        rope_theta=_positive(own, "rope.freq_base", name, 10_000.0),
        rope_factors=rope_factors,
        norm_eps=_positive(own, "attention.layer_norm_rms_epsilon", name),
        qk_norm=architecture == "qwen3",
        qkv_bias=architecture == "qwen2",
        sliding_window=own.get("attention.sliding_window") or None,
        architecture=str(architecture),
    )
