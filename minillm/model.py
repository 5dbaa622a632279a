"""The transformer, written once. Every later chapter changes what surrounds it, never this file.

The model does not know which technique is running. In each layer it computes queries, keys and values and asks the *cache*
for attention; what is stored, in which layout, what may be seen and which kernel runs is the cache's business:

    cache.positions(T)            -> (B, T)         positions of the T new tokens; makes room for them
    cache.attend(layer, q, k, v)  -> (B, Hq, T, D)  attention of the new tokens over all tokens so far

Llama, Mistral, SmolLM, Qwen2 (bias on q, k, v) and Qwen3 (RMSNorm on q and k) are this one model with other numbers.
The letters of the shape comments are listed in `minillm/config.py`.
"""

from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.config import SUPPORTED, ModelConfig
from minillm.errors import MinillmError


class Cache(Protocol):
    """What the model asks of a cache. `positions` is called once a forward pass, before any `attend`."""

    def positions(self, n_tokens: int) -> Tensor: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class RotaryEmbedding(nn.Module):
    """RoPE: turns each pair of a head's numbers by an angle of position x frequency (Su et al., arXiv 2104.09864).

    Number i of a head is paired with number i + D/2, the half-split order of Hugging Face checkpoints. (GGUF files pair
    neighbours instead; `checkpoint.py` puts their rows in this order.)
    """

    frequencies: Tensor  # (D,) float32: -f and f for the two halves, f_i = theta^(-2i/D)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer(
            "frequencies", self._compute_frequencies().to(torch.get_default_device()), persistent=False
        )

    def _compute_frequencies(self) -> Tensor:
        exponents = torch.arange(0, self.config.head_dim, 2, device="cpu").float() / self.config.head_dim
        f = 1.0 / self.config.rope_theta**exponents
        if self.config.rope_factors is not None:
            f = f / torch.tensor(self.config.rope_factors, device="cpu")
        # Turning by a negated angle leaves the cosine and negates the sine: just the sign that `rotate` needs.
        return torch.cat([-f, f])

    def _apply(self, fn: Any, recurse: bool = True) -> "RotaryEmbedding":
        # Frequencies stay float32 when the model is cast: in bf16 a position of 300 could not be told from 301.
        super()._apply(fn, recurse)
        self.frequencies = self._compute_frequencies().to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, :, None] * self.frequencies  # (B, T) -> (B, 1, T, D)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x1, x2) of each head: (x1 cos - x2 sin, x2 cos + x1 sin). x and the result are (B, H, T, D)."""
    cos, sin = rotation  # sin carries the minus sign of its first half
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (x1, x2) -> (x2, x1)
    return torch.addcmul(x * cos, swapped, sin)


class Attention(nn.Module):
    """Project to queries, keys and values, turn them by their position, let the cache attend, project back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C, D = config.d_model, config.head_dim
        self.head_dim = D
        self.heads = [config.n_heads, config.n_kv_heads, config.n_kv_heads]
        self.qkv = nn.Linear(C, sum(self.heads) * D, bias=config.qkv_bias)  # q, k and v rows in one matrix
        self.q_norm = nn.RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.o = nn.Linear(config.n_heads * D, C, bias=False)

    def forward(self, x: Tensor, layer: int, rotation: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, Hq+2*Hkv, T, D)
        q, k, v = qkv.split(self.heads, dim=1)
        q = rotate(self.q_norm(q), rotation)  # (B, Hq, T, D)
        k = rotate(self.k_norm(k), rotation)  # (B, Hkv, T, D)
        out = cache.attend(layer, q, k, v)  # (B, Hq, T, D)
        return self.o(out.transpose(1, 2).reshape(B, T, -1))  # (B, T, Hq*D) -> (B, T, C)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)  # gate and up rows in one matrix
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B, T, F) each
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention, then the MLP, each on a normalized copy of the residual stream it adds to."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, rotation: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        x = x + self.attention(self.attention_norm(x), layer, rotation, cache)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A decoder-only language model: token ids and a cache in, logits out. Weights carry no gradient.

    Raises `MinillmError` for an architecture that this model does not compute.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.architecture not in SUPPORTED:
            raise MinillmError(f"{config.name} is a {config.architecture} model; supported are {', '.join(SUPPORTED)}.")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.rope = RotaryEmbedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embed.weight
        self.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations; a quantized model may store its weights in fewer bits."""
        return self.embed.weight.dtype

    def forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits (B, T, V), unnormalized, for what follows each of the tokens (B, T)."""
        return cast(Tensor, self.head(self.hidden(tokens, cache)))

    def hidden(self, tokens: Tensor, cache: Cache) -> Tensor:
        """The residual stream (B, T, C) that the head turns into logits. Prefill needs the head at one position only."""
        rotation = self.rope(cache.positions(tokens.shape[1]), self.dtype)
        x = self.embed(tokens)  # (B, T) -> (B, T, C)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, rotation, cache)
        return cast(Tensor, self.norm(x))
