"""What minillm itself predicts for a stage, quickly: the layers of a model are alike, so two are counted and the rest follows.

A prediction is a sum over operators (minillm/roofline/position.py). Of L layers it is that of one layer and L - 1 times the
difference that a second layer makes; no approximation is in it.
"""

from dataclasses import replace
from functools import cache

import numpy as np

from minillm.config import ModelConfig
from minillm.device import DTYPES
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.counting import count
from minillm.roofline.position import meta_twin, predict, predict_stage
from minillm.stages import known_stage
from minillm.stages.speculative_gain import pass_over


@cache
def decode_step_s(config: ModelConfig, ceilings: Ceilings, context: int) -> float:
    """Seconds of one decode step of the kv_cache stage that attends over `context` tokens, one sequence."""
    return _phases_s(config, ceilings, context, "kv_cache")[1]


@cache
def naive_step_s(config: ModelConfig, ceilings: Ceilings, length: int) -> float:
    """Seconds of the naive stage's pass over `length` tokens."""
    return _phases_s(config, ceilings, length, "naive")[0]


@cache
def speedup(config: ModelConfig, ceilings: Ceilings, n: int) -> float:
    """Predicted seconds of the naive stage over those of the kv_cache stage, for n tokens from an empty prompt.

    Steps are counted at a few lengths; between these, seconds are taken to grow in a straight line.
    """
    counted = [2, *(n * k // 6 for k in range(1, 7))]
    lengths = np.arange(2, n + 1)
    totals = [
        float(np.interp(lengths, counted, [step(config, ceilings, length) for length in counted]).sum())
        for step in (naive_step_s, decode_step_s)
    ]
    return totals[0] / totals[1]


@cache
def batch_gain(config: ModelConfig, ceilings: Ceilings, context: int, batch: int) -> float:
    """Tokens/s of `batch` users over those of one, in decode at `context` tokens, with one key and value for each KV head."""
    alone, together = (_phases_s(config, ceilings, context, "gqa", users)[1] for users in (1, batch))
    return batch * alone / together


@cache
def pass_s(config: ModelConfig, ceilings: Ceilings, n_tokens: int, context: int) -> float:
    """Seconds of one pass over `n_tokens` tokens after `context` cached ones: what speculation verifies, or a draft step."""

    def seconds(n_layers: int) -> float:
        model = meta_twin(replace(config, n_layers=n_layers), DTYPES[ceilings.dtype], context + n_tokens)
        return predict(count(pass_over(model, n_tokens, context)), ceilings)

    return of_all_layers(seconds(1), seconds(2), config)


def _phases_s(config: ModelConfig, ceilings: Ceilings, context: int, stage: str, batch: int = 1) -> tuple[float, float]:
    """Seconds of a prefill of `context` tokens, and of a decode step over as many."""
    one, two = (
        predict_stage(known_stage(stage), replace(config, n_layers=n), ceilings, context, batch) for n in (1, 2)
    )
    prefill, decode = (of_all_layers(a.predicted_s, b.predicted_s, config) for a, b in zip(one, two, strict=True))
    return prefill, decode


def of_all_layers(one: float, two: float, config: ModelConfig) -> float:
    """What a model takes, from what it would take with one layer and with two."""
    return one + (config.n_layers - 1) * (two - one)
