"""Latent attention: both forms are one function, that of Hugging Face's DeepSeek models, and cost what the formulas say."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    assert_same_logits,
    enliven,
    is_one_sentence,
    logits_through,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)
from test_no_sync import watch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.errors import MinillmError, UsageError
from minillm.latent_config import KNOWN_LATENT_SHAPES, LatentConfig
from minillm.model import Transformer
from minillm.roofline.counting import Cost, count
from minillm.stages import STAGES, batching, kernels, mla, speculative, static_batching
from minillm.stages.drafters import ModelDrafter, NGramDrafter
from minillm.stages.mla import LatentCache, random_latent_model
from minillm.stages.quantization import SCHEMES, quantize
from minillm.stages.quantized_cache import QuantizedKVCache
from minillm.weights import random_model

VOCAB = 97
# No two sizes equal: 6 heads, d_r 8, d_c 20, d_nope 12. Values narrower than queries, as DeepSeek's, and wider.
SHAPES = {
    "one query matrix": LatentConfig("lite-tiny", 3, 36, 6, 1, 8, 48, VOCAB, 192, kv_rank=20, d_nope=12, d_v=10),
    "query latent": LatentConfig(
        "v3-tiny", 3, 36, 6, 1, 8, 48, VOCAB, 192, norm_eps=1e-6, kv_rank=20, d_nope=12, d_v=10, q_rank=24
    ),
    "wide values": LatentConfig("wide-tiny", 2, 32, 4, 1, 6, 48, VOCAB, 192, kv_rank=16, d_nope=10, d_v=24),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)
both_forms = pytest.mark.parametrize("absorbed", [True, False], ids=["absorbed", "expanded"])


def lively(config: LatentConfig, dtype: torch.dtype = torch.float64) -> Transformer:
    """As `helpers.lively_model`, with latent attention."""
    model = random_latent_model(config)
    enliven(model)
    return model.to(dtype)


@pytest.fixture(scope="module")
def models() -> dict[str, Transformer]:
    return {shape: lively(config) for shape, config in SHAPES.items()}


class Direct(LatentCache):
    """Section 2.1 of the paper, a head at a time, with no cache: what both forms are held to.

    A `LatentCache` by name only, as the model asks for one: nothing of that class is used.
    """

    def __init__(self, model: Transformer) -> None:
        self.model, self.config = model, model.config

    def positions(self, n_tokens: int) -> Tensor:
        return torch.arange(n_tokens)[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config: Any = self.config
        d_c, d_nope, d_v = config.kv_rank, config.d_nope, config.d_v
        weight = self.model.blocks[layer].attention.kv_up.weight
        c, k_rope = k[:, 0, :, :d_c], k[:, 0, :, d_c:]
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        heads = []
        for head in range(config.n_heads):
            rows = weight[head * (d_nope + d_v) : (head + 1) * (d_nope + d_v)]
            key, value = c @ rows[:d_nope].T, c @ rows[d_nope:].T  # (B, T, d_nope), (B, T, d_v)
            scores = q[:, head, :, :d_nope] @ key.mT + q[:, head, :, d_nope:] @ k_rope.mT
            scores = (scores / math.sqrt(d_nope + config.head_dim)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ value)
        return torch.stack(heads, dim=1)


@torch.inference_mode()
def direct_logits(model: Transformer, tokens: Tensor) -> Tensor:
    return model(tokens, Direct(model))


# --- One function ----------------------------------------------------------------------------------------------------


@every_shape
@both_forms
def test_prompt_in_chunks_of_every_size_equals_the_formulas_of_the_paper(
    shape: str, absorbed: bool, models: dict[str, Transformer]
) -> None:
    model, n, B = models[shape], 19, 3
    tokens = torch.tensor([random_prompt(n, VOCAB, seed) for seed in range(B)])
    expected = direct_logits(model, tokens)
    assert expected.abs().max() > 3  # logits that differ
    for size in range(1, n + 1):
        actual = logits_through(model, tokens, LatentCache(model, n + 2, B, absorbed), size)
        assert (actual - expected).abs().max() < 1e-10


@every_shape
def test_absorbed_equals_expanded_over_prefill_chunks_and_decode(shape: str, models: dict[str, Transformer]) -> None:
    model, sizes = models[shape], [40, 1, 1, 7, 30, 1, 20]
    tokens = torch.tensor([random_prompt(sum(sizes), VOCAB, seed) for seed in range(2)])
    with torch.inference_mode():
        absorbed, expanded = (LatentCache(model, 100, batch=2, absorbed=form) for form in (True, False))
        for chunk in tokens.split(sizes, dim=1):
            assert (model(chunk, absorbed) - model(chunk, expanded)).abs().max() < 1e-10
    assert absorbed.length == expanded.length == 100


@both_forms
def test_rows_of_a_batch_equal_rows_alone(absorbed: bool, models: dict[str, Transformer]) -> None:
    model, rows = models["query latent"], [random_prompt(13, VOCAB, seed) for seed in range(3)]
    together = logits_through(model, torch.tensor(rows), LatentCache(model, 13, 3, absorbed), size=4)
    for row, logits in zip(rows, together, strict=True):
        alone = logits_through(model, torch.tensor([row]), LatentCache(model, 13, 1, absorbed), size=4)
        assert (logits - alone[0]).abs().max() < 1e-10


@every_shape
def test_greedy_tokens_are_those_of_the_formulas_and_vary(shape: str, models: dict[str, Transformer]) -> None:
    model = models[shape]
    texts = []
    for seed in range(4):
        prompt = random_prompt(9, VOCAB, seed)
        text = mla.generate(model, prompt, 24).tokens
        logits = direct_logits(model, torch.tensor([prompt + text]))[0]
        assert text == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        texts.append(tuple(text))
    assert len(set(texts)) == 4
    assert min(len(set(text)) for text in texts) >= 6


class WrongScale(LatentCache):
    """Divides scores by the square root of what a query is multiplied with when absorbed, d_c + d_r."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(layer, q * (q.shape[3] / k.shape[3]) ** 0.5, k, v)


