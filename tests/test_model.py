"""The parts of the transformer, each against a float64 computation written from its definition."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import SHAPES, assert_same_logits, lively_model, logits_whole, random_prompt
from torch import Tensor, nn

from minillm.config import KNOWN_MODELS, ModelConfig, llama3_rope_factors
from minillm.errors import MinillmError
from minillm.model import RotaryEmbedding, Transformer, rotate
from minillm.stages import naive
from minillm.stages.kv_cache import KVCache
from minillm.stages.naive import NoCache, causal_attention

U = 2.0**-24  # unit roundoff of float32


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- RMSNorm ---------------------------------------------------------------------------------------------------------


def norms_of(model: Transformer) -> list[nn.Module]:
    block = model.blocks[0]
    return [block.attention_norm, block.mlp_norm, model.norm, block.attention.q_norm, block.attention.k_norm]


@pytest.mark.parametrize("which", range(5), ids=["attention", "mlp", "final", "query", "key"])
def test_rmsnorm_in_bf16_is_computed_in_fp32_inside(which: int) -> None:
    norm = norms_of(lively_model(SHAPES["qwen3"], dtype=torch.bfloat16))[which]
    weight = norm.weight
    x = 3 * normal(64, weight.shape[0], dtype=torch.bfloat16)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + norm.eps) * weight.double()
    # bf16 rounds at most twice, to 8 bits each time (after normalizing, and after the weight): 2 x 2^-9 of the value, plus
    # the little that fp32 adds. A mean of squares summed in bf16 is off by several times 2^-9 more.
    relative_error = ((norm(x).double() - exact) / exact).abs().max().item()
    assert relative_error <= 2 * 2.0**-9 * 1.01


def test_attention_and_mlp_are_fed_what_was_normalized_in_fp32() -> None:
    model = lively_model(SHAPES["llama"], dtype=torch.bfloat16)
    block, seen = model.blocks[1], {}
    for name, module in (
        ("block", block),
        ("attention", block.attention),
        ("mlp_norm", block.mlp_norm),
        ("mlp", block.mlp),
    ):
        module.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0].double()))
    model(torch.tensor([random_prompt(64, 97)]), NoCache(model))
    for before, after, norm in (("block", "attention", block.attention_norm), ("mlp_norm", "mlp", block.mlp_norm)):
        x = seen[before]
        exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
        assert ((seen[after] - exact).abs() <= 2 * 2.0**-9 * 1.01 * exact.abs()).all()  # as above


def test_rmsnorm_in_fp16_survives_values_whose_squares_do_not_fit() -> None:
    norm = norms_of(lively_model(SHAPES["llama"], dtype=torch.float16))[0]
    x = torch.full((1, 32), 1000.0, dtype=torch.float16)  # 1000^2 > 65504, the largest fp16
    torch.testing.assert_close(norm(x), norm.weight[None], rtol=2.0**-10, atol=0)


def test_norm_epsilon_is_the_one_of_the_configuration() -> None:
    config = replace(SHAPES["qwen3"], norm_eps=0.25)
    for norm in norms_of(lively_model(config, dtype=torch.float64)):
        x = normal(3, norm.weight.shape[0], dtype=torch.float64)
        exact = x / (x.square().mean(-1, keepdim=True) + 0.25).sqrt() * norm.weight
        torch.testing.assert_close(norm(x), exact, rtol=1e-12, atol=0)


# --- RoPE ------------------------------------------------------------------------------------------------------------


def exact_frequencies(config: ModelConfig) -> Tensor:
    f = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    return torch.tensor(f, dtype=torch.float64) / torch.tensor(
        config.rope_factors or [1.0] * len(f), dtype=torch.float64
    )


def turned_half_split(x: Tensor, positions: Tensor, config: ModelConfig) -> Tensor:
    """Pairs (i, i + D/2) as complex numbers, each times exp(i position f): x is (B, H, T, D) in float64."""
    pairs = torch.complex(*x.chunk(2, dim=-1))
    pairs = pairs * torch.polar(torch.ones(()).double(), positions[:, None] * exact_frequencies(config))
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def turned_interleaved(x: Tensor, positions: Tensor, config: ModelConfig) -> Tensor:
    """The other convention: pairs (2i, 2i + 1)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    pairs = pairs * torch.polar(torch.ones(()).double(), positions[:, None] * exact_frequencies(config))
    return torch.view_as_real(pairs).flatten(-2)


