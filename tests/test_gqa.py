"""Grouped-query attention without expansion: the same function, a head map of its own, and conversions between head counts."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    SHAPES,
    assert_same_logits,
    is_one_sentence,
    lively_model,
    logits_through,
    logits_whole,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
    rounding,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm.config import ModelConfig
from minillm.errors import MinillmError, UsageError
from minillm.model import Transformer
from minillm.stages import gqa, kv_cache, naive
from minillm.stages.gqa import GroupedKVCache, decode_attention, with_kv_heads
from minillm.weights import named_parts

every_shape = pytest.mark.parametrize("shape", SHAPES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])

# --- The operator ----------------------------------------------------------------------------------------------------


def attention_by_definition(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, kv_head: Any) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, one sequence and one head at a time; `kv_head(h)` is the KV head that query head h reads."""
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[b, kv_head(h)], v[b, kv_head(h)]  # (S, D)
            scores = keys @ q[b, h, 0] / math.sqrt(q.shape[3])
            if visible is not None:
                scores = scores.masked_fill(~visible[b, 0, 0], -torch.inf)
            out[b, h, 0] = scores.softmax(dim=0) @ values
    return out


def operands(B: int, Hq: int, Hkv: int, D: int, S: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(B, H, n, D, generator=generator, dtype=torch.float64) for H, n in ((Hq, 1), (Hkv, S), (Hkv, S))
    )
    return 3 * q, k, v  # peaked: which key is meant shows


def close(actual: Tensor, expected: Tensor) -> bool:
    # Sums of at most 16 products and 70 weights of order 1 round by less than 100 units of 2e-16.
    return torch.allclose(actual, expected, rtol=0, atol=1e-12)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 16), st.integers(1, 70), st.booleans())