def test_the_scale_of_the_absorbed_query_would_show(models: dict[str, Transformer]) -> None:
    model, tokens = models["query latent"], torch.tensor([random_prompt(19, VOCAB)])
    wrong = logits_through(model, tokens, WrongScale(model, 19), size=1)
    assert (wrong - direct_logits(model, tokens)).abs().max() > 0.1


def test_random_model_is_the_same_for_a_seed_and_takes_nothing_from_others() -> None:
    config, state = SHAPES["query latent"], torch.random.get_rng_state()
    first, again, other = (random_latent_model(config, seed=seed).state_dict() for seed in (3, 3, 4))
    unasked, zero = random_latent_model(config).state_dict(), random_latent_model(config, seed=0).state_dict()
    assert all(torch.equal(unasked[name], zero[name]) for name in zero)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.1.attention.kv_up.weight"], other["blocks.1.attention.kv_up.weight"])
    assert torch.equal(torch.random.get_rng_state(), state)
    model = random_latent_model(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count
    assert not any(p.requires_grad for p in model.parameters())


def test_random_weights_have_the_size_that_keeps_activations_as_they_are() -> None:
    # 1 / sqrt(columns), and for what is added to the residual stream another 1 / sqrt(2 L). Of n normal numbers the standard
    # deviation is right to 1 / sqrt(2 n): at most 2.5 % here, and seven of those at n = 800.
    config = replace(SHAPES["query latent"], d_model=128, n_layers=3)
    for block in random_latent_model(config).blocks:
        for name, parameter in block.attention.named_parameters():
            if "norm" in name:
                assert (parameter == 1).all()
                continue
            columns = parameter.shape[1] * (6 if name == "o.weight" else 1)
            assert parameter.std().item() == pytest.approx(columns**-0.5, rel=7 / (2 * parameter.numel()) ** 0.5)
            assert abs(parameter.mean().item()) < 5 / (columns * parameter.numel()) ** 0.5


def test_random_weights_of_attention_repeat_none_of_the_others() -> None:
    # Drawn from one seed they would be the same numbers in the same order: a correlation of 1, where chance gives 1/8.
    model = random_latent_model(SHAPES["query latent"])
    first = {name: p.flatten()[:64] for name, p in model.named_parameters() if p.dim() == 2}
    attention = [name for name in first if ".attention." in name]
    for a in attention:
        for b in first.keys() - {a}:
            assert abs(torch.corrcoef(torch.stack([first[a], first[b]]))[0, 1]) < 0.7


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def halves_first(weight: Tensor, d_rope: int) -> Tensor:
    """Rows (..., d_rope, C) from the order of DeepSeek checkpoints, pairs side by side, to ours: first halves, then second."""
    return weight.unflatten(-2, (d_rope // 2, 2)).transpose(-3, -2).flatten(-3, -2)


@torch.no_grad()
def copy_weights(theirs: Any, ours: Transformer) -> None:
    config: Any = ours.config
    ours.embed.weight.copy_(theirs.model.embed_tokens.weight)
    ours.norm.weight.copy_(theirs.model.norm.weight)
    ours.head.weight.copy_(theirs.lm_head.weight)
    block: Any
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        attention, source = block.attention, layer.self_attn
        block.attention_norm.weight.copy_(layer.input_layernorm.weight)
        block.mlp_norm.weight.copy_(layer.post_attention_layernorm.weight)
        block.mlp.gate_up.weight.copy_(torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]))
        block.mlp.down.weight.copy_(layer.mlp.down_proj.weight)
        if config.q_rank is None:
            queries, into = source.q_proj.weight, attention.q.weight
        else:
            attention.q.down.weight.copy_(source.q_a_proj.weight)
            attention.q.norm.weight.copy_(source.q_a_layernorm.weight)
            queries, into = source.q_b_proj.weight, attention.q.up.weight
        nope, rope = queries.view(config.n_heads, config.d_qk, -1).split([config.d_nope, config.head_dim], dim=1)
        into.copy_(torch.cat([nope, halves_first(rope, config.head_dim)], dim=1).flatten(0, 1))
        c, rope = source.kv_a_proj_with_mqa.weight.split([config.kv_rank, config.head_dim])
        attention.kv_down.weight.copy_(torch.cat([c, halves_first(rope, config.head_dim)]))
        attention.kv_norm.weight.copy_(source.kv_a_layernorm.weight)
        attention.kv_up.weight.copy_(source.kv_b_proj.weight)
        attention.o.weight.copy_(source.o_proj.weight)


@pytest.fixture(scope="module", params=["DeepseekV2", "DeepseekV2, query latent", "DeepseekV3"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Transformer]]:
    """The same random weights in transformers, all layers dense, and here."""
    transformers = pytest.importorskip("transformers")
    family = request.param.split(",")[0]
    q_rank = None if request.param == "DeepseekV2" else 24
    config = replace(SHAPES["one query matrix"], norm_eps=1e-6, q_rank=q_rank)
    settings = getattr(transformers, family + "Config")(
        vocab_size=VOCAB, hidden_size=36, intermediate_size=48, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=192, first_k_dense_replace=3, rms_norm_eps=1e-6,
        kv_lora_rank=20, q_lora_rank=q_rank, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="eager",
    )  # fmt: skip
    theirs = getattr(transformers, family + "ForCausalLM")(settings).float().eval()
    ours = random_latent_model(config)
    enliven(theirs, seed=7)
    copy_weights(theirs, ours)
    yield theirs, ours


@both_forms
@pytest.mark.parametrize("size", [1, 7, 100])
def test_logits_equal_those_of_transformers(absorbed: bool, size: int, pair: tuple[Any, Transformer]) -> None:
    theirs, ours = pair
    tokens = torch.tensor([random_prompt(100, VOCAB, seed) for seed in range(2)])
    with torch.inference_mode():
        expected = theirs(tokens, use_cache=False).logits
    assert expected.abs().max() > 3
    assert_same_logits(logits_through(ours, tokens, LatentCache(ours, 100, 2, absorbed), size), expected)


def test_greedy_tokens_equal_those_of_transformers(pair: tuple[Any, Transformer]) -> None:
    theirs, ours = pair
    prompt = random_prompt(11, VOCAB, seed=5)
    answer = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0, use_cache=True
    )
    assert mla.generate(ours, prompt, 20).tokens == answer[0, 11:].tolist()