def turned(x: Tensor, positions: Tensor, config: ModelConfig) -> Tensor:
    return rotate(x, RotaryEmbedding(config)(positions[None], x.dtype))


ROPE_SHAPES = [SHAPES["llama"], SHAPES["llama3"], KNOWN_MODELS["smollm2-135m"], KNOWN_MODELS["llama-3.2-1b"]]


@pytest.mark.parametrize("config", ROPE_SHAPES, ids=lambda config: config.name)
def test_rope_is_a_complex_rotation_of_half_split_pairs(config: ModelConfig) -> None:
    positions = torch.tensor([0, 1, 2, 3, 17, 255, 300, 301, 1023, 4096, 8191])
    x = normal(2, 3, len(positions), config.head_dim, dtype=torch.float64)
    exact = turned_half_split(x, positions, config)
    error = (turned(x, positions, config) - exact).abs()
    # Angles are fp32: position x frequency is off by the roundings of exponent, power, reciprocal, factor and product. The
    # exponent's counts ln(theta) times; below 16 u of the angle in all for theta up to 5e5. Moving a pair of length r by
    # that angle moves it by r x 16 u x angle; cosine and sine themselves round to u.
    radius = torch.complex(*x.chunk(2, dim=-1)).abs().repeat(1, 1, 1, 2)
    angle = (positions[:, None] * exact_frequencies(config)).repeat(1, 2)
    assert (error <= radius * U * (16 * angle + 4)).all()


def test_rope_differs_from_the_interleaved_order_from_position_two_on() -> None:
    config = SHAPES["llama"]
    positions = torch.tensor([0, 2, 3, 50])
    x = normal(1, 1, 4, config.head_dim, dtype=torch.float64)
    ours, other = turned(x, positions, config), turned_interleaved(x, positions, config)
    torch.testing.assert_close(ours[..., 0, :], other[..., 0, :])  # at position 0 no order can be told from another
    for row in (1, 2, 3):
        assert (ours[..., row, :] - other[..., row, :]).abs().max() > 0.1


def test_both_orders_give_the_same_scores_once_rows_are_permuted() -> None:
    config = SHAPES["llama"]
    positions = torch.tensor([2, 9, 100, 130])
    q, k = (normal(1, 1, 4, config.head_dim, seed=seed, dtype=torch.float64) for seed in (1, 2))
    to_interleaved = torch.arange(config.head_dim).view(2, -1).T.flatten()  # (i, i + D/2) side by side
    ours = turned(q, positions, config) @ turned(k, positions, config).mT
    other_q, other_k = (turned_interleaved(x[..., to_interleaved], positions, config) for x in (q, k))
    torch.testing.assert_close(ours, other_q @ other_k.mT, rtol=0, atol=1e-3)  # fp32 angles, as bounded above


@pytest.mark.parametrize("shift", [1, 37, 5000])
def test_scores_depend_on_the_distance_of_positions_only(shift: int) -> None:
    config = SHAPES["llama"]
    positions = torch.tensor([0, 1, 5, 20])
    q, k = (normal(1, 1, 4, config.head_dim, seed=seed, dtype=torch.float64) for seed in (1, 2))
    here = turned(q, positions, config) @ turned(k, positions, config).mT
    there = turned(q, positions + shift, config) @ turned(k, positions + shift, config).mT
    # |q| |k| times the error of two fp32 angles of at most position x 1 radian, 4 u each.
    bound = (q.norm() * k.norm()).item() * 2 * 4 * U * (shift + 20)
    assert (here - there).abs().max().item() <= bound
    assert (here - turned(q, positions + shift, config) @ turned(k, positions, config).mT).abs().max() > 0.1


def test_a_later_position_turns_pairs_counterclockwise() -> None:
    config = replace(SHAPES["llama"], head_dim=2)
    x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    out = turned(x, torch.tensor([1]), config).flatten().tolist()
    assert out == pytest.approx([math.cos(1), math.sin(1)], rel=1e-6)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_frequencies_stay_float32_when_the_model_is_cast(cast) -> None:  # type: ignore[no-untyped-def]
    model = lively_model(SHAPES["llama"])
    before = model.rope.frequencies.clone()
    model = cast(model)
    assert model.rope.frequencies.dtype == torch.float32
    assert torch.equal(model.rope.frequencies, before)


def test_a_cast_and_cast_back_loses_no_frequency() -> None:
    model = lively_model(SHAPES["llama3"])
    before = model.rope.frequencies.clone()
    assert torch.equal(model.half().bfloat16().float().rope.frequencies, before)