def test_decode_attention_is_attention_by_its_definition(
    B: int, Hkv: int, G: int, D: int, S: int, masked: bool
) -> None:
    q, k, v = operands(B, Hkv * G, Hkv, D, S)
    visible = None
    if masked:
        visible = torch.rand(B, 1, 1, S, generator=torch.Generator().manual_seed(1)) < 0.5
        visible[..., -1] = True  # a token sees itself
    out = decode_attention(q, k, v, visible)
    assert out.shape == q.shape
    assert close(out, attention_by_definition(q, k, v, visible, lambda h: h // G))


@pytest.mark.parametrize("Hq, Hkv", [(6, 2), (6, 3), (9, 3), (8, 2)])
def test_neighbouring_query_heads_share_a_kv_head(Hq: int, Hkv: int) -> None:
    q, k, v = operands(2, Hq, Hkv, 8, 20)
    G, out = Hq // Hkv, decode_attention(q, k, v)
    assert close(out, attention_by_definition(q, k, v, None, lambda h: h // G))
    repeated = attention_by_definition(q, k, v, None, lambda h: h % Hkv)  # what `repeat` would do
    assert (out - repeated).abs().max() > 0.1
    changed = k.clone()
    changed[:, 1] += torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    differs = (decode_attention(q, changed, v + changed - k) - out).abs().amax(dim=(0, 2, 3)) > 1e-3
    assert differs.tolist() == [G <= h < 2 * G for h in range(Hq)]


def test_decode_attention_takes_operands_of_any_stride() -> None:
    q, k, v = operands(3, 6, 2, 8, 11)
    expected = decode_attention(q, k, v)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert close(decode_attention(*turned), expected)
    roomy = [torch.full((3, 2, 64, 8), math.nan, dtype=torch.float64) for _ in "kv"]
    for room, x in zip(roomy, (k, v), strict=True):
        room[:, :, :11] = x
    assert close(decode_attention(q, *(room[:, :, :11] for room in roomy)), expected)


# --- The cache -------------------------------------------------------------------------------------------------------


@every_shape
@every_dtype
def test_logits_equal_uncached_ones_for_chunks_of_every_size(shape: str, dtype: torch.dtype) -> None:
    model, n = lively_model(SHAPES[shape], dtype=dtype), 19
    tokens = torch.tensor([random_prompt(n, 97, seed) for seed in range(2)])
    expected = logits_whole(model, tokens)
    for size in range(1, n + 1):
        assert_same_logits(logits_through(model, tokens, GroupedKVCache(model, n, batch=2), size), expected)


@every_shape
def test_logits_stay_equal_over_a_long_decode(shape: str) -> None:
    model, tokens = lively_model(SHAPES[shape], dtype=torch.float64), torch.tensor([random_prompt(150, 97)])
    assert_same_logits(logits_through(model, tokens, GroupedKVCache(model, 150), size=1), logits_whole(model, tokens))


@every_shape
def test_greedy_tokens_equal_naive_ones(shape: str) -> None:
    model = lively_model(SHAPES[shape])

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, 96), min_size=1, max_size=40), st.integers(1, 24))
    def check(prompt: list[int], n: int) -> None:
        assert gqa.generate(model, prompt, n).tokens == naive.generate(model, prompt, n).tokens

    check()


@pytest.mark.parametrize("window", [1, 2, 5, 12, 13, 40])
def test_a_window_counts_the_new_token_itself(window: int) -> None:
    model = lively_model(replace(SHAPES["mistral"], sliding_window=window), dtype=torch.float64)
    tokens = torch.tensor([random_prompt(30, 97)])
    expected = logits_whole(model, tokens)
    for size in (1, 7, 30):
        assert_same_logits(logits_through(model, tokens, GroupedKVCache(model, 30), size), expected)
    other = lively_model(replace(SHAPES["mistral"], sliding_window=window + 1), dtype=torch.float64)
    if window < 30:  # that one more or less would show
        actual = logits_through(other, tokens, GroupedKVCache(other, 30), size=1)
        assert (actual - expected).abs().max() > 1e3 * rounding(torch.float64, expected.abs().max().item())


@pytest.mark.parametrize("asked", [2, 3, 100])
def test_a_full_cache_says_so_before_it_writes_and_stays_usable(asked: int) -> None:
    model, tokens = lively_model(SHAPES["llama"], dtype=torch.float64), torch.tensor([random_prompt(10, 97)])
    cache = GroupedKVCache(model, 10)
    first = model(tokens[:, :9], cache)
    before = cache.keys[:, :, :, :9].clone(), cache.values[:, :, :, :9].clone()
    with pytest.raises(MinillmError) as error:
        model(torch.zeros(1, asked, dtype=torch.long), cache)
    assert is_one_sentence(str(error.value))
    assert f"holds 9 of 10 tokens and was asked for {asked} more" in str(error.value)
    assert torch.equal(cache.keys[:, :, :, :9], before[0]) and torch.equal(cache.values[:, :, :, :9], before[1])
    last = model(tokens[:, 9:], cache)  # what still fits goes on as if nothing had happened
    assert_same_logits(torch.cat([first, last], dim=1), logits_whole(model, tokens))
    with pytest.raises(MinillmError, match="holds 10 of 10 tokens and was asked for 1 more"):
        model(tokens[:, :1], cache)


@every_shape
@pytest.mark.parametrize("size", [1, 5, 14])
def test_unused_memory_never_leaks(shape: str, size: int) -> None:
    model, tokens = lively_model(SHAPES[shape]), torch.tensor([random_prompt(14, 97)])
    cache = GroupedKVCache(model, 40)
    cache.keys.fill_(math.nan)
    cache.values.fill_(math.nan)
    assert_same_logits(logits_through(model, tokens, cache, size), logits_whole(model, tokens))


@every_shape
def test_it_takes_g_times_less_memory_than_one_key_a_query_head(shape: str) -> None:
    model = lively_model(SHAPES[shape])
    grouped, expanded = GroupedKVCache(model, 10, batch=2), kv_cache.KVCache(model, 10, batch=2)
    config = model.config
    assert (
        grouped.keys.numel() == grouped.values.numel() == config.n_layers * 2 * config.n_kv_heads * 10 * config.head_dim
    )
    assert expanded.keys.nbytes == config.group_size * grouped.keys.nbytes


# --- Another number of KV heads --------------------------------------------------------------------------------------

CONVERTIBLE = {
    "llama": replace(SHAPES["llama"], n_heads=12, n_kv_heads=4),
    "biased": replace(SHAPES["qwen2"], n_heads=8, n_kv_heads=4),
    "normed": replace(SHAPES["qwen3"], n_heads=8, n_kv_heads=4),
    "windowed": replace(SHAPES["mistral"], n_heads=8, n_kv_heads=4),
}
every_convertible = pytest.mark.parametrize("config", CONVERTIBLE.values(), ids=CONVERTIBLE)


@every_convertible
def test_more_heads_compute_the_same_function(config: ModelConfig) -> None:
    model, tokens = lively_model(config, dtype=torch.float64), torch.tensor([random_prompt(20, 97)])
    for heads in (h for h in range(4, config.n_heads + 1) if config.n_heads % h == 0 and h % 4 == 0):
        more = with_kv_heads(model, heads)
        assert more.config.n_kv_heads == heads and more.dtype == torch.float64
        assert_same_logits(logits_whole(more, tokens), logits_whole(model, tokens))
        assert_same_logits(logits_through(more, tokens, GroupedKVCache(more, 20), 3), logits_whole(model, tokens))


@every_convertible
@every_dtype
def test_pooling_copies_of_heads_gives_the_original_back(config: ModelConfig, dtype: torch.dtype) -> None:
    model = lively_model(config, dtype=dtype)
    back = with_kv_heads(with_kv_heads(model, config.n_heads), config.n_kv_heads)
    assert back.config == model.config
    for name, part in named_parts(back).items():  # the mean of equal numbers may round by one unit
        torch.testing.assert_close(part, named_parts(model)[name], rtol=torch.finfo(dtype).eps, atol=0)


@every_convertible
@every_dtype
@pytest.mark.parametrize("heads", [1, 2])
def test_fewer_heads_are_the_means_of_neighbours_and_all_else_stays(
    config: ModelConfig, dtype: torch.dtype, heads: int
) -> None:
    model = lively_model(config, dtype=dtype)
    before, after = named_parts(model), named_parts(with_kv_heads(model, heads))
    D, pool = config.head_dim, config.n_kv_heads // heads
    assert before.keys() == after.keys()
    for name, part in after.items():
        if ".k_proj." not in name and ".v_proj." not in name:
            assert torch.equal(part, before[name]), name
            continue
        assert len(part) == heads * D
        for head in range(heads):
            rows = [before[name][(head * pool + i) * D : (head * pool + i + 1) * D].double() for i in range(pool)]
            # Within the rounding of this dtype: the sum of up to 4 numbers, some of which cancel.
            expected = (sum(rows) / pool).to(dtype)
            atol = 4 * torch.finfo(dtype).eps * before[name].abs().max().item()
            torch.testing.assert_close(part[head * D : (head + 1) * D], expected, rtol=0, atol=atol)
    assert any("bias" in name for name in after) == config.qkv_bias


def test_a_mean_in_16_bits_is_taken_in_32() -> None:
    model = lively_model(CONVERTIBLE["llama"], dtype=torch.bfloat16)
    pooled = named_parts(with_kv_heads(model, 1))["model.layers.1.self_attn.v_proj.weight"]
    heads = named_parts(model)["model.layers.1.self_attn.v_proj.weight"].view(4, 8, -1)
    assert torch.equal(pooled, heads.double().mean(dim=0).to(torch.bfloat16))
    by_steps = (((heads[0] + heads[1]) + heads[2]) + heads[3]) / 4
    assert not torch.equal(pooled, by_steps)  # that it would show


@every_convertible
@pytest.mark.parametrize("heads", [1, 2, 4, "all"])
def test_a_converted_model_shares_nothing_with_the_original(config: ModelConfig, heads: Any) -> None:
    model = lively_model(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    converted = with_kv_heads(model, config.n_heads if heads == "all" else heads)
    ours, theirs = ({p.untyped_storage().data_ptr() for p in m.parameters()} for m in (model, converted))
    assert not ours & theirs
    for parameter in converted.parameters():
        parameter.fill_(7.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    tokens = torch.tensor([random_prompt(5, 97)])
    expected = logits_whole(with_kv_heads(model, 2), tokens)
    other = with_kv_heads(model, 2)
    for parameter in model.parameters():
        parameter.fill_(7.0)
    assert torch.equal(logits_whole(other, tokens), expected)


def test_tied_embeddings_stay_tied() -> None:
    model = with_kv_heads(lively_model(replace(SHAPES["llama"], tied_embeddings=True)), 1)
    assert model.head.weight is model.embed.weight


@every_convertible
@pytest.mark.parametrize("heads", [1, 4])
def test_a_converted_model_generates_the_same_in_every_cache(config: ModelConfig, heads: int) -> None:
    model, prompt = with_kv_heads(lively_model(config, dtype=torch.float64), heads), random_prompt(9, 97)
    expected = naive.generate(model, prompt, 12).tokens
    assert kv_cache.generate(model, prompt, 12).tokens == gqa.generate(model, prompt, 12).tokens == expected


@pytest.mark.parametrize("heads", [0, -1, 3, 5, 6, 8, 24, 2.5, "2", None, [2]])
def test_an_impossible_number_of_heads_is_refused(heads: Any) -> None:
    model = lively_model(CONVERTIBLE["llama"])  # 12 query heads on 4 KV heads
    with pytest.raises(UsageError) as error:
        with_kv_heads(model, heads)
    assert "has 12 query heads on 4 KV heads, which cannot become" in str(error.value)
    assert "choose one of 1, 2, 4, 12." in str(error.value)
    assert is_one_sentence(str(error.value))


def test_the_number_of_heads_may_be_one_of_numpy() -> None:
    model: Transformer = lively_model(CONVERTIBLE["llama"])
    assert with_kv_heads(model, np.int64(2)).config.n_kv_heads == 2  # type: ignore[arg-type]