# --- What is stored ---------------------------------------------------------------------------------------------------


def test_bytes_per_token_of_the_known_shapes() -> None:
    lite, v3 = KNOWN_LATENT_SHAPES["deepseek-v2-lite"], KNOWN_LATENT_SHAPES["deepseek-v3"]
    assert lite.kv_bytes_per_token() == 27 * (512 + 64) * 2 == 31_104
    assert v3.kv_bytes_per_token() == 61 * (512 + 64) * 2 == 70_272
    assert lite.expanded_bytes_per_token() == 27 * 16 * (128 + 64 + 128) * 2 == 276_480
    assert v3.expanded_bytes_per_token() == 61 * 128 * (128 + 64 + 128) * 2 == 4_997_120


@pytest.mark.parametrize("name", KNOWN_LATENT_SHAPES)
@both_forms
def test_the_cache_takes_those_bytes_in_either_form(name: str, absorbed: bool) -> None:
    config = replace(KNOWN_LATENT_SHAPES[name], d_ff=1, vocab_size=2)  # attention is what is looked at
    model = random_latent_model(config, device="meta", dtype=torch.bfloat16)
    cache = LatentCache(model, capacity=1000, batch=2, absorbed=absorbed)
    tensors = [value for value in vars(cache).values() if isinstance(value, Tensor)]
    assert sum(x.nbytes for x in tensors) == 1000 * 2 * config.kv_bytes_per_token()
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    assert all(up.untyped_storage()._cdata in weights for up in cache.up)  # no copy of a weight