def test_neighbouring_positions_stay_apart_in_bf16() -> None:
    config = KNOWN_MODELS["smollm2-135m"]
    cos, sin = RotaryEmbedding(config).to(torch.bfloat16)(torch.tensor([[300, 301]]), torch.bfloat16)
    angle = torch.atan2(sin[0, 0, :, 32].double(), cos[0, 0, :, 32].double())  # number 32 of D = 64 turns by 1
    assert ((angle[1] - angle[0]) % (2 * math.pi)).item() == pytest.approx(1.0, abs=0.02)


def test_frequencies_move_with_the_device() -> None:
    assert lively_model(SHAPES["llama"]).to("meta").rope.frequencies.device.type == "meta"
    with torch.device("meta"):
        model = Transformer(SHAPES["llama"])
    assert model.rope.frequencies.device.type == "meta"
    model = model.to_empty(device="cpu")  # how a checkpoint is loaded: nothing may be left uninitialized
    expected = exact_frequencies(SHAPES["llama"]).float()
    torch.testing.assert_close(model.rope.frequencies, torch.cat([-expected, expected]), rtol=1e-6, atol=0)


def test_frequencies_follow_from_the_configuration_and_are_no_weights() -> None:
    model = lively_model(SHAPES["llama"])
    assert model.state_dict().keys() == dict(model.named_parameters(remove_duplicate=False)).keys()


def test_llama3_factors_divide_the_frequencies() -> None:
    config = SHAPES["llama3"]
    plain, scaled = RotaryEmbedding(replace(config, rope_factors=None)), RotaryEmbedding(config)
    assert config.rope_factors is not None
    ratio = (plain.frequencies / scaled.frequencies).tolist()
    assert ratio == pytest.approx(config.rope_factors * 2, rel=1e-6)
    assert len(set(config.rope_factors)) > 2  # kept, blended and slowed frequencies all occur


def test_llama3_factors_equal_the_published_rule_worked_by_hand() -> None:
    # theta 500,000, D = 64, factor 32, low 1, high 4, 8192 original positions (Llama-3.2-1B), straight from the definition.
    factors = llama3_rope_factors(64, 5e5, 32.0, 1.0, 4.0, 8192)
    for i, factor in enumerate(factors):
        f = 5e5 ** (-i / 32)
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            new = f
        elif wavelength > 8192 / 1:
            new = f / 32
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            new = (1 - smooth) * f / 32 + smooth * f
        assert f / factor == pytest.approx(new, rel=1e-12)
    assert factors[0] == 1.0 and factors[-1] == 32.0


