"""Every stage: the same tokens, whatever the cache, the chunks, the capacity or the request before."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import (
    PLAIN_STAGES,
    SHAPES,
    STAGES,
    Columns,
    assert_same_logits,
    fresh_memory_full_of_nan,
    is_one_sentence,
    lively_model,
    logits_through,
    logits_whole,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm import stages
from minillm.errors import MinillmError, UsageError
from minillm.generation import Generation, Recorder
from minillm.model import Transformer
from minillm.sampling import Sampler, greedy
from minillm.stages import gqa, kv_cache, naive
from minillm.stages.kv_cache import KVCache

DTYPES = [torch.float32, torch.float64]
Stage = Callable[..., Generation]
Models = dict[tuple[str, torch.dtype], Transformer]

every_shape = pytest.mark.parametrize("shape", SHAPES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])
every_stage = pytest.mark.parametrize("generate", STAGES.values(), ids=STAGES)


@pytest.fixture(scope="module")
def models() -> Models:
    return {(shape, dtype): lively_model(SHAPES[shape], dtype=dtype) for shape in SHAPES for dtype in DTYPES}


@pytest.fixture(scope="module")
def model(models: Models) -> Transformer:
    return models["llama", torch.float64]


# --- The same tokens and logits --------------------------------------------------------------------------------------


@every_shape
@every_dtype
def test_cached_greedy_tokens_equal_naive_ones(shape: str, dtype: torch.dtype, models: Models) -> None:
    model = models[shape, dtype]

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, model.config.vocab_size - 1), min_size=1, max_size=40), st.integers(1, 24))
    def check(prompt: list[int], n: int) -> None:
        expected = naive.generate(model, prompt, n).tokens
        assert len(expected) == n
        assert kv_cache.generate(model, prompt, n).tokens == expected

    check()


@every_shape
def test_naive_tokens_are_the_argmax_after_each_prefix(shape: str, models: Models) -> None:
    model, tokens = models[shape, torch.float64], random_prompt(7, 97)
    for token in naive.generate(model, tokens, 12).tokens:
        assert token == logits_whole(model, torch.tensor([tokens]))[0, -1].argmax().item()
        tokens.append(token)


@every_shape
def test_generated_tokens_vary(shape: str, models: Models) -> None:
    # Equal tokens would prove little of a model that says one word for ever, as small random ones like to do.
    texts = [
        tuple(kv_cache.generate(models[shape, torch.float32], random_prompt(9, 97, seed), 24).tokens)
        for seed in range(4)
    ]
    assert len(set(texts)) == 4
    assert min(len(set(text)) for text in texts) >= 6


@every_shape
@every_dtype
def test_cached_logits_equal_uncached_ones_at_every_position(shape: str, dtype: torch.dtype, models: Models) -> None:
    model, tokens = models[shape, dtype], torch.tensor([random_prompt(80, 97)])
    assert_same_logits(logits_through(model, tokens, KVCache(model, 80), size=1), logits_whole(model, tokens))


@every_shape
@every_dtype
def test_prompt_in_chunks_of_every_size_equals_whole_prefill(shape: str, dtype: torch.dtype, models: Models) -> None:
    model, n = models[shape, dtype], 19
    tokens = torch.tensor([random_prompt(n, 97, seed=3)])
    expected = logits_whole(model, tokens)
    for size in range(1, n + 1):
        assert_same_logits(logits_through(model, tokens, KVCache(model, n), size), expected)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.sampled_from(sorted(SHAPES)))
def test_prompt_in_uneven_chunks_equals_whole_prefill(sizes: list[int], shape: str) -> None:
    model, n = lively_model(SHAPES[shape], dtype=torch.float64), sum(sizes)
    tokens, cache = torch.tensor([random_prompt(n, 97)]), KVCache(model, n)
    actual = torch.cat([model(chunk, cache) for chunk in tokens.split(sizes, dim=1)], dim=1)
    assert_same_logits(actual, logits_whole(model, tokens))


def test_rows_of_a_batched_cache_equal_rows_alone(model: Transformer) -> None:
    rows = [random_prompt(13, 97, seed) for seed in range(3)]
    together = logits_through(model, torch.tensor(rows), KVCache(model, 13, batch=3), size=5)
    for row, logits in zip(rows, together, strict=True):
        assert_same_logits(logits, logits_whole(model, torch.tensor([row]))[0])


@pytest.mark.parametrize("stage", PLAIN_STAGES.values(), ids=PLAIN_STAGES)
@every_shape
def test_prompts_run_in_lockstep_give_what_each_gives_alone(stage: Any, shape: str, models: Models) -> None:
    model, recorder = models[shape, torch.float64], Columns()
    prompts = [random_prompt(8, 97, seed) for seed in range(3)]
    with torch.inference_mode():
        stage.run(model, torch.tensor(prompts), 12, greedy, recorder)
    expected = [naive.generate(model, prompt, 12).tokens for prompt in prompts]
    assert recorder.rows == expected


@every_stage
def test_a_sampler_with_a_seed_gives_the_same_text_in_every_stage(generate: Stage, model: Transformer) -> None:
    sampler, prompt = Sampler(temperature=0.9, top_p=0.95, seed=5), random_prompt(6, 97)
    expected = naive.generate(model, prompt, 20, sampler=Sampler(temperature=0.9, top_p=0.95, seed=5)).tokens
    assert generate(model, prompt, 20, sampler=sampler).tokens == expected
    assert generate(model, prompt, 20, sampler=sampler).tokens == expected  # the second request starts the seed anew
    assert generate(model, prompt, 20, sampler=Sampler(temperature=0.9, top_p=0.95, seed=6)).tokens != expected
    assert generate(model, prompt, 20).tokens != expected


# --- Positions -------------------------------------------------------------------------------------------------------


class Watched(KVCache):
    """Notes the positions that the model is given."""

    def __init__(self, model: Transformer, capacity: int, batch: int = 1) -> None:
        super().__init__(model, capacity, batch)
        self.seen: list[list[int]] = []

    def positions(self, n_tokens: int) -> Tensor:
        positions = super().positions(n_tokens)
        self.seen.append(positions.flatten().tolist())
        return positions


@pytest.mark.parametrize("sizes", [[5], [1, 1, 1], [3, 1, 1], [4, 2, 7, 1]])
def test_position_of_a_new_token_is_the_number_of_tokens_before_it(sizes: list[int], model: Transformer) -> None:
    cache = Watched(model, sum(sizes))
    for chunk in torch.tensor([random_prompt(sum(sizes), 97)]).split(sizes, dim=1):
        model(chunk, cache)
    assert [position for seen in cache.seen for position in seen] == list(range(sum(sizes)))
    assert [len(positions) for positions in cache.seen] == sizes


def test_generation_decodes_at_the_positions_after_the_prompt(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Watched] = []

    def make(*args: object, **kwargs: object) -> Watched:
        made.append(Watched(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(kv_cache, "KVCache", make)
    kv_cache.generate(model, random_prompt(4, 97), 5)
    # One prefill; the last token is not fed.
    assert [cache.seen for cache in made] == [[[0, 1, 2, 3], [4], [5], [6], [7]]]


def test_a_decode_position_off_by_one_changes_the_logits(model: Transformer) -> None:
    # That the comparisons above can tell: the same cache, with decode one position late.
    class Late(KVCache):
        def positions(self, n_tokens: int) -> Tensor:
            late = self.length > 0
            return super().positions(n_tokens) + late

    tokens = torch.tensor([random_prompt(12, 97)])
    with pytest.raises(AssertionError):
        assert_same_logits(logits_through(model, tokens, Late(model, 12), size=11), logits_whole(model, tokens))


# --- Capacity and memory ---------------------------------------------------------------------------------------------


def test_a_cache_of_exactly_enough_capacity_works(model: Transformer) -> None:
    tokens = torch.tensor([random_prompt(10, 97)])
    assert_same_logits(logits_through(model, tokens, KVCache(model, 10), size=3), logits_whole(model, tokens))


@pytest.mark.parametrize("asked", [2, 3, 100])
def test_a_full_cache_says_so_in_one_sentence_and_stays_usable(asked: int, model: Transformer) -> None:
    tokens = torch.tensor([random_prompt(10, 97)])
    cache = KVCache(model, 10)
    first = model(tokens[:, :9], cache)
    before = cache.keys[..., :9, :].clone(), cache.values[..., :9, :].clone()
    with pytest.raises(MinillmError) as error:
        model(torch.zeros(1, asked, dtype=torch.long), cache)
    assert is_one_sentence(str(error.value))
    assert f"holds 9 of 10 tokens and was asked for {asked} more" in str(error.value)
    assert cache.length == 9
    assert torch.equal(cache.keys[..., :9, :], before[0]) and torch.equal(cache.values[..., :9, :], before[1])
    last = model(tokens[:, 9:], cache)  # what still fits goes on as if nothing had happened
    assert_same_logits(torch.cat([first, last], dim=1), logits_whole(model, tokens))
    with pytest.raises(MinillmError, match="holds 10 of 10 tokens and was asked for 1 more"):
        model(tokens[:, :1], cache)


@every_stage
def test_prompt_and_answer_may_fill_the_model_positions_exactly(generate: Stage, model: Transformer) -> None:
    positions = model.config.max_positions  # the last new token is never fed back, so it needs no position
    assert len(generate(model, random_prompt(positions - 2, 97), 3)) == 3
    assert len(generate(model, random_prompt(positions, 97), 1)) == 1
    with pytest.raises(UsageError, match=f"passes the {positions} positions"):
        generate(model, random_prompt(positions - 2, 97), 4)


@pytest.mark.parametrize(("stage", "kind"), [(kv_cache, "KVCache"), (gqa, "GroupedKVCache")], ids=["kv_cache", "gqa"])
def test_a_generation_makes_a_cache_of_exactly_the_capacity_that_it_needs(
    stage: Any, kind: str, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    right = getattr(stage, kind)

    def make(model: Transformer, capacity: int, batch: int = 1) -> Any:
        seen.append(capacity)
        return right(model, capacity, batch)

    monkeypatch.setattr(stage, kind, make)
    stage.generate(model, [1, 2, 3], 5)
    assert seen == [7]  # the last new token is not fed


def test_only_decode_steps_of_gqa_load_a_key_once_a_group(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    right, widths = gqa.decode_attention, []

    def noted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        widths.append(q.shape[2])
        return right(q, k, v)

    monkeypatch.setattr(gqa, "decode_attention", noted)
    gqa.generate(model, [1, 2, 3], 5)
    assert widths == [1] * 4 * model.config.n_layers


@every_shape
@pytest.mark.parametrize("spare", [1, 3, 64])
def test_results_do_not_depend_on_spare_capacity(shape: str, spare: int, models: Models) -> None:
    model, tokens = models[shape, torch.float32], torch.tensor([random_prompt(21, 97)])
    exact_fit = logits_through(model, tokens, KVCache(model, 21), size=8)
    assert torch.equal(logits_through(model, tokens, KVCache(model, 21 + spare), size=8), exact_fit)


@every_shape
@pytest.mark.parametrize("size", [1, 5, 14])
def test_unused_cache_memory_never_leaks(shape: str, size: int, models: Models) -> None:
    model, tokens = models[shape, torch.float32], torch.tensor([random_prompt(14, 97)])
    cache = KVCache(model, 40)
    cache.keys.fill_(math.nan)
    cache.values.fill_(math.nan)
    assert_same_logits(logits_through(model, tokens, cache, size), logits_whole(model, tokens))


@every_stage
def test_generation_from_memory_full_of_nan_equals_generation_from_any(generate: Stage, model: Transformer) -> None:
    prompt = random_prompt(6, 97)
    expected = generate(model, prompt, 10).tokens
    with fresh_memory_full_of_nan():
        assert generate(model, prompt, 10).tokens == expected


def test_a_cache_takes_what_two_l_hq_d_elements_a_token_take(model: Transformer) -> None:
    cache, config = KVCache(model, 10, batch=2), model.config
    assert cache.keys.numel() + cache.values.numel() == 2 * 10 * 2 * config.n_layers * config.n_heads * config.head_dim
    assert cache.keys.dtype == cache.values.dtype == model.dtype


# --- One request does not see another --------------------------------------------------------------------------------


@every_stage
def test_a_second_request_does_not_see_the_first(generate: Stage) -> None:
    fresh, used = (lively_model(SHAPES["llama"], dtype=torch.float64) for _ in range(2))
    first, second = random_prompt(30, 97, seed=1), random_prompt(5, 97, seed=2)
    expected = generate(fresh, second, 12).tokens
    generate(used, first, 20)
    assert generate(used, second, 12).tokens == expected
    assert generate(used, second, 12).tokens == expected


@every_stage
def test_requests_leave_prompt_and_model_as_they_were(generate: Stage, model: Transformer) -> None:
    prompt = random_prompt(5, 97)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    generate(model, tuple(prompt), 6, sampler=Sampler(seed=1))
    given = list(prompt)
    generate(model, given, 6)
    assert given == prompt
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


# --- What generate returns -------------------------------------------------------------------------------------------


@every_stage
def test_generation_stops_after_the_first_stop_token_and_keeps_it(generate: Stage, model: Transformer) -> None:
    prompt = random_prompt(5, 97)
    free = generate(model, prompt, 20).tokens
    for stops in ({free[0]}, {free[7]}, {free[4], free[11]}, [free[15], free[9]], (free[19],)):
        expected = free[: min(free.index(stop) for stop in stops) + 1]
        seen: list[int] = []
        generation = generate(model, prompt, 20, stop_tokens=stops, on_token=seen.append)
        assert generation.tokens == seen == expected
        assert len(generation) == len(generation.times) == len(expected)


@every_stage
def test_a_stop_token_that_never_comes_changes_nothing(generate: Stage, model: Transformer) -> None:
    prompt = random_prompt(5, 97)
    free = generate(model, prompt, 20).tokens
    unseen = next(token for token in range(97) if token not in free and token in prompt)  # nor does one in the prompt
    assert generate(model, prompt, 20, stop_tokens={unseen}).tokens == free


@every_stage
def test_on_token_gets_every_token_in_order_as_it_comes(generate: Stage, model: Transformer) -> None:
    log: list[tuple[str, int]] = []

    def sampler(logits: Tensor) -> Tensor:
        log.append(("sampled", int(greedy(logits))))
        return greedy(logits)

    generation = generate(
        model, random_prompt(5, 97), 8, sampler=sampler, on_token=lambda token: log.append(("seen", token))
    )
    assert log == [event for token in generation.tokens for event in (("sampled", token), ("seen", token))]
    assert all(type(token) is int for token in generation.tokens)


@every_stage
@pytest.mark.parametrize("n", [1, 2, 17])
def test_times_increase_and_there_is_one_a_token(generate: Stage, n: int, model: Transformer) -> None:
    start = time.perf_counter()
    generation = generate(model, random_prompt(5, 97), n)
    elapsed = time.perf_counter() - start
    assert len(generation) == len(generation.tokens) == len(generation.times) == n
    assert all(a < b for a, b in zip([0.0, *generation.times], [*generation.times, elapsed], strict=True))


def test_one_stage_is_launched_and_the_others_wait_for_the_host() -> None:
    assert [name for name, stage in stages.STAGES.items() if stage.launched] == ["kernels"]
    assert not stages.Stage(gqa.generate, gqa.run).launched  # a stage of one's own


def test_a_request_that_has_not_begun_has_no_tokens_and_no_times() -> None:
    generation = Recorder(torch.device("cpu")).finish()
    assert generation.tokens == generation.times == [] and len(generation) == 0


@every_stage
def test_times_count_from_the_beginning_of_the_call(generate: Stage, model: Transformer) -> None:
    class SlowPrompt(list[int]):
        def __iter__(self) -> Iterator[int]:
            time.sleep(0.1)
            return super().__iter__()

    # Checking the prompt is part of what the reader waits for. Without the 100 ms a tiny model's token takes a few.
    assert generate(model, SlowPrompt([3, 1, 4]), 1).times[0] >= 0.1


@every_stage
def test_a_sampler_sees_float_logits_of_the_last_position_only(generate: Stage, model: Transformer) -> None:
    shapes = []

    def sampler(logits: Tensor) -> Tensor:
        shapes.append(tuple(logits.shape))
        return greedy(logits)

    generate(model, random_prompt(5, 97), 3, sampler=sampler)
    assert shapes == [(1, 97)] * 3


# --- Bad requests ----------------------------------------------------------------------------------------------------

BAD_REQUESTS = {
    "empty prompt": ([], 5, "prompt is empty"),
    "token id too large": ([1, 97], 5, "97 is not a whole number from 0 to 96"),
    "negative token id": ([1, -1], 5, "-1 is not a whole number from 0 to 96"),
    "huge token id": ([2**70], 5, "is not a whole number from 0 to 96"),
    "fraction": ([1, 2.5], 5, "2.5 is not a whole number"),
    "text as token id": (["a"], 5, "'a' is not a whole number"),
    "None": ([None], 5, "None is not a whole number"),
    "text as prompt": ("hello", 5, "'h' is not a whole number"),
    "batch as prompt": (torch.ones(1, 5000, dtype=torch.int64), 5, "is not a whole number"),
    "tensor of fractions": (torch.ones(3), 5, "tensor(1.) is not a whole number"),
    "prompt too long": ([1] * 193, 1, "193 tokens with 1 new ones passes the 192 positions"),
    "answer too long": ([1] * 100, 94, "100 tokens with 94 new ones passes the 192 positions"),
    "no new tokens": ([1, 2], 0, "max_new_tokens is 0"),
    "negative count": ([1, 2], -1, "max_new_tokens is -1"),
    "fractional count": ([1, 2], 2.5, "max_new_tokens is 2.5"),
    "count as text": ([1, 2], "3", "max_new_tokens is '3'"),
}


@every_stage
@pytest.mark.parametrize("prompt, n, message", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_refused_in_one_sentence(
    generate: Stage, prompt: Any, n: Any, message: str, model: Transformer
) -> None:
    seen: list[int] = []
    with pytest.raises(UsageError) as error:
        generate(model, prompt, n, on_token=seen.append)
    assert message in str(error.value)
    assert is_one_sentence(str(error.value))
    assert seen == []


@every_stage
@pytest.mark.parametrize("token", [0, 96])
def test_the_first_and_the_last_token_id_are_accepted(generate: Stage, token: int, model: Transformer) -> None:
    assert len(generate(model, [token], 2).tokens) == 2


@every_stage
def test_ids_may_be_those_of_numpy_and_of_tensors(generate: Stage, model: Transformer) -> None:
    expected = generate(model, [3, 1, 4], 3).tokens
    for prompt in ((3, 1, 4), np.array([3, 1, 4]), torch.tensor([3, 1, 4]), torch.tensor([3, 1, 4], dtype=torch.int32)):
        assert generate(model, cast(Any, prompt), cast(Any, np.int64(3))).tokens == expected


@every_stage
def test_stop_tokens_may_be_any_collection_of_ids(generate: Stage, model: Transformer) -> None:
    tokens = generate(model, [3, 1, 4], 6).tokens
    until = tokens[: tokens.index(tokens[2]) + 1]
    stop = tokens[2]
    for collection in ([stop], (stop,), {stop}, {stop: "end"}, np.array([stop]), torch.tensor([stop, 96])):
        assert generate(model, [3, 1, 4], 6, stop_tokens=cast(Any, collection)).tokens == until


@every_stage
@pytest.mark.parametrize("stop", [7, None, ["</s>"], [1.5]])
def test_stop_tokens_that_are_no_collection_of_ids_are_refused(generate: Stage, stop: Any, model: Transformer) -> None:
    with pytest.raises(UsageError, match="give a collection of token ids") as error:
        generate(model, [3, 1, 4], 6, stop_tokens=stop)
    assert is_one_sentence(str(error.value))


def test_a_stage_runs_the_model_as_it_is_or_as_it_prepares_it() -> None:
    plain = lively_model(SHAPES["llama"])
    assert stages.known_stage("gqa").prepared(plain) is plain
    assert stages.known_stage("quantization").prepared(plain) is not plain
    stages._int8_drafter.cache_clear()
    assert stages.known_stage("speculative").prepared(plain) is plain
    assert stages._int8_drafter.cache_info().currsize == 1  # its twin is made before the clock starts
    stages._int8_drafter.cache_clear()


def test_an_unknown_stage_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="Unknown stage 'gpa': choose one of naive, kv_cache, gqa") as error:
        stages.known_stage("gpa")
    assert is_one_sentence(str(error.value))


# --- Shapes without numbers ------------------------------------------------------------------------------------------


@every_stage
@every_shape
def test_every_stage_runs_on_meta_and_has_no_tokens_there(generate: Stage, shape: str) -> None:
    generation = generate(lively_model(SHAPES[shape]).to("meta"), random_prompt(9, 97), 4)
    assert len(generation) == len(generation.times) == 4
    with pytest.raises(MinillmError, match="on the meta device has shapes but no tokens") as error:
        _ = generation.tokens
    assert is_one_sentence(str(error.value))


@pytest.mark.parametrize("stage", STAGES)
def test_a_seeded_sampler_runs_on_meta(stage: str) -> None:
    model = lively_model(SHAPES["llama"]).to("meta")
    assert len(STAGES[stage](model, [1, 2], 3, sampler=Sampler(0.8, top_k=5, top_p=0.9, min_p=0.1, seed=1))) == 3


def test_a_window_as_long_as_the_sequence_is_no_window() -> None:
    model = lively_model(replace(SHAPES["mistral"], sliding_window=12), dtype=torch.float64)
    free = lively_model(replace(SHAPES["mistral"], sliding_window=None), dtype=torch.float64)
    tokens = torch.tensor([random_prompt(13, 97)])
    for n, same in ((11, True), (12, True), (13, False)):
        short = tokens[:, :n]
        expected = logits_whole(free, short)
        for size in (1, 4, n):
            actual = logits_through(model, short, KVCache(model, n), size)
            assert torch.allclose(actual, expected, rtol=0, atol=1e-9) is same