def test_what_the_famous_93_percent_is_made_of() -> None:
    """DeepSeek-V2 needs 93.3 % less cache than the 67B, a GQA model: 82.2 % by latents, the rest by storing them in 6 bits."""
    dense = ModelConfig("deepseek-67b", 95, 8192, 64, 8, 128, 22016, 102400, 4096).kv_bytes_per_token()
    latent = KNOWN_LATENT_SHAPES["deepseek-v2"].kv_bytes_per_token()
    in_6_bits = latent * 6 / 16
    assert (dense, latent, in_6_bits) == (389_120, 69_120, 25_920)
    assert round(100 * (1 - latent / dense), 1) == 82.2
    assert round(100 * (1 - in_6_bits / dense), 1) == 93.3


def test_a_latent_is_as_large_as_a_gqa_cache_of_two_and_a_quarter_groups() -> None:
    for config in KNOWN_LATENT_SHAPES.values():
        assert config.d_latent == 2.25 * 2 * config.d_nope


def test_a_cache_is_absorbed_unless_told_otherwise(models: dict[str, Transformer]) -> None:
    model = models["one query matrix"]

    def step(**form: bool) -> Cost:
        cache, tokens = LatentCache(model, 4, **form), torch.ones(1, 2, dtype=torch.int64)
        model(tokens, cache)
        return count(lambda: model(tokens[:, :1], cache))

    assert step().calls == step(absorbed=True).calls != step(absorbed=False).calls


@both_forms
def test_full_cache_refuses_and_keeps_what_it_has(absorbed: bool, models: dict[str, Transformer]) -> None:
    model, tokens = models["query latent"], torch.tensor([random_prompt(10, VOCAB)])
    cache = LatentCache(model, 10, absorbed=absorbed)
    with torch.inference_mode():
        model(tokens[:, :8], cache)
        before = cache.latents[:, :, :, :8].clone()
        with pytest.raises(MinillmError, match="holds 8 of 10 tokens and was asked for 3 more") as error:
            model(tokens[:, :3], cache)
        assert is_one_sentence(str(error.value))
        assert cache.length == 8
        assert torch.equal(cache.latents[:, :, :, :8], before)
        assert (model(tokens[:, 8:], cache) - direct_logits(model, tokens)[:, 8:]).abs().max() < 1e-10


