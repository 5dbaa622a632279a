"""The shape of a model: `ModelConfig`, and the table of shapes this course knows by name.

One letter a dimension, here and in every other file:

    B sequences       T new tokens          S cached tokens
    C model width     L layers              V vocabulary
    Hq query heads    Hkv KV heads          G = Hq / Hkv query heads that share one KV head
    D head size       F feed-forward width
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from minillm.errors import MinillmError, UsageError

# Architectures that `model.Transformer` computes. Others may stand in the table below, for their shapes.
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")

DEFAULT_MODEL = "smollm2-135m"

# Bounds on what a configuration file may ask for, so that a hostile one is refused before anything is allocated.
MAX_LAYERS = 1_000
MAX_WIDTH = 10_000_000


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes the shapes and the arithmetic of a decoder-only transformer.

    `rope_factors` divides each of the D/2 rotary frequencies (llama3 scaling; see `llama3_rope_factors`).
    `sliding_window` W lets a token see itself and the W-1 tokens before it; None means all of them.
    `repo` is where the Hugging Face hub keeps the weights. Raises `MinillmError` for an impossible shape.
    """

    name: str
    n_layers: int  # L
    d_model: int  # C
    n_heads: int  # Hq
    n_kv_heads: int  # Hkv
    head_dim: int  # D, not always C / Hq
    d_ff: int  # F
    vocab_size: int  # V
    max_positions: int
    tied_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_factors: tuple[float, ...] | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False  # Qwen3: RMSNorm over each query and key head
    qkv_bias: bool = False  # Qwen2
    sliding_window: int | None = None
    architecture: str = "llama"
    repo: str | None = None

    def __post_init__(self) -> None:
        counts = {
            "n_layers": self.n_layers,
            "d_model": self.d_model,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "d_ff": self.d_ff,
            "vocab_size": self.vocab_size,
            "max_positions": self.max_positions,
        }
        if self.sliding_window is not None:
            counts["sliding_window"] = self.sliding_window
        for field, value in counts.items():
            limit = MAX_LAYERS if field == "n_layers" else MAX_WIDTH
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise MinillmError(f"{self.name}: {field} is {value!r}; it must be a whole number from 1 to {limit:,}.")
        if self.n_heads % self.n_kv_heads:
            raise MinillmError(
                f"{self.name}: {self.n_heads} query heads do not divide into {self.n_kv_heads} KV heads."
            )
        if self.head_dim % 2:
            raise MinillmError(f"{self.name}: head_dim is {self.head_dim}; rotary embedding needs an even number.")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise MinillmError(
                f"{self.name}: {len(self.rope_factors)} RoPE factors for head_dim {self.head_dim}; half as many are needed."
            )
        floats = (self.rope_theta, self.norm_eps, *(self.rope_factors or ()))
        if not all(isinstance(value, (int, float)) and math.isfinite(value) and value > 0 for value in floats):
            raise MinillmError(f"{self.name}: rope_theta, norm_eps and RoPE factors must be positive, finite numbers.")

    @property
    def group_size(self) -> int:
        """G: how many query heads read the same key and value."""
        return self.n_heads // self.n_kv_heads

    @property
    def layer_matmul_params(self) -> int:
        """Weights of one layer that a token is multiplied with: q, k, v, o, gate, up and down."""
        attention = self.d_model * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        return attention + 3 * self.d_model * self.d_ff

    @property
    def matmul_params(self) -> int:
        """P: weights that a token is multiplied with, head included, input embedding (a gather) not."""
        return self.n_layers * self.layer_matmul_params + self.vocab_size * self.d_model

    @property
    def parameter_count(self) -> int:
        """All parameters, as model cards count them: a tied embedding once."""
        norms = 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)
        if self.architecture == "gemma3":
            norms += 2 * self.d_model  # a second RMSNorm after attention and after the MLP
        bias = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim if self.qkv_bias else 0
        embeddings = self.vocab_size * self.d_model * (1 if self.tied_embeddings else 2)
        return embeddings + self.n_layers * (self.layer_matmul_params + norms + bias) + self.d_model

    @property
    def streamed_params(self) -> int:
        """Parameters read for each decoded token: all but an untied input embedding, of which one row is gathered."""
        return self.parameter_count - (0 if self.tied_embeddings else self.vocab_size * self.d_model)

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Bytes that one cached token takes: a key and a value for each layer and KV head (2 L Hkv D elements)."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * bytes_per_element


