"""Chapter 3. Multi-head latent attention: cache one small latent a token, from which the keys and values of all heads follow.

DeepSeek-V2 (arXiv 2405.04434, section 2.1) projects a token down to a latent c of d_c numbers and up again to a key and a value
for each of the Hq heads. Only c is kept, and beside it one rotated key of d_r numbers that all heads share: if keys made from c
were rotated, W_UK could not leave them, as it does below. In all L (d_c + d_r) elements a token. One function, two forms:

    expanded   k_h = W_UK,h c, v_h = W_UV,h c for all S cached tokens, then attention of Hq heads over them
    absorbed   q_h . W_UK,h c = (W_UK,h^T q_h) . c      and      sum p_s W_UV,h c_s = W_UV,h (sum p_s c_s)

So W_UK can go to the query and W_UV to the output, which leaves multi-query attention over the latents themselves: a latent is
key and value at once, loaded once for all heads. With b bytes a number, attention of one decode step then has the intensity

    Hq (2 (d_c + d_r) + 2 d_c) / ((d_c + d_r) b)      241.8 for DeepSeek-V3 in 16 bits, 30.2 for V2-Lite

A pass of T tokens over S costs each head 4 (d_nope + d_r) T S + 2 d_c (d_nope + d_v) S FLOPs expanded, and
4 (d_c + d_r) T S + 2 d_c (d_nope + d_v) T absorbed. The first is less when all is new (T = S), the second in decode (T = 1).
Over a long context they meet at T = d_c (d_nope + d_v) / (2 (d_c - d_nope)), 171 in the DeepSeek models.

Both divide scores by sqrt(d_nope + d_r), the size of a head's query, and never by sqrt(d_c + d_r).
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.errors import MinillmError, UsageError
from minillm.generation import Generation, OnToken, Recorder, generate_alone
from minillm.latent_config import LatentConfig
from minillm.model import Cache, Transformer, rotate
from minillm.sampling import SamplerLike, greedy
from minillm.stages.gqa import decode_attention
from minillm.stages.kv_cache import prefill_and_decode
from minillm.stages.naive import causal_attention
from minillm.weights import fill_randomly, random_model


class LatentAttention(nn.Module):
    """Takes the place of `model.Attention`: the same call, other projections.

    The cache is given the latent as k and as v, and applies `kv_up`, W_UK and W_UV of every head, in the form that it likes.
    The config's `head_dim` is d_r, the part of a head that RoPE rotates. Raises `UsageError` for a cache of keys and values,
    which is what the other stages bring.
    """

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        C, Hq, eps = config.d_model, config.n_heads, config.norm_eps
        self.config = config
        self.q: nn.Module
        if config.q_rank is None:
            self.q = nn.Linear(C, Hq * config.d_qk, bias=False)
        else:
            down, norm = nn.Linear(C, config.q_rank, bias=False), nn.RMSNorm(config.q_rank, eps)
            up = nn.Linear(config.q_rank, Hq * config.d_qk, bias=False)
            self.q = nn.Sequential(OrderedDict(down=down, norm=norm, up=up))
        self.kv_down = nn.Linear(C, config.d_latent, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_rank, eps)
        self.kv_up = nn.Linear(config.kv_rank, Hq * (config.d_nope + config.d_v), bias=False)
        self.o = nn.Linear(Hq * config.d_v, C, bias=False)

    @property
    def up(self) -> Tensor:
        """W_UK and W_UV of each head, (Hq, d_nope + d_v, d_c), a view."""
        return self.kv_up.weight.view(self.config.n_heads, -1, self.config.kv_rank)

    def forward(self, x: Tensor, layer: int, rotation: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        B, T, _ = x.shape
        config = self.config
        _check_cache(cache, config)
        q = self.q(x).view(B, T, -1, config.d_qk).transpose(1, 2)  # (B, Hq, T, d_nope + d_r)
        q_nope, q_rope = q.split([config.d_nope, config.head_dim], dim=-1)
        q = torch.cat([q_nope, rotate(q_rope, rotation)], dim=-1)
        c, k_rope = self.kv_down(x)[:, None].split([config.kv_rank, config.head_dim], dim=-1)  # (B, 1, T, d_c), ... d_r
        latent = torch.cat([self.kv_norm(c), rotate(k_rope, rotation)], dim=-1)  # (B, 1, T, d_c + d_r)
        out = cache.attend(layer, q, latent, latent)  # (B, Hq, T, d_v)
        return self.o(out.transpose(1, 2).reshape(B, T, -1))  # (B, T, Hq*d_v) -> (B, T, C)


def random_latent_model(
    config: LatentConfig, *, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """An ordinary `Transformer` whose blocks attend through latents, with random weights as `random_model` makes them."""
    model = random_model(config, seed=seed, device=device, dtype=dtype)
    for block in model.blocks:
        with torch.device("meta"):  # without the values of a default initialization
            attention = LatentAttention(config).to(dtype).requires_grad_(False)
        block.attention = attention.to_empty(device=model.device)
    new = [(name, parameter) for name, parameter in model.named_parameters() if ".attention." in name]
    fill_randomly(new, config.n_layers, model.device, seed + 1)
    return model


def expanded_attention(q: Tensor, latents: Tensor, up: Tensor, d_nope: int) -> Tensor:
    """Causal attention over keys and values made from the latents. The T queries are the last T of the S positions.

    q is (B, Hq, T, d_nope + d_r), latents (B, 1, S, d_c + d_r), up (Hq, d_nope + d_v, d_c). Returns (B, Hq, T, d_v).
    """
    (Hq, _, d_c), S = up.shape, latents.shape[2]
    kv = F.linear(latents[:, 0, :, :d_c], up.flatten(0, 1))  # (B, S, d_c) -> (B, S, Hq*(d_nope + d_v))
    k, v = kv.view(-1, S, Hq, up.shape[1]).transpose(1, 2).tensor_split([d_nope], dim=-1)  # (B, Hq, S, d_nope), ... d_v
    k = torch.cat([k, latents[..., d_c:].expand(-1, Hq, -1, -1)], dim=-1)  # (B, Hq, S, d_nope + d_r)
    # A CPU has a kernel that keeps scores out of memory only where keys and values have one size: zeros fill the values up.
    padding = max(0, k.shape[3] - v.shape[3])
    return causal_attention(q, k, F.pad(v, (0, padding)))[..., : v.shape[3]]


def absorbed_attention(q: Tensor, latents: Tensor, up: Tensor, d_nope: int) -> Tensor:
    """The same result, of the same arguments, without keys or values: all heads read the latents as they are."""
    Hq, _, d_c = up.shape
    w_uk, w_uv = up.tensor_split([d_nope], dim=1)  # (Hq, d_nope, d_c), (Hq, d_v, d_c)
    # What attends below divides by sqrt(d_c + d_r), the size of its queries; the scale of the model is 1 / sqrt(d_nope + d_r).
    q = q * (latents.shape[3] / q.shape[3]) ** 0.5
    # Letters of the sums: n of d_nope, c of d_c, v of d_v.
    q_latent = torch.einsum("bhtn,hnc->bhtc", q[..., :d_nope], w_uk)
    q = torch.cat([q_latent, q[..., d_nope:]], dim=-1)  # (B, Hq, T, d_c + d_r)
    # The latents are the values too, all d_c + d_r numbers of them, of which the last d_r are dropped: 6 % more FLOPs, and a
    # fused kernel (keys and values of one size, as above) that loads each latent once.
    if q.shape[2] == 1:
        out = decode_attention(q, latents, latents)  # the Hq queries are rows of one matrix
    else:
        keys = latents.expand(-1, Hq, -1, -1)  # a view: no copy for any head
        out = causal_attention(q, keys, keys)
    return torch.einsum("bhtc,hvc->bhtv", out[..., :d_c], w_uv)


class LatentCache:
    """Latents of up to `capacity` tokens of each of B sequences: one row a token and layer for all heads.

    `absorbed` attends over the latents as they are, but for a pass in which all tokens are new, where expanding is cheaper;
    otherwise every pass expands all of them. The prompt may come whole or in chunks. Raises `UsageError` for a model without
    latent attention, and `MinillmError` when it is asked to hold more than `capacity`, before anything is written.
    """

    def __init__(self, model: Transformer, capacity: int, batch: int = 1, absorbed: bool = True) -> None:
        config = model.config
        if not isinstance(config, LatentConfig):
            raise UsageError(f"{config.name} has no latent attention: make a model with random_latent_model.")
        self.up = [cast(LatentAttention, block.attention).up for block in model.blocks]  # views of the model's weights
        self.d_nope = config.d_nope
        self.absorbed = absorbed
        self.device = model.device
        self.capacity = capacity
        self.length = 0  # S: tokens in the cache
        shape = (config.n_layers, batch, 1, capacity, config.d_latent)
        self.latents = torch.empty(shape, dtype=model.dtype, device=model.device)  # never read beyond `length`

    def positions(self, n_tokens: int) -> Tensor:
        start = self.length
        if start + n_tokens > self.capacity:
            raise MinillmError(
                f"The latent cache is full: it holds {start} of {self.capacity} tokens and was asked for {n_tokens} more."
            )
        self.length = start + n_tokens
        return torch.arange(start, self.length, device=self.device)[None]  # (1, T), the same for every sequence

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T, latents = q.shape[2], self.latents[layer, :, :, : self.length]  # (B, 1, S, d_c + d_r)
        latents[:, :, -T:] = k  # v is the same latent
        absorb = self.absorbed and T < self.length
        attention = absorbed_attention if absorb else expanded_attention
        return attention(q, latents, self.up[layer], self.d_nope)


def _check_cache(cache: Cache, config: LatentConfig) -> None:
    if not isinstance(cache, LatentCache):
        raise UsageError(
            f"{config.name} has latent attention, and {type(cache).__name__} keeps keys and values: run it by stages.mla."
        )


def run(model: Transformer, tokens: Tensor, max_new_tokens: int, sampler: SamplerLike, recorder: Recorder) -> None:
    """Extend B prompts of equal length, tokens (B, T), by up to `max_new_tokens` each."""
    B, T = tokens.shape
    cache = LatentCache(model, capacity=T + max_new_tokens - 1, batch=B)
    prefill_and_decode(model, cache, tokens, max_new_tokens, sampler, recorder)


def generate(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    sampler: SamplerLike = greedy,
    stop_tokens: Collection[int] = (),
    on_token: OnToken | None = None,
) -> Generation:
    """Generate up to `max_new_tokens` after the prompt. Raises `UsageError` for a prompt that cannot run."""
    return generate_alone(run, model, prompt, max_new_tokens, sampler, stop_tokens, on_token)