def test_a_generation_makes_a_cache_of_exactly_the_capacity_that_it_needs(
    models: dict[str, Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Noted(LatentCache):
        def __init__(self, model: Transformer, capacity: int, batch: int = 1) -> None:
            super().__init__(model, capacity, batch)
            seen.append(capacity)

    monkeypatch.setattr(mla, "LatentCache", Noted)
    mla.generate(models["query latent"], [1, 2, 3], 5)
    assert seen == [7]  # the last new token is not fed


def plain() -> Transformer:
    return random_model(ModelConfig("plain", 1, 16, 2, 1, 8, 16, VOCAB, 32), dtype=torch.float64)


def test_a_model_without_latents_is_refused() -> None:
    for attempt in (lambda: LatentCache(plain(), 4), lambda: mla.generate(plain(), [1], 2)):
        with pytest.raises(UsageError, match="plain has no latent attention") as error:
            attempt()
        assert is_one_sentence(str(error.value))


OTHER_RUNS: dict[str, Callable[[Transformer], object]] = {
    name: lambda model, stage=stage: stage.generate(stage.prepared(model), [1, 2, 3], 4)
    for name, stage in STAGES.items()
}
OTHER_RUNS |= {
    "several at once": lambda model: batching.generate(model, [[1, 2, 3], [4]], 4),
    "several, padded": lambda model: static_batching.generate(model, [[1, 2, 3], [4]], 4),
    "n-gram look-up": lambda model: speculative.generate(model, [1, 2], 4, drafter=NGramDrafter()),
    "as a drafter": lambda model: speculative.generate(plain(), [1, 2], 4, drafter=ModelDrafter(model)),
    "kernels, not quantized": lambda model: kernels.generate(model, [1, 2], 4),
    "kernels, a prompt of one token": lambda model: kernels.generate(model, [1], 4),
    "an int8 cache": lambda model: logits_through(model, torch.tensor([[1]]), QuantizedKVCache(model, 4), size=1),
}
OTHER_RUNS |= {f"weights in {scheme}": lambda model, scheme=scheme: quantize(model, scheme) for scheme in SCHEMES}


@every_shape
@pytest.mark.parametrize("run", OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_a_stage_of_keys_and_values_refuses_latents(shape: str, run: Any, models: dict[str, Transformer]) -> None:
    with pytest.raises(UsageError, match="has latent attention") as error:
        run(models[shape])
    assert str(error.value).endswith("by stages.mla.") and is_one_sentence(str(error.value))


@pytest.mark.parametrize(
    "change",
    [{"kv_rank": 0}, {"d_nope": 0}, {"d_v": -1}, {"q_rank": 0}, {"n_kv_heads": 2}, {"sliding_window": 4},
     {"qkv_bias": True}, {"qk_norm": True}],
    ids=str,
)  # fmt: skip
def test_an_impossible_shape_is_refused(change: dict[str, Any]) -> None:
    words = "must be at least 1" if min(change.values()) < 1 else "has one KV head, and no q/k norm, bias or window"
    with pytest.raises(MinillmError, match=words) as error:
        replace(SHAPES["one query matrix"], **change)
    assert is_one_sentence(str(error.value))


def test_a_prompt_that_cannot_run_is_refused(models: dict[str, Transformer]) -> None:
    refused = (
        ([], 3, "is empty"),
        ([VOCAB], 3, "Token id 97"),
        ([1], 0, "ask for at least 1"),
        ([1] * 192, 2, "the 192 positions"),
    )
    for prompt, n, words in refused:
        with pytest.raises(UsageError, match=words):
            mla.generate(models["query latent"], prompt, n)


# --- What it costs ----------------------------------------------------------------------------------------------------


def attention_cost(
    config: LatentConfig,
    T: int,
    S: int,
    absorbed: bool,
    *,
    B: int = 1,
    device: str = "meta",
    dtype: Any = torch.bfloat16,
) -> Cost:
    """Attention of one layer: T new tokens, S in all."""
    model = random_latent_model(replace(config, n_layers=1, d_ff=1, vocab_size=2), device=device, dtype=dtype)
    cache = LatentCache(model, S, B, absorbed)
    cache.length = S
    q = torch.zeros(B, config.n_heads, T, config.d_qk, dtype=dtype, device=device)
    latent = torch.zeros(B, 1, T, config.d_latent, dtype=dtype, device=device)
    return count(lambda: cache.attend(0, q, latent, latent))


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 50), (20, 50), (50, 50)])
@every_shape
def test_flops_are_those_of_the_closed_forms(shape: str, T: int, S: int) -> None:
    config = SHAPES[shape]
    d_c, d_nope, d_r, d_v, Hq, B = config.kv_rank, config.d_nope, config.head_dim, config.d_v, config.n_heads, 2
    widest = max(d_nope + d_r, d_v)  # values are filled up to the size of keys
    expanded = B * Hq * (2 * (d_nope + d_r + widest) * T * S + 2 * d_c * (d_nope + d_v) * S)
    absorbed = B * Hq * (4 * (d_c + d_r) * T * S + 2 * d_c * (d_nope + d_v) * T)
    assert attention_cost(config, T, S, False, B=B).flops == expanded
    assert attention_cost(config, T, S, True, B=B).flops == (expanded if T == S else absorbed)