def llama3_rope_factors(
    head_dim: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_positions: int
) -> tuple[float, ...]:
    """Divisors of the D/2 rotary frequencies under Llama 3.1's scaling for long contexts.

    A wavelength shorter than `original_positions / high_freq_factor` keeps its frequency (divisor 1), one longer than
    `original_positions / low_freq_factor` is slowed by `factor`, and those between are blended. Source: Meta's Llama 3.1
    reference code, `apply_scaling`. Leaving this out gives fluent text that decays with length.
    """
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        turns = original_positions / wavelength  # full rotations within the original context
        blend = min(max((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0), 1.0)
        factors.append(1 / (blend + (1 - blend) / factor))
    return tuple(factors)


def _table(configs: Sequence[ModelConfig]) -> dict[str, ModelConfig]:
    return {config.name: config for config in configs}


# Sources: each model's config.json on the Hugging Face hub. Tests hold every row to its published parameter count.
KNOWN_MODELS = _table(
    [
        ModelConfig(
            "smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_embeddings=True, rope_theta=1e5,
            repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        ModelConfig(
            "smollm2-360m", 32, 960, 15, 5, 64, 2560, 49152, 8192, tied_embeddings=True, rope_theta=1e5,
            repo="HuggingFaceTB/SmolLM2-360M-Instruct",
        ),
        ModelConfig(
            "smollm2-1.7b", 24, 2048, 32, 32, 64, 8192, 49152, 8192, tied_embeddings=True, rope_theta=1.3e5,
            repo="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        ),
        ModelConfig(
            "qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, 40960, tied_embeddings=True, rope_theta=1e6,
            norm_eps=1e-6, qk_norm=True, architecture="qwen3", repo="Qwen/Qwen3-0.6B",
        ),
        ModelConfig(
            "qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, 40960, tied_embeddings=True, rope_theta=1e6,
            norm_eps=1e-6, qk_norm=True, architecture="qwen3", repo="Qwen/Qwen3-4B",
        ),
        ModelConfig(
            "qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 40960, rope_theta=1e6,
            norm_eps=1e-6, qk_norm=True, architecture="qwen3", repo="Qwen/Qwen3-8B",
        ),
        ModelConfig(
            "llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192, rope_theta=5e5,
            repo="meta-llama/Meta-Llama-3-8B-Instruct",
        ),
        ModelConfig(
            "llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192, rope_theta=5e5,
            repo="meta-llama/Meta-Llama-3-70B-Instruct",
        ),
        ModelConfig(
            "llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, 131072, tied_embeddings=True, rope_theta=5e5,
            rope_factors=llama3_rope_factors(64, 5e5, 32.0, 1.0, 4.0, 8192),
            repo="meta-llama/Llama-3.2-1B-Instruct",
        ),
        ModelConfig(
            "llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096,
            repo="meta-llama/Llama-2-7b-chat-hf",
        ),
        ModelConfig(
            "llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, 4096,
            repo="meta-llama/Llama-2-13b-chat-hf",
        ),
        ModelConfig(
            "mistral-7b-v0.1", 32, 4096, 32, 8, 128, 14336, 32000, 32768, sliding_window=4096, architecture="mistral",
            repo="mistralai/Mistral-7B-Instruct-v0.1",
        ),
        ModelConfig(
            "gemma-3-270m", 18, 640, 4, 1, 256, 2048, 262144, 32768, tied_embeddings=True, rope_theta=1e6,
            norm_eps=1e-6, qk_norm=True, architecture="gemma3", repo="google/gemma-3-270m",
        ),
        ModelConfig("tiny", 2, 32, 4, 2, 8, 64, 320, 256),
    ]
)  # fmt: skip


def check_token(token: SupportsIndex, vocab_size: int) -> int:
    """A token id, be it Python's, NumPy's or one of a tensor, as an int. Raises `UsageError` for what is no id here."""
    try:
        value = operator.index(token)
    except TypeError:
        value = -1
    if not 0 <= value < vocab_size:
        shown = " ".join(repr(token).split())[:80]
        raise UsageError(f"Token id {shown} is not a whole number from 0 to {vocab_size - 1}.")
    return value


def known_model(name: str) -> ModelConfig:
    """The shape of a model in the table, by name. Raises `UsageError` for any other name."""
    try:
        return KNOWN_MODELS[name]
    except KeyError:
        raise UsageError(f"Unknown model {name!r}: choose one of {', '.join(KNOWN_MODELS)}.") from None
