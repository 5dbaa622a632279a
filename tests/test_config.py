"""The table of shapes against published numbers, and configurations that cannot be."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers import is_one_sentence
from hypothesis import given
from hypothesis import strategies as st

from minillm.config import KNOWN_MODELS, SUPPORTED, ModelConfig, known_model, llama3_rope_factors
from minillm.errors import MinillmError, UsageError
from minillm.model import Transformer

# Name: (parameters as published, KV bytes a token in 16 bits, GB read for each decoded token in 16 bits, query heads a KV head)
PUBLISHED = {
    "smollm2-135m": (134_515_008, 23_040, 0.269, 3),
    "smollm2-360m": (361_821_120, 40_960, 0.724, 3),
    "smollm2-1.7b": (1_711_376_384, 196_608, 3.42, 1),
    "qwen3-0.6b": (596_049_920, 114_688, 1.19, 2),
    "qwen3-4b": (4_022_468_096, 147_456, 8.04, 4),
    "qwen3-8b": (8_190_735_360, 147_456, 15.14, 4),
    "llama-3-8b": (8_030_261_248, 131_072, 15.01, 4),
    "llama-3-70b": (70_553_706_496, 327_680, 139.01, 8),
    "llama-3.2-1b": (1_235_814_400, 32_768, 2.47, 4),
    "llama-2-7b": (6_738_415_616, 524_288, 13.21, 1),
    "llama-2-13b": (13_015_864_320, 819_200, 25.70, 1),
    "mistral-7b-v0.1": (7_241_732_096, 131_072, 14.22, 4),
    "gemma-3-270m": (268_098_176, 18_432, 0.536, 4),
}


def test_every_known_model_but_the_tiny_one_has_a_published_count() -> None:
    assert set(PUBLISHED) == set(KNOWN_MODELS) - {"tiny"}
    assert all(config.repo for name, config in KNOWN_MODELS.items() if name != "tiny")


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_gives_the_published_numbers(name: str) -> None:
    config = known_model(name)
    parameters, kv_bytes, read_gb, group = PUBLISHED[name]
    assert config.parameter_count == parameters
    assert config.kv_bytes_per_token() == kv_bytes
    assert config.kv_bytes_per_token(bytes_per_element=1) == kv_bytes // 2
    assert config.streamed_params * 2 / 1e9 == pytest.approx(read_gb, abs=0.6 * 10 ** -len(str(read_gb).split(".")[1]))
    assert config.group_size == group


@pytest.mark.parametrize("name", [name for name, config in KNOWN_MODELS.items() if config.architecture in SUPPORTED])
def test_transformer_has_the_parameters_that_its_config_counts(name: str) -> None:
    config = known_model(name)
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameter_count
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert linear == config.matmul_params


@pytest.mark.parametrize("changes", [{"qkv_bias": True}, {"qk_norm": True}, {"tied_embeddings": True}], ids=str)
def test_count_follows_bias_norm_and_tying(changes: dict[str, bool]) -> None:
    config = replace(known_model("tiny"), **changes)  # type: ignore[arg-type]
    assert sum(parameter.numel() for parameter in Transformer(config).parameters()) == config.parameter_count


def test_reading_a_tied_embedding_counts_it_and_an_untied_one_does_not() -> None:
    tiny = known_model("tiny")  # V x C = 320 x 32
    assert tiny.parameter_count - tiny.streamed_params == 320 * 32
    tied = replace(tiny, tied_embeddings=True)
    assert tied.streamed_params == tied.parameter_count == tiny.streamed_params


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"^Unknown model 'gpt-5': choose one of smollm2-135m, .*, tiny\.$"):
        known_model("gpt-5")


# Llama 3.2 1B: D = 64, theta 5e5, factor 32, low 1, high 4, 8192 positions.
FACTORS_3_2 = llama3_rope_factors(64, 5e5, 32.0, 1.0, 4.0, 8192)


def test_llama3_factors_keep_high_frequencies_and_divide_low_ones() -> None:
    # Frequency i turns 8192 / (2 pi 5e5^(i/32)) times: more than 4 up to i = 14 (4.17), less than 1 from i = 18 (0.81) on.
    assert FACTORS_3_2[:15] == (1.0,) * 15
    assert all(1.0 < factor < 32.0 for factor in FACTORS_3_2[15:18])
    assert FACTORS_3_2[18:] == (32.0,) * 14


def test_llama3_factors_blend_in_between() -> None:
    # As Llama 3.1's reference code writes it: s = (turns - low) / (high - low), frequency = (1 - s) f / 32 + s f.
    for i in (15, 16, 17):
        turns = 8192 / (2 * math.pi * 5e5 ** (i / 32))
        smooth = (turns - 1) / 3
        assert 1 / FACTORS_3_2[i] == pytest.approx((1 - smooth) / 32 + smooth, rel=1e-12)


@given(st.integers(1, 128), st.floats(1e3, 1e7), st.floats(1, 64), st.floats(0.5, 2), st.floats(2.5, 8))
def test_llama3_factors_rise_from_1_to_the_factor(
    half: int, theta: float, factor: float, low: float, high: float
) -> None:
    factors = llama3_rope_factors(2 * half, theta, factor, low, high, 8192)
    assert len(factors) == half
    # Four roundings make a factor, each of at most 2^-53 of it: so two that are equal may stand 2^-50 apart.
    assert all(a <= b * (1 + 2**-50) for a, b in pairwise(factors))
    assert factors[0] == 1.0  # 8192 / (2 pi) turns
    assert factors[-1] <= factor * (1 + 1e-12)


TINY = known_model("tiny")
IMPOSSIBLE: dict[str, tuple[Callable[[], ModelConfig], str]] = {
    "no layers": (lambda: replace(TINY, n_layers=0), "n_layers is 0"),
    "a million layers": (lambda: replace(TINY, n_layers=1_000_000), "n_layers is 1000000"),
    "negative width": (lambda: replace(TINY, d_model=-32), "d_model is -32"),
    "hostile width": (lambda: replace(TINY, d_model=2**62), "d_model is 4611686018427387904"),
    "hostile vocabulary": (lambda: replace(TINY, vocab_size=10**9), "vocab_size is 1000000000"),
    "a fraction": (lambda: replace(TINY, d_ff=64.0), "d_ff is 64.0"),  # type: ignore[arg-type]
    "a truth value": (lambda: replace(TINY, n_layers=True), "n_layers is True"),
    "text": (lambda: replace(TINY, n_heads="4"), "n_heads is '4'"),  # type: ignore[arg-type]
    "nothing": (lambda: replace(TINY, max_positions=None), "max_positions is None"),  # type: ignore[arg-type]
    "no KV heads": (lambda: replace(TINY, n_kv_heads=0), "n_kv_heads is 0"),
    "heads that do not divide": (lambda: replace(TINY, n_heads=4, n_kv_heads=3), "4 query heads do not divide into 3"),
    "more KV heads than heads": (lambda: replace(TINY, n_heads=2, n_kv_heads=4), "2 query heads do not divide into 4"),
    "odd head size": (lambda: replace(TINY, head_dim=7), "head_dim is 7"),
    "empty window": (lambda: replace(TINY, sliding_window=0), "sliding_window is 0"),
    "too few RoPE factors": (lambda: replace(TINY, rope_factors=(1.0,)), "1 RoPE factors for head_dim 8"),
    "a RoPE factor of 0": (lambda: replace(TINY, rope_factors=(1.0, 1.0, 0.0, 1.0)), "positive, finite numbers"),
    "negative theta": (lambda: replace(TINY, rope_theta=-1e4), "positive, finite numbers"),
    "infinite theta": (lambda: replace(TINY, rope_theta=math.inf), "positive, finite numbers"),
    "epsilon of 0": (lambda: replace(TINY, norm_eps=0.0), "positive, finite numbers"),
    "epsilon that is not a number": (lambda: replace(TINY, norm_eps=math.nan), "positive, finite numbers"),
    "theta as text": (lambda: replace(TINY, rope_theta="1e4"), "positive, finite numbers"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("make", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_shape_is_refused_in_one_sentence(make: Callable[[], ModelConfig], words: str) -> None:
    with pytest.raises(MinillmError) as error:
        make()
    assert str(error.value).startswith("tiny: ") and words in str(error.value)
    assert is_one_sentence(str(error.value))


def test_config_cannot_be_changed_after_its_check() -> None:
    with pytest.raises(AttributeError):
        TINY.n_layers = 0  # type: ignore[misc]
