"""The shapes of models with multi-head latent attention (chapter 3, `stages/mla.py`), and a table of known ones.

Sizes beside the letters of `minillm/config.py`: d_c of a latent, d_r of the rotated part of a query or key, d_nope of the part
that has no position, d_v of a head's value (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

from dataclasses import dataclass

from minillm.config import ModelConfig
from minillm.errors import MinillmError


@dataclass(frozen=True, kw_only=True)
class LatentConfig(ModelConfig):
    """A `ModelConfig` with the sizes of latent attention. `head_dim` is d_r, the rotated part; the one KV head is the latent.

    Raises `MinillmError` for an impossible shape.
    """

    kv_rank: int  # d_c
    d_nope: int  # the part of a head's query and key that has no position
    d_v: int
    q_rank: int | None = None  # queries go through a latent of their own; None: one matrix, as in V2-Lite

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.kv_rank, self.d_nope, self.d_v, 1 if self.q_rank is None else self.q_rank) < 1:
            raise MinillmError(f"{self.name}: kv_rank, d_nope, d_v and q_rank must be at least 1.")
        if self.n_kv_heads != 1 or self.qk_norm or self.qkv_bias or self.sliding_window:
            raise MinillmError(f"{self.name}: latent attention has one KV head, and no q/k norm, bias or window.")

    @property
    def d_qk(self) -> int:
        """Size of a head's query: without position, and with."""
        return self.d_nope + self.head_dim

    @property
    def d_latent(self) -> int:
        """Numbers that a cached token takes in a layer."""
        return self.kv_rank + self.head_dim

    @property
    def layer_matmul_params(self) -> int:
        C, Hq, rank = self.d_model, self.n_heads, self.q_rank
        queries = C * Hq * self.d_qk if rank is None else rank * (C + Hq * self.d_qk)
        keys_values = C * self.d_latent + self.kv_rank * Hq * (self.d_nope + self.d_v)
        return queries + keys_values + Hq * self.d_v * C + 3 * C * self.d_ff

    @property
    def parameter_count(self) -> int:
        return super().parameter_count + self.n_layers * (self.kv_rank + (self.q_rank or 0))  # norms of the latents

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Bytes of one cached token: L (d_c + d_r) elements."""
        return self.n_layers * self.d_latent * bytes_per_element

    def expanded_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Bytes that the keys and values of all heads would take: L Hq (d_nope + d_r + d_v) elements."""
        return self.n_layers * self.n_heads * (self.d_qk + self.d_v) * bytes_per_element

    def absorbed_intensity(self, bytes_per_element: int = 2) -> float:
        """FLOPs that absorbed attention needs for each byte of a latent, in decode."""
        return self.n_heads * 2 * (self.d_latent + self.kv_rank) / (self.d_latent * bytes_per_element)


# Sources: each model's config.json on the Hugging Face hub. Only their attention is modelled: the feed-forward is that of their
# first, dense layers where theirs is a mixture of experts, and the RoPE is plain where theirs is scaled (YaRN, which also
# multiplies the softmax scale).
KNOWN_LATENT_SHAPES = {
    config.name: config
    for config in (
        LatentConfig(
            "deepseek-v2-lite", 27, 2048, 16, 1, 64, 10944, 102400, 163840, norm_eps=1e-6,
            kv_rank=512, d_nope=128, d_v=128,
        ),
        LatentConfig(
            "deepseek-v2", 60, 5120, 128, 1, 64, 12288, 102400, 163840, norm_eps=1e-6,
            kv_rank=512, d_nope=128, d_v=128, q_rank=1536,
        ),
        LatentConfig(
            "deepseek-v3", 61, 7168, 128, 1, 64, 18432, 129280, 163840, norm_eps=1e-6,
            kv_rank=512, d_nope=128, d_v=128, q_rank=1536,
        ),
    )
}  # fmt: skip