# --- Attention -------------------------------------------------------------------------------------------------------


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One query and one visible key at a time, from the definition, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    T, S = q.shape[2], k.shape[2]
    for i in range(T):
        at = S - T + i
        first = 0 if window is None else max(0, at - window + 1)
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                scores = torch.stack([q[b, h, i] @ k[b, h, j] for j in range(first, at + 1)]) / math.sqrt(q.shape[-1])
                weights = scores.exp() / scores.exp().sum()
                out[b, h, i] = sum(w * v[b, h, j] for w, j in zip(weights, range(first, at + 1), strict=True))
    return out


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6, 7, 8])
@pytest.mark.parametrize("T", [1, 2, 3, 6, 7])
def test_causal_attention_equals_explicit_softmax(T: int, window: int | None) -> None:
    S = 7
    q, k, v = (2 * normal(2, 3, n, 8, seed=n + i, dtype=torch.float64) for i, n in enumerate((T, S, S)))
    torch.testing.assert_close(
        causal_attention(q, k, v, window), explicit_attention(q, k, v, window), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize(
    ("T", "window", "is_masked"),
    [(1, None, False), (1, 7, False), (1, 6, True), (7, None, False), (7, 7, False), (7, 6, True), (3, None, True)],
)
def test_a_mask_is_made_only_for_what_the_causal_kernel_would_show(
    T: int, window: int | None, is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[Tensor | None] = []

    def watched(*tensors: Tensor, attn_mask: Tensor | None = None, **options: bool) -> Tensor:
        masks.append(attn_mask)
        return attend(*tensors, attn_mask=attn_mask, **options)

    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    causal_attention(normal(1, 2, T, 8), normal(1, 2, 7, 8), normal(1, 2, 7, 8), window)
    assert [mask is not None for mask in masks] == [is_masked]


@pytest.mark.parametrize("B", [1, 3, 9])
def test_key_heads_are_shared_by_neighbouring_query_heads_however_many_rows_there_are(B: int) -> None:
    q, k, v = (normal(B, heads, 5, 8, seed=heads, dtype=torch.float64) for heads in (6, 2, 2))
    expected = explicit_attention(q, k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1), None)
    torch.testing.assert_close(causal_attention(q, k, v), expected, rtol=0, atol=1e-13)


def test_without_a_cache_each_query_head_reads_a_copy_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what the first stage costs, and what `gqa` saves: the values would be the same."""
    shapes = []

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        shapes.extend([q.shape, k.shape, v.shape])
        return q

    monkeypatch.setattr(naive, "causal_attention", attend)
    model = lively_model(SHAPES["llama"])
    model(torch.tensor([[1, 2, 3]]), NoCache(model))
    c = model.config
    assert set(shapes) == {(1, c.n_heads, 3, c.head_dim)} and c.n_kv_heads < c.n_heads


@pytest.mark.parametrize("T", [1, 4, 7])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_window_counts_the_current_token(T: int, window: int) -> None:
    # With equal scores and one-hot values the output is 1/n at each of the n keys that are seen.
    S = 7
    q, k = torch.zeros(1, 1, T, S, dtype=torch.float64), normal(1, 1, S, S, dtype=torch.float64)
    seen = causal_attention(q, k, torch.eye(S, dtype=torch.float64)[None, None], window)[0, 0]
    for i in range(T):
        at = S - T + i
        expected = set(range(max(0, at - window + 1), at + 1))
        assert set(seen[i].nonzero().flatten().tolist()) == expected
        assert seen[i][seen[i] > 0].tolist() == pytest.approx([1 / len(expected)] * len(expected))


@pytest.mark.parametrize("T", [1, 3, 6])
def test_a_query_never_sees_later_keys(T: int) -> None:
    q, k, v = (normal(1, 2, n, 8, seed=i, dtype=torch.float64) for i, n in enumerate((T, 6, 6)))
    before = causal_attention(q, k, v)
    k, v = k.clone(), v.clone()
    k[:, :, -1], v[:, :, -1] = 1e3, 1e3  # the last key belongs to the last query
    after = causal_attention(q, k, v)
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])
    assert not torch.equal(before[:, :, -1], after[:, :, -1])


def attended_by_head(cache: NoCache | KVCache, config: ModelConfig) -> list[float]:
    """What each query head reads when every value of KV head j is the number j."""
    q, k = normal(1, config.n_heads, 3, config.head_dim), normal(1, config.n_kv_heads, 3, config.head_dim)
    v = torch.arange(config.n_kv_heads).float().view(1, -1, 1, 1).expand(k.shape)
    cache.positions(3)
    return cache.attend(0, q, k, v)[0, :, -1, 0].tolist()


@pytest.mark.parametrize("make", [NoCache, lambda model: KVCache(model, 5)], ids=["naive", "kv_cache"])
def test_query_head_h_reads_kv_head_h_over_G(make) -> None:  # type: ignore[no-untyped-def]
    config = SHAPES["llama"]  # 6 query heads, 2 KV heads
    assert attended_by_head(make(lively_model(config)), config) == pytest.approx([0, 0, 0, 1, 1, 1])


# --- The whole -------------------------------------------------------------------------------------------------------


def reference_logits(model: Transformer, tokens: list[int]) -> Tensor:
    """The forward pass from its definition: separate q, k, v, gate and up, one head at a time, float64."""
    config, w = model.config, {name: p.double() for name, p in model.named_parameters()}
    D, Hq, Hkv = config.head_dim, config.n_heads, config.n_kv_heads
    positions = torch.arange(len(tokens))

    def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

    x = w["embed.weight"][tokens]
    for layer in range(config.n_layers):
        block = f"blocks.{layer}."
        h = rmsnorm(x, w[block + "attention_norm.weight"])
        rows = w[block + "attention.qkv.weight"].split([Hq * D, Hkv * D, Hkv * D])
        q, k, v = (h @ weight.T for weight in rows)
        if config.qkv_bias:
            biases = w[block + "attention.qkv.bias"].split([Hq * D, Hkv * D, Hkv * D])
            q, k, v = q + biases[0], k + biases[1], v + biases[2]
        heads = []
        for head in range(Hq):
            group = head // (Hq // Hkv)
            qh, kh, vh = (t[:, i * D : (i + 1) * D] for t, i in ((q, head), (k, group), (v, group)))
            if config.qk_norm:
                qh = rmsnorm(qh, w[block + "attention.q_norm.weight"])
                kh = rmsnorm(kh, w[block + "attention.k_norm.weight"])
            qh, kh = (turned_half_split(t[None, None], positions, config) for t in (qh, kh))
            heads.append(explicit_attention(qh, kh, vh[None, None], config.sliding_window)[0, 0])
        x = x + torch.cat(heads, dim=-1) @ w[block + "attention.o.weight"].T
        h = rmsnorm(x, w[block + "mlp_norm.weight"])
        gate, up = (h @ weight.T for weight in w[block + "mlp.gate_up.weight"].chunk(2))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[block + "mlp.down.weight"].T
    head = w["embed.weight"] if config.tied_embeddings else w["head.weight"]
    return rmsnorm(x, w["norm.weight"]) @ head.T


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_equals_the_definition_in_float64(shape: str) -> None:
    config = SHAPES[shape]
    model, tokens = lively_model(config, dtype=torch.float64), random_prompt(20, config.vocab_size)
    # Only the fp32 angles differ. Those of the first pair are whole numbers, so exact; the next turns by at most 20 x 0.22 and
    # is off by at most 16 u x 4.4 = 4e-6. Scores, of order |q| |k| / sqrt(D) = 5, move by 5 times that (measured: 2e-6).
    torch.testing.assert_close(
        logits_whole(model, torch.tensor([tokens]))[0], reference_logits(model, tokens), rtol=0, atol=2e-5
    )


def test_a_tied_head_is_the_embedding() -> None:
    model = Transformer(replace(SHAPES["llama"], tied_embeddings=True))
    assert model.head.weight is model.embed.weight
    assert sum(p.numel() for p in model.parameters()) == model.config.parameter_count
    model = model.half()  # casting keeps the tie
    assert model.head.weight is model.embed.weight


def test_an_untied_head_has_its_own_weights() -> None:
    model = Transformer(replace(SHAPES["llama"], tied_embeddings=False))
    assert model.head.weight.data_ptr() != model.embed.weight.data_ptr()
    assert sum(p.numel() for p in model.parameters()) == model.config.parameter_count


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_as_many_as_the_configuration_counts(shape: str) -> None:
    assert sum(p.numel() for p in Transformer(SHAPES[shape]).parameters()) == SHAPES[shape].parameter_count


def test_forward_is_the_head_applied_to_hidden() -> None:
    model = lively_model(SHAPES["qwen3"], dtype=torch.float64)
    tokens = torch.tensor([random_prompt(9, 97)])
    hidden = model.hidden(tokens, NoCache(model))
    assert hidden.shape == (1, 9, 32)
    assert torch.equal(model(tokens, NoCache(model)), hidden @ model.embed.weight.T)
    last = model.head(hidden[:, -1])  # what prefill computes
    torch.testing.assert_close(last, model(tokens, NoCache(model))[:, -1], rtol=0, atol=1e-13)


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model = lively_model(SHAPES["llama"], dtype=torch.float64)
    rows = [random_prompt(11, 97, seed) for seed in range(3)]
    together = logits_whole(model, torch.tensor(rows))
    for row, logits in zip(rows, together, strict=True):
        assert_same_logits(logits, logits_whole(model, torch.tensor([row]))[0])


def test_weights_carry_no_gradient() -> None:
    assert not any(p.requires_grad for p in lively_model(SHAPES["qwen2"]).parameters())


@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)])
def test_sixteen_bit_logits_stay_near_float32(dtype: torch.dtype, error: float) -> None:
    for shape, config in SHAPES.items():
        model, tokens = lively_model(config), torch.tensor([random_prompt(40, config.vocab_size)])
        exact = logits_whole(model, tokens)
        rounded = logits_whole(model.to(dtype), tokens).float()
        # About 30 roundings lie between a token and its logits (weights, products, norms, rotation, residual sums), of
        # random sign and amplified at most 16-fold (see helpers.rounding): sqrt(30) x 16 = 90 of them at the worst element.
        assert (rounded - exact).abs().max() <= 90 * error * exact.abs().max(), shape


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "mixtral", ""])
def test_an_unsupported_architecture_is_refused_by_name(architecture: str) -> None:
    with pytest.raises(MinillmError, match=f"llama-tiny is a {architecture} model; supported are llama, mistral"):
        Transformer(replace(SHAPES["llama"], architecture=architecture))


def test_the_known_gemma_shape_is_refused() -> None:
    with pytest.raises(MinillmError, match="gemma-3-270m is a gemma3 model"):
        Transformer(KNOWN_MODELS["gemma-3-270m"])
