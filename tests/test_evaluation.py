"""The protocol that scores a model on a text: closed forms, and float64 written from the definitions."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import SHAPES, is_one_sentence, lively_model, logits_whole, random_prompt
from helpers import one_thread as one_thread

from minillm.errors import MinillmError, UsageError
from minillm.evaluation import compare, perplexity, prose
from minillm.model import Transformer
from minillm.stages.kv_cache import KVCache

V = 97


@pytest.fixture(scope="module")
def model() -> Transformer:
    return lively_model(SHAPES["llama3"])


@pytest.fixture(scope="module")
def other() -> Transformer:
    return lively_model(SHAPES["llama3"], seed=1)


def log_p(model: Transformer, window: list[int]) -> torch.Tensor:
    """(T-1, V) in float64: the whole window in one pass, all positions but the last."""
    return logits_whole(model, torch.tensor([window]))[0, :-1].double().log_softmax(-1)


@pytest.mark.parametrize("window", [2, 7, 20, 64])
@pytest.mark.parametrize("n", [2, 19, 21, 40, 41])
def test_scores_are_those_of_the_definition(window: int, n: int, model: Transformer, other: Transformer) -> None:
    tokens = random_prompt(n, V)
    nll, kl, agreed = [], [], []
    for start in range(0, n, window):
        piece = tokens[start : start + window]
        p, q = log_p(model, piece), log_p(other, piece)
        nll += [-row[token].item() for row, token in zip(q, piece[1:], strict=True)]
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        agreed += (p.argmax(-1) == q.argmax(-1)).tolist()
    scores = compare(model, other, tokens, window=window)
    assert scores.positions == len(nll)
    assert math.isclose(scores.perplexity, math.exp(sum(nll) / len(nll)), rel_tol=1e-4)
    assert math.isclose(scores.kl, sum(kl) / len(kl), rel_tol=1e-4)
    assert scores.agreement == sum(agreed) / len(agreed)
    assert math.isclose(perplexity(other, tokens, window=window), scores.perplexity, rel_tol=1e-6)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    blank = lively_model(SHAPES["llama3"])
    blank.head.weight.zero_()
    assert math.isclose(perplexity(blank, random_prompt(30, V)), V, rel_tol=1e-5)


def test_a_model_agrees_with_itself(model: Transformer) -> None:
    scores = compare(model, model, random_prompt(50, V))
    assert scores.kl == 0
    assert scores.agreement == 1


def test_divergence_is_from_the_reference_to_the_other(model: Transformer) -> None:
    # A blank model's distribution is uniform: KL(p || uniform) = ln V - H(p), and the other way round it is another number.
    blank, tokens = lively_model(SHAPES["llama3"]), random_prompt(30, V)
    blank.head.weight.zero_()
    p = log_p(model, tokens)
    entropy = -(p.exp() * p).sum(-1).mean().item()
    assert math.isclose(compare(model, blank, tokens).kl, math.log(V) - entropy, rel_tol=1e-4)


def test_any_cache_can_be_scored(model: Transformer) -> None:
    asked = []

    def cache(model: Transformer, capacity: int) -> KVCache:
        asked.append(capacity)
        return KVCache(model, capacity)

    tokens = random_prompt(30, V)
    assert math.isclose(
        perplexity(model, tokens, window=20, cache=cache), perplexity(model, tokens, window=20), rel_tol=1e-5
    )
    assert asked == [19, 9]  # the last token of a window is never fed


def test_the_text_is_plain_english_of_some_1200_words() -> None:
    words = prose().split()
    assert 1000 <= len(words) <= 1500
    assert prose().isascii()
    assert len(set(words)) > 400


def test_what_cannot_be_scored_is_refused_in_one_sentence(model: Transformer) -> None:
    larger = lively_model(replace(SHAPES["llama3"], vocab_size=V + 1))
    for call in (
        partial(perplexity, model, []),
        partial(perplexity, model, [3]),
        partial(perplexity, model, [3, V]),
        partial(perplexity, model, [3, 4], window=1),
        partial(perplexity, model, [3] * 193),
        partial(compare, model, larger, [3, 4]),
    ):
        with pytest.raises(MinillmError) as caught:
            call()
        assert type(caught.value) is UsageError
        assert is_one_sentence(str(caught.value))