@pytest.mark.parametrize(("name", "needed"), [("deepseek-v3", 241.8), ("deepseek-v2-lite", 30.2)])
def test_intensity_of_absorbed_decode_approaches_its_formula(name: str, needed: float) -> None:
    config = KNOWN_LATENT_SHAPES[name]
    assert round(config.absorbed_intensity(), 1) == needed
    before = 0.0
    for S in (10_000, 100_000, 1_000_000, 10_000_000):
        cost = attention_cost(config, 1, S, absorbed=True)
        dropped = 2 * config.n_heads * config.head_dim * S  # FLOPs of values that are no values, the rotated keys
        intensity = (cost.flops - dropped) / cost.bytes
        assert before < intensity < config.absorbed_intensity()
        before = intensity
    assert before == pytest.approx(config.absorbed_intensity(), rel=0.005)
    assert cost.intensity == pytest.approx(2 * config.n_heads, rel=0.005)  # with them: 4 Hq over 2 bytes


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_a_cached_latent_is_read_once_for_all_heads(name: str) -> None:
    config = KNOWN_LATENT_SHAPES[name]

    def bytes_of_one_more(T: int, absorbed: bool) -> int:
        longer, shorter = (attention_cost(config, T, S, absorbed).bytes for S in (5001, 5000))
        return longer - shorter

    assert bytes_of_one_more(1, True) == config.d_latent * 2
    assert bytes_of_one_more(7, True) == config.d_latent * 2 + 4 * 7  # and of the mask: ones, tril and attention
    keys_values = config.n_heads * (config.d_qk + config.d_v) * 2
    assert bytes_of_one_more(1, False) > 2 * keys_values  # written and read


def test_decode_is_one_matrix_of_queries_on_one_head_of_keys() -> None:
    # Heads apart would count the same bytes, and take up to 24 times as long where the kernel loads the latents for each.
    cost = attention_cost(KNOWN_LATENT_SHAPES["deepseek-v3"], 1, 5000, absorbed=True)
    shapes = [op.shape for op, _ in cost if op.name == "scaled_dot_product_attention"]
    assert shapes == ["1x1x128x576, 1x1x5000x576, 1x1x5000x576"]


@pytest.mark.parametrize("name", KNOWN_LATENT_SHAPES)
def test_decode_is_cheaper_absorbed_and_long_passes_are_cheaper_expanded(name: str) -> None:
    def flops(T: int, S: int, absorbed: bool) -> int:
        return attention_cost(KNOWN_LATENT_SHAPES[name], T, S, absorbed).flops

    S = 100_000
    assert flops(1, S, False) > 100 * flops(1, S, True)
    assert flops(170, S, True) < flops(170, S, False)
    assert flops(172, S, True) > flops(172, S, False)
    assert flops(S - 1, S, True) > 2.9 * flops(S - 1, S, False)  # all but one token new: nearly a prefill
    assert flops(S, S, True) == flops(S, S, False)  # so a whole prompt is expanded


@pytest.mark.parametrize(
    ("T", "B", "absorbed"), [(1, 1, True), (1, 3, True), (5, 2, True), (1, 2, False), (20, 2, True)]
)
@every_shape
def test_meta_counts_what_the_cpu_counts(shape: str, T: int, B: int, absorbed: bool) -> None:
    meta, cpu = (
        attention_cost(SHAPES[shape], T, 20, absorbed, B=B, device=device, dtype=torch.float32)
        for device in ("meta", "cpu")
    )
    assert meta.calls == cpu.calls


@both_forms
def test_a_decode_step_exchanges_nothing_with_the_host(absorbed: bool) -> None:
    model = random_latent_model(SHAPES["query latent"], device="meta")
    cache, tokens = LatentCache(model, 12, absorbed=absorbed), torch.zeros(1, 9, dtype=torch.long, device="meta")
    with torch.inference_mode():
        model.hidden(tokens, cache)
        findings = watch(lambda: model.head(model.hidden(tokens[:, :1], cache)[:, -1]).argmax(-1))
    assert findings.faults == []
    assert findings.uploads == 0
    assert findings.operators > 3 * 15  # that something was watched


def test_a_generation_uploads_its_prompt_and_nothing_else() -> None:
    model = random_latent_model(SHAPES["one query matrix"], device="meta")
    findings = watch(lambda: mla.generate(model, list(range(9)), 5))
    assert findings.faults == []
    assert findings.uploads == 1
