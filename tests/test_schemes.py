"""What quantization does to a checkpoint: copies in other dtypes, bits, speed, and weights that were stored in 4 bits."""

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import SHAPES, lively_model
from helpers import one_thread as one_thread

from minillm import generation
from minillm.model import Transformer
from minillm.schemes import NEW_TOKENS, bits_per_weight, decode_rate, in_dtype, is_own_grid
from minillm.stages.gqa import GroupedKVCache


def test_a_bias_is_no_weight() -> None:
    model = lively_model(SHAPES["qwen2"])
    assert bits_per_weight(model) == 32


def test_a_copy_in_another_dtype_holds_every_weight() -> None:
    for shape in SHAPES.values():
        model = lively_model(shape)
        copied, expected = (
            in_dtype(model, torch.bfloat16).state_dict(),
            lively_model(shape).to(torch.bfloat16).state_dict(),
        )
        assert copied.keys() == expected.keys()
        assert all(torch.equal(copied[name], expected[name]) for name in expected)
        assert in_dtype(model, torch.float32) is model


def test_the_speed_is_one_token_in_the_median_gap_of_a_warm_run(monkeypatch: pytest.MonkeyPatch) -> None:
    warming = [0.0, 500.0, 1000.0]  # the start, and two tokens
    gaps = [50.0, 3.0] * 11 + [4.0]  # 23 of them: the median is 4 s
    moments = iter([*warming, *accumulate([2000.0, 700.0, *gaps])])
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    assert NEW_TOKENS == len(gaps) + 1
    assert decode_rate(lively_model(SHAPES["llama3"]), [3, 1, 4], GroupedKVCache) == 1 / 4.0
    assert next(moments, None) is None


def test_17_values_in_one_group_are_no_grid_of_4_bits() -> None:
    model = lively_model(replace(SHAPES["multi-query"], d_ff=128))
    for block in model.blocks:
        block.mlp.down.weight.copy_(torch.arange(128) % 16)  # type: ignore[union-attr, operator]
    assert is_own_grid(model, 32)
    model.blocks[1].mlp.down.weight[3, 40] = 16  # type: ignore[union-attr, index]
    assert not is_own_grid(model, 32)


def test_the_default_checkpoint_sits_on_a_grid_of_4_bits(smollm2: tuple[Transformer, Any]) -> None:
    assert is_own_grid(smollm2[0], 32)
    assert not is_own_grid(smollm2[0], 64)
