"""Batches: each row as if alone, whatever runs beside it or ran in its place; and a scheduler that is fair and bounded."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    SHAPES,
    Columns,
    fresh_memory_full_of_nan,
    is_one_sentence,
    lively_model,
    one_thread,  # noqa: F401 (a fixture)
    random_prompt,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm.batch import Request, Row, choose, record
from minillm.errors import MinillmError, UsageError
from minillm.generation import Generation
from minillm.model import Transformer
from minillm.roofline.counting import count
from minillm.sampling import Sampler, greedy
from minillm.stages import batching, kv_cache, naive, static_batching
from minillm.stages.batching import Engine, Scheduler
from minillm.stages.gqa import decode_attention
from minillm.stages.slotted_cache import BLOCK, SlottedCache
from minillm.stages.static_batching import PaddedCache

BATCHED: dict[str, Callable[..., list[Generation]]] = {
    "static": static_batching.generate,
    "continuous": batching.generate,
}
both = pytest.mark.parametrize("generate", BATCHED.values(), ids=BATCHED)
every_shape = pytest.mark.parametrize("shape", SHAPES)
LENGTHS = [9, 1, 23, 4, 4, 15, 2]
PROMPTS = [random_prompt(length, 97, seed) for seed, length in enumerate(LENGTHS)]

token_lists = st.lists(st.integers(0, 96), min_size=1, max_size=30)
requests = st.lists(st.tuples(token_lists, st.integers(1, 14)), min_size=1, max_size=7)


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, torch.dtype], Transformer]:
    return {
        (shape, dtype): lively_model(SHAPES[shape], dtype=dtype)
        for shape in SHAPES
        for dtype in (torch.float32, torch.float64)
    }


@pytest.fixture(scope="module")
def model(models: dict[tuple[str, torch.dtype], Transformer]) -> Transformer:
    return models["llama", torch.float64]


def texts(generations: list[Generation]) -> list[list[int]]:
    return [generation.tokens for generation in generations]


def alone(model: Transformer, prompt: list[int], n: int, **options: Any) -> list[int]:
    return naive.generate(model, prompt, n, **options).tokens


@pytest.mark.parametrize(("act", "left"), [(lambda cache: cache.clear(0), 0), (lambda cache: cache.move(1, 0), 3)])
def test_what_a_slot_no_longer_holds_is_zero(
    act: Callable[[SlottedCache], None], left: int, model: Transformer
) -> None:
    # Hidden columns are multiplied by 0: what overflowed there would come back as NaN.
    cache = SlottedCache(model, 2, 9)
    cache.pack([5, 3])
    for memory in (cache.keys, cache.values):
        memory[:, 0, :, :5] = math.inf
        memory[:, 1, :, :3] = 1.0
    act(cache)
    for memory in (cache.keys, cache.values):
        assert (memory[:, 0, :, :left] == 1).all()
        assert (memory[:, 0, :, left:5] == 0).all()
        assert (memory[:, 1, :, :3] == 1).all()
    assert cache.lengths == [left, 3]


# --- In lockstep -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [static_batching.run, batching.run], ids=BATCHED)
@torch.inference_mode()
def test_rows_in_lockstep_equal_rows_alone_and_end_when_the_recorder_says_so(run: Any, model: Transformer) -> None:
    prompts = [random_prompt(8, 97, seed) for seed in range(3)]
    expected = [alone(model, prompt, 6) for prompt in prompts]
    for stop_after, n in ((None, 6), (2, 2), (6, 6)):
        recorder = Columns(stop_after)
        run(model, torch.tensor(prompts), 6, greedy, recorder)
        assert recorder.rows == [row[:n] for row in expected]


def test_lockstep_has_slots_of_exactly_the_length_that_it_needs(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Engine] = []
    monkeypatch.setattr(batching, "Engine", lambda *args, **kwargs: made.append(Engine(*args, **kwargs)) or made[-1])
    with torch.inference_mode():
        batching.run(model, torch.tensor([[1, 2, 3], [4, 5, 6]]), 4, greedy, Columns())  # type: ignore[arg-type]
    assert [(len(engine.cache.lengths), engine.cache.capacity) for engine in made] == [(2, 6)]  # the last is not fed


@pytest.mark.parametrize(
    ("prompts", "limits", "capacity"), [([[1, 2], [3, 4]], [3, 5], 6), ([[1], [2, 3, 4]], [4, 2], 6)]
)
def test_a_static_batch_has_exactly_the_capacity_that_it_needs(
    prompts: list[list[int]], limits: list[int], capacity: int, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for kind in (static_batching.GroupedKVCache, PaddedCache):

        class Noted(kind):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                seen.append(self.capacity)

        monkeypatch.setattr(static_batching, kind.__name__, Noted)
    static_batching.generate(model, prompts, limits)
    assert seen == [capacity]  # columns of the longest prompt, and of the longest answer but for its last token


def test_only_decode_steps_of_a_padded_batch_load_a_key_once_a_group(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []

    def noted(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
        widths.append(q.shape[2])
        return decode_attention(q, k, v, visible)

    monkeypatch.setattr(static_batching, "decode_attention", noted)
    static_batching.generate(model, PROMPTS[:3], 5)
    assert widths == [1] * 4 * model.config.n_layers


# --- Each row as if alone --------------------------------------------------------------------------------------------


@both
@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_row_in_a_ragged_batch_equals_the_row_alone(
    generate: Any, shape: str, dtype: torch.dtype, models: dict[tuple[str, torch.dtype], Transformer]
) -> None:
    model = models[shape, dtype]

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(requests, st.integers(1, 8))
    def check(batch: list[tuple[list[int], int]], max_batch: int) -> None:
        prompts, limits = [prompt for prompt, _ in batch], [limit for _, limit in batch]
        expected = [alone(model, prompt, limit) for prompt, limit in batch]
        assert texts(generate(model, prompts, limits, max_batch=max_batch)) == expected

    check()


@both
@every_shape
def test_every_batch_size_gives_the_same_text(
    generate: Any, shape: str, models: dict[tuple[str, torch.dtype], Transformer]
) -> None:
    model, limits = models[shape, torch.float64], [3, 12, 1, 20, 7, 7, 16]
    expected = [alone(model, prompt, n) for prompt, n in zip(PROMPTS, limits, strict=True)]
    assert len(set(map(tuple, expected))) == 7
    for max_batch in range(1, 9):
        assert texts(generate(model, PROMPTS, limits, max_batch=max_batch)) == expected
    assert texts(generate(model, PROMPTS, limits)) == expected  # as many as it takes by itself


@both
@pytest.mark.parametrize("window", [1, 3, 8, 64])
def test_a_window_slides_in_each_row_by_itself(generate: Any, window: int) -> None:
    model = lively_model(replace(SHAPES["mistral"], sliding_window=window), dtype=torch.float64)
    expected = [alone(model, prompt, 20) for prompt in PROMPTS]
    assert texts(generate(model, PROMPTS, 20, max_batch=4)) == expected
    assert texts(generate(model, PROMPTS[3:5], 20)) == expected[3:5]  # of one length
    wider = lively_model(replace(SHAPES["mistral"], sliding_window=window + 1), dtype=torch.float64)
    assert (texts(generate(wider, PROMPTS, 20)) != expected) == (window < 64)  # that one more would show


@both
def test_rows_of_one_length_and_single_tokens_need_no_padding(generate: Any, model: Transformer) -> None:
    for length in (1, 6):
        prompts = [random_prompt(length, 97, seed) for seed in range(4)]
        expected = [alone(model, prompt, 9) for prompt in prompts]
        assert texts(generate(model, prompts, 9)) == expected
        assert texts(generate(model, prompts, [9, 2, 5, 9], max_batch=2)) == [
            text[:n] for text, n in zip(expected, [9, 2, 5, 9], strict=True)
        ]


@both
def test_the_same_prompt_many_times_gives_the_same_text_each_time(generate: Any, model: Transformer) -> None:
    prompt = PROMPTS[0]
    assert texts(generate(model, [prompt] * 5, 8, max_batch=3)) == [alone(model, prompt, 8)] * 5


@both
def test_a_row_may_fill_the_model_positions_beside_one_that_stays_short(generate: Any, model: Transformer) -> None:
    # The frozen long row goes on in a static batch, past the model's last position; what it computes is nobody's.
    long, short = random_prompt(191, 97, seed=1), random_prompt(3, 97, seed=2)
    assert texts(generate(model, [long, short], [2, 40])) == [alone(model, long, 2), alone(model, short, 40)]


def test_requests_that_come_while_others_run_get_the_same_text(model: Transformer) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        st.lists(st.tuples(token_lists, st.integers(1, 14), st.integers(0, 6)), min_size=1, max_size=8),
        st.integers(1, 4),
        st.one_of(st.none(), st.integers(44, 100)),
    )
    def check(arrivals: list[tuple[list[int], int, int]], max_batch: int, max_tokens: int | None) -> None:
        engine = Engine(model, max_batch, max_length=44, max_tokens=max_tokens)
        rows: list[Row] = []
        for prompt, limit, steps_later in arrivals:
            rows.append(Row(model, Request(prompt, limit)))
            engine.submit(rows[-1])
            for _ in range(steps_later):
                if engine.busy:
                    engine.step()
        finish(engine)
        assert [row.generation().tokens for row in rows] == [
            alone(model, prompt, limit) for prompt, limit, _ in arrivals
        ]

    check()


def finish(engine: Engine) -> list[Row]:
    """Step until nothing is left, in at most as many steps as there are tokens to come. Rows in the order of their ends."""
    scheduler = engine.scheduler
    bound = sum(row.remaining for row in [*scheduler.waiting, *scheduler.running])
    done = []
    for _ in range(bound):
        if engine.busy:
            done += engine.step()
    assert not engine.busy
    return done


def test_a_step_returns_the_rows_that_it_finished(model: Transformer) -> None:
    engine = Engine(model, max_batch=2, max_length=20)
    for i, (prompt, limit) in enumerate([([1, 2], 3), ([3], 1), ([4, 5, 6], 2)]):
        engine.submit(Row(model, Request(prompt, limit, id=i)))
    ended = [[row.request.id for row in engine.step()] for _ in range(3)]
    assert ended == [[1], [], [0, 2]]
    assert engine.steps == 3 and not engine.busy


# --- Sampling, stopping, streaming -----------------------------------------------------------------------------------


@both
def test_sampled_text_with_a_seed_does_not_depend_on_its_neighbours(generate: Any, model: Transformer) -> None:
    samplers = [
        Sampler(0.9, top_p=0.95, seed=5),
        Sampler(1.2, seed=6),
        greedy,
        Sampler(0.7, top_k=9, seed=5),
        Sampler(0),
    ]
    batch = [Request(prompt, 12, sampler) for prompt, sampler in zip(PROMPTS, samplers, strict=False)]
    expected = [alone(model, list(request.prompt), 12, sampler=request.sampler) for request in batch]
    for max_batch in (1, 2, 3, 5):
        assert texts(generate(model, batch, max_batch=max_batch)) == expected
        assert texts(generate(model, batch[::-1], max_batch=max_batch)) == expected[::-1]
    one = Sampler(0.9, seed=5)  # one sampler for all: each row begins its sequence anew
    expected = [alone(model, prompt, 12, sampler=one) for prompt in PROMPTS]
    assert texts(generate(model, PROMPTS, 12, sampler=one, max_batch=3)) == expected
    assert texts(generate(model, PROMPTS, 12, max_batch=3)) != expected


@both
def test_a_sampler_sees_one_row_of_logits_a_token_and_none_after_the_end(generate: Any, model: Transformer) -> None:
    shapes: list[tuple[int, ...]] = []

    def sampler(logits: Tensor) -> Tensor:
        shapes.append(tuple(logits.shape))
        return greedy(logits)

    generate(model, PROMPTS, [3, 1, 2, 5, 1, 1, 4], sampler=sampler, max_batch=3)
    assert shapes == [(1, 97)] * 17


@both
def test_rows_stop_at_stop_tokens_of_their_own_at_different_steps(generate: Any, model: Transformer) -> None:
    free = [alone(model, prompt, 20) for prompt in PROMPTS]
    stops = [{text[at]} for text, at in zip(free, [2, 19, 0, 7, 7, 12, 4], strict=True)]
    batch = [Request(prompt, 20, stop_tokens=stop) for prompt, stop in zip(PROMPTS, stops, strict=True)]
    expected = [text[: text.index(*stop) + 1] for text, stop in zip(free, stops, strict=True)]
    assert len({len(text) for text in expected}) >= 5
    for max_batch in (1, 2, 3, 7):
        generations = generate(model, batch, max_batch=max_batch)
        assert texts(generations) == expected
        assert [len(generation.times) for generation in generations] == [len(text) for text in expected]


@both
def test_one_set_of_stop_tokens_serves_all_rows(generate: Any, model: Transformer) -> None:
    stops = {alone(model, PROMPTS[i], at + 1)[at] for i, at in ((0, 5), (2, 9), (3, 2), (5, 12))}
    expected = [alone(model, prompt, 20, stop_tokens=stops) for prompt in PROMPTS]
    assert len({len(text) for text in expected}) >= 3
    assert texts(generate(model, PROMPTS, 20, stop_tokens=stops, max_batch=3)) == expected


@both
def test_on_token_tells_whose_token_it_is_in_order(generate: Any, model: Transformer) -> None:
    limits = [3, 12, 1, 8, 7, 7, 10]
    seen: list[tuple[int, int]] = []
    for max_batch in (1, 3, 7):
        seen.clear()
        generations = generate(
            model, PROMPTS, limits, max_batch=max_batch, on_token=lambda i, token: seen.append((i, token))
        )
        assert [[token for i, token in seen if i == row] for row in range(7)] == texts(generations)
        assert all(type(number) is int for pair in seen for number in pair)
        assert len(seen) == sum(limits)
    # With all in one batch, a token of each row comes before the second of any.
    assert {i for i, _ in seen[:7]} == set(range(7))


@both
def test_a_request_keeps_settings_of_its_own_beside_plain_prompts(generate: Any, model: Transformer) -> None:
    seen: list[int] = []
    told: list[tuple[int, int]] = []
    free = alone(model, PROMPTS[1], 9)
    batch = [
        PROMPTS[0],
        Request(PROMPTS[1], 9, stop_tokens={free[4]}, on_token=seen.append, id="b"),
        Request(tuple(PROMPTS[2]), 3, Sampler(0.9, seed=3), id="c"),
        PROMPTS[3],
    ]
    generations = generate(
        model, batch, 6, sampler=Sampler(1.1, seed=8), on_token=lambda i, token: told.append((i, token)), max_batch=2
    )
    assert texts(generations) == [
        alone(model, PROMPTS[0], 6, sampler=Sampler(1.1, seed=8)),
        free[: free.index(free[4]) + 1],
        alone(model, PROMPTS[2], 3, sampler=Sampler(0.9, seed=3)),
        alone(model, PROMPTS[3], 6, sampler=Sampler(1.1, seed=8)),
    ]
    assert seen == generations[1].tokens
    assert {i for i, _ in told} == {0, 3}  # a request tells its own listener, and no other


@both
def test_times_increase_and_later_rows_wait_for_their_turn(generate: Any, model: Transformer) -> None:
    generations = generate(model, PROMPTS[:4], 6, max_batch=2)
    for generation in generations:
        assert len(generation.times) == 6
        assert all(a < b for a, b in zip([0.0, *generation.times], generation.times, strict=False))
    assert generations[2].times[0] > generations[0].times[-1]  # counted from the call, so waiting counts


# --- Memory that others used -----------------------------------------------------------------------------------------


@both
def test_fresh_memory_full_of_nan_changes_nothing(generate: Any, models: Any) -> None:
    for shape in ("llama", "mistral"):
        model = models[shape, torch.float64]
        expected = [alone(model, prompt, 10) for prompt in PROMPTS]
        with fresh_memory_full_of_nan():
            assert texts(generate(model, PROMPTS, 10, max_batch=3)) == expected


@pytest.fixture(scope="module")
def poisonous() -> Transformer:
    """A model whose token 0 overflows: a request that holds it has keys and values that are no numbers."""
    model = lively_model(replace(SHAPES["llama"], tied_embeddings=False), dtype=torch.float64)
    model.embed.weight[0] = math.nan
    return model


@both
@pytest.mark.parametrize("max_batch", [1, 2, 3, 6])
def test_a_neighbour_that_overflows_keeps_it_to_itself(generate: Any, max_batch: int, poisonous: Transformer) -> None:
    # Short requests come after it into its slot, stand beside it, and are padded with what is not theirs.
    bad, prompts = [5, 0, *PROMPTS[2]], [[4], [7, 8], [1, 2, 3], [9] * 12, [6]]
    expected = [alone(poisonous, prompt, 8) for prompt in prompts]
    assert len(set(map(tuple, expected))) == 5
    for place in range(6):
        batch, limits = [*prompts], [8] * 5
        batch.insert(place, bad)
        limits.insert(place, 9)
        generations = generate(poisonous, batch, limits, max_batch=max_batch)
        assert [text for i, text in enumerate(texts(generations)) if i != place] == expected


def test_a_row_that_moves_into_the_slot_of_one_that_overflowed_stays_well(poisonous: Transformer) -> None:
    engine = Engine(poisonous, max_batch=3, max_length=60)
    rows = [
        Row(poisonous, Request(prompt, n)) for prompt, n in (([5, 0, *PROMPTS[2]], 2), (PROMPTS[0], 40), ([8, 9], 30))
    ]
    for row in rows:
        engine.submit(row)
    finish(engine)
    assert [row.generation().tokens for row in rows[1:]] == [
        alone(poisonous, PROMPTS[0], 40),
        alone(poisonous, [8, 9], 30),
    ]


def test_a_cache_of_slots_refuses_more_than_a_slot_holds_before_it_writes(model: Transformer) -> None:
    cache = SlottedCache(model, slots=2, capacity=6)
    cache.pack([5, 2])
    with pytest.raises(MinillmError, match="A slot of the cache holds 6 tokens and was asked to hold 7") as error:
        cache.pack([2, 1])
    assert is_one_sentence(str(error.value))
    assert cache.lengths == [5, 2]


def test_pads_are_seen_by_none_and_count_in_no_position(model: Transformer) -> None:
    cache = PaddedCache(model, 7, torch.tensor([0, 2, 4]))
    assert cache.positions(5).tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2], [0, 0, 0, 0, 0]]
    visible = cache._visible[:, 0]
    for row, pad in enumerate((0, 2, 4)):
        for query in range(5):
            expected = [key for key in range(5) if pad <= key <= query] if query >= pad else [query]
            assert visible[row, query].nonzero().flatten().tolist() == expected
    assert cache.positions(1).tolist() == [[5], [3], [1]]


# --- The scheduler ---------------------------------------------------------------------------------------------------


def row_of(model: Transformer, size: int, limit: int, id: Any = None) -> Row:
    return Row(model, Request([1] * (size - limit + 1), limit, id=id))


class Watched(Engine):
    """Steps that check what must hold in each, and note who was admitted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.admitted: list[Any] = []

    def step(self) -> list[Row]:
        before = {id(row) for row in self.scheduler.running}
        done = super().step()
        scheduler, cache = self.scheduler, self.cache
        rows = scheduler.running
        self.admitted += sorted(row.request.id for row in rows if id(row) not in before)
        assert 1 <= len(rows) <= scheduler.max_batch
        assert sum(row.size for row in rows) <= scheduler.max_tokens  # of all that ran in this step
        lengths = [len(row.prompt) + row.request.max_new_tokens - row.remaining - 1 for row in rows]
        assert cache.lengths[: len(rows)] == lengths
        assert cache._next[: len(rows)].tolist() == lengths
        assert sum(lengths) <= scheduler.max_tokens and max(lengths) <= cache.capacity
        assert all(length <= row.size for length, row in zip(lengths, rows, strict=True))
        assert scheduler.reserved == sum(row.size for row in rows if not row.finished)
        return done


def test_the_scheduler_is_bounded_fair_and_never_stuck(model: Transformer) -> None:
    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(
        st.lists(st.tuples(st.integers(1, 8), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=12),
        st.integers(1, 5),
        st.integers(16, 50),
    )
    def check(arrivals: list[tuple[int, int, int]], max_batch: int, max_tokens: int) -> None:
        engine = Watched(model, max_batch, 16, max_tokens)
        for i, (n_prompt, limit, steps_later) in enumerate(arrivals):
            engine.submit(Row(model, Request([1] * n_prompt, limit, id=i)))
            for _ in range(steps_later):
                if engine.busy:
                    engine.step()
        finish(engine)
        assert engine.admitted == list(range(len(arrivals)))  # first come, first served: none is overtaken

    check()


def test_a_large_request_is_not_overtaken_by_small_ones_that_would_fit(model: Transformer) -> None:
    engine = Watched(model, max_batch=4, max_length=20, max_tokens=20)
    for i, (size, limit) in enumerate([(8, 6), (18, 3), (4, 2), (4, 2)]):
        engine.submit(row_of(model, size, limit, id=i))
    for _ in range(6):
        engine.step()
    assert engine.admitted == [0]
    engine.step()
    assert engine.admitted == [0, 1]
    finish(engine)


def test_a_slot_is_filled_in_the_step_after_it_is_left(model: Transformer) -> None:
    engine = Watched(model, max_batch=2, max_length=20)
    for i, limit in enumerate([2, 5, 3, 1]):
        engine.submit(row_of(model, 6, limit, id=i))
    ran = []
    while engine.busy:
        engine.step()
        ran.append([row.request.id for row in engine.scheduler.running])
    assert ran == [[0, 1], [0, 1], [2, 1], [2, 1], [2, 1], [3]]


def test_a_step_without_requests_runs_nothing_and_finishes_none(model: Transformer) -> None:
    engine = Engine(model, max_batch=2, max_length=20)
    with Steps(model) as steps:
        assert engine.step() == []
        row = Row(model, Request([3, 1, 4], 2))
        engine.submit(row)
        assert [engine.step(), engine.step()] == [[], [row]]
        assert engine.step() == engine.step() == []  # what had finished is not told again
        assert (steps.n, engine.steps, engine.busy) == (2, 2, False)
        engine.submit(Row(model, Request([3, 1, 4], 1)))
        assert len(engine.step()) == 1
    assert row.generation().tokens == alone(model, [3, 1, 4], 2)


def test_gaps_are_closed_by_the_last_running_row(model: Transformer) -> None:
    scheduler = Scheduler(5, 20)
    rows = [row_of(model, 6, 2, id=i) for i in range(5)]
    for row in rows:
        scheduler.submit(row)
    assert scheduler.schedule() == [] and scheduler.running == rows
    for i in (0, 2, 4):
        rows[i].remaining = 0
    assert scheduler.schedule() == [(3, 0)]
    assert scheduler.running == [rows[3], rows[1]]
    for i in (1, 3):
        rows[i].remaining = 0
    assert scheduler.schedule() == [] and scheduler.running == []


def test_a_new_request_takes_the_gap_that_a_move_would_have_to_close(model: Transformer) -> None:
    scheduler = Scheduler(4, 20)
    rows = [row_of(model, 6, 2, id=i) for i in range(5)]
    for row in rows[:4]:
        scheduler.submit(row)
    scheduler.schedule()
    scheduler.submit(rows[4])
    rows[0].remaining = rows[3].remaining = 0
    assert scheduler.schedule() == []  # in slot 3 it would leave slot 0 to be filled by copying its keys and values
    assert scheduler.running == [rows[4], rows[1], rows[2]]


@pytest.mark.parametrize("max_batch", [0, -1, 1.5])
def test_a_scheduler_of_no_slots_is_refused(max_batch: Any) -> None:
    with pytest.raises(UsageError, match="at least one request must run at a time"):
        Scheduler(max_batch, 20)


def test_the_host_reads_a_step_once_and_only_for_who_looks_on(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def reading(name: str) -> Callable[[Tensor], Any]:
        original = getattr(Tensor, name)
        return lambda tensor: [reads.append(name), original(tensor)][1]

    def row(told: list[int] | None, finished: bool = False) -> Row:
        row = Row(model, Request([1, 2], 5, on_token=None if told is None else told.append))
        row.stopped = finished
        return row

    first, second = [], []
    rows_and_reads = [
        ([row(None), row(None)], []),
        ([row(None), row(first), row(second)], ["tolist"]),
        ([row([], finished=True), row(None)], []),
    ]
    for name in ("tolist", "__int__", "item"):
        monkeypatch.setattr(Tensor, name, reading(name))
    for rows, expected in rows_and_reads:
        reads.clear()
        record(rows, torch.arange(10, 10 + len(rows)))
        assert reads == expected
    assert (first, second) == ([11], [12])


@pytest.mark.parametrize("place", ["prompts", "cache"])
def test_a_request_that_can_never_fit_is_refused_before_any_runs(place: str, model: Transformer) -> None:
    seen: list[Any] = []
    with pytest.raises(UsageError) as error:
        if place == "prompts":
            batching.generate(
                model, [[1], [1] * 30], 5, max_cache_tokens=33, on_token=lambda *token: seen.append(token)
            )
        else:
            Engine(model, max_batch=2, max_length=33).submit(Row(model, Request([1] * 30, 5)))
    assert "A request of 30 prompt tokens and 5 new ones keeps 34 tokens, and the cache has room for 33" in str(
        error.value
    )
    assert is_one_sentence(str(error.value))
    assert seen == []
    batching.generate(model, [[1], [1] * 30], 5, max_cache_tokens=34)


@pytest.mark.parametrize("max_cache_tokens", [34, 35, 50, 68, 1000])
def test_a_bound_on_cache_tokens_changes_no_text(max_cache_tokens: int, model: Transformer) -> None:
    expected = [alone(model, prompt, 12) for prompt in PROMPTS]
    assert texts(batching.generate(model, PROMPTS, 12, max_batch=4, max_cache_tokens=max_cache_tokens)) == expected


# --- Cost ------------------------------------------------------------------------------------------------------------


def steady_step(device: str, max_batch: int, max_length: int) -> Any:
    model = lively_model(SHAPES["llama"]).to(device)
    engine = Engine(model, max_batch, max_length)
    for prompt in PROMPTS[:3]:
        engine.submit(Row(model, Request(prompt, 9)))
    engine.step()
    return count(engine.step)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_step_costs_the_same_however_much_of_the_cache_is_unused(device: str) -> None:
    small = steady_step(device, 3, 31)
    assert small.calls == steady_step(device, 64, 31).calls == steady_step(device, 3, 5000).calls
    assert small.calls == steady_step("cpu", 3, 31).calls


def test_a_step_attends_once_for_all_that_decode_and_once_more_for_each_prompt() -> None:
    model = lively_model(SHAPES["llama"])
    engine = Engine(model, max_batch=4, max_length=40)
    for new_prompts, attentions in ((2, 1 + 2), (0, 1), (1, 1 + 1), (0, 1)):
        for prompt in PROMPTS[2 : 2 + new_prompts]:
            engine.submit(Row(model, Request(prompt, 9)))
        cost = count(engine.step)
        calls = Counter[str]()
        for op, n in cost:
            calls[op.name] += n
        assert calls["scaled_dot_product_attention"] == attentions * model.config.n_layers
        assert (calls["index"] > 0) == (new_prompts > 0)  # last positions of prompts: nothing is picked while decoding


def test_a_window_that_reaches_the_first_token_costs_nothing() -> None:
    """Of rows of one length, that is: there no mask is made, which fused kernels would not take."""

    def step_at(length: int, window: int | None) -> Any:
        model = lively_model(replace(SHAPES["llama"], sliding_window=window))
        engine = Engine(model, 2, 20)
        for prompt in ([1] * (length - 1), [2] * (length - 1)):
            engine.submit(Row(model, Request(prompt, 9)))
        engine.step()  # prefill: the slots hold length - 1 tokens
        return count(engine.step)

    plain = step_at(9, None)
    assert step_at(9, 9).calls == step_at(9, 10).calls == plain.calls
    assert step_at(10, 9).n_operators > step_at(10, None).n_operators


@pytest.mark.parametrize("size", [k * BLOCK + step for k in (1, 2) for step in (-1, 0, 1)])
def test_lengths_at_the_edge_of_a_block_change_nothing(size: int, model: Transformer) -> None:
    # Of `size` tokens that a request keeps: its prompt ends there, an answer crosses there, or a neighbour is there already.
    prompts, limits = [random_prompt(size - n + 1, 97, seed=n) for n in (1, 2, 4)], [1, 2, 4]
    prompts, limits = [*prompts, [7]], [*limits, 5]
    expected = [alone(model, prompt, n) for prompt, n in zip(prompts, limits, strict=True)]
    with fresh_memory_full_of_nan():
        for max_batch in (1, 4):
            assert texts(batching.generate(model, prompts, limits, max_batch=max_batch)) == expected


def test_memory_is_that_of_the_slots_rounded_up_to_blocks(model: Transformer) -> None:
    cache, c = SlottedCache(model, slots=3, capacity=BLOCK + 1), model.config
    assert cache.keys.numel() == cache.values.numel() == c.n_layers * 3 * c.n_kv_heads * 2 * BLOCK * c.head_dim


class Steps:
    """Counts the passes of a model."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.n = model, 0

    def __enter__(self) -> "Steps":
        self._hook = self.model.embed.register_forward_pre_hook(lambda *_: self._count())
        return self

    def _count(self) -> None:
        self.n += 1

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


@pytest.fixture(scope="module")
def trace() -> list[tuple[list[int], int]]:
    """200 requests, their outputs spread 10 to 1, in no order."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (200,), generator=generator).tolist()
    limits = torch.randint(4, 41, (200,), generator=generator).tolist()
    assert min(limits) == 4 and max(limits) == 40
    return [([1] * length, limit) for length, limit in zip(lengths, limits, strict=True)]


@pytest.mark.parametrize("max_batch", [1, 2, 3, 5, 8, 13, 16, 24, 32])
def test_200_requests_take_at_most_five_percent_more_steps_than_the_ideal(
    max_batch: int, trace: list[tuple[list[int], int]]
) -> None:
    model = lively_model(replace(SHAPES["llama"], n_layers=1))
    prompts, limits = [prompt for prompt, _ in trace], [limit for _, limit in trace]
    ideal = max(math.ceil(sum(limits) / max_batch), max(limits))
    with Steps(model) as steps:
        batching.generate(model, prompts, limits, max_batch=max_batch)
    assert ideal <= steps.n <= 1.05 * ideal
    if max_batch > 1:  # static batches wait for the longest of each
        waited = sum(max(limits[i : i + max_batch]) for i in range(0, 200, max_batch))
        assert waited > 1.2 * ideal


def test_static_batches_take_the_steps_of_their_longest_answers(model: Transformer) -> None:
    limits = [3, 12, 1, 8, 7, 7, 10]
    with Steps(model) as steps:
        static_batching.generate(model, PROMPTS, limits, max_batch=3)
    assert steps.n == 12 + 8 + 10
    free = [alone(model, prompt, 20) for prompt in PROMPTS[:3]]
    stops = [Request(prompt, 20, stop_tokens={text[4]}) for prompt, text in zip(PROMPTS, free, strict=False)]
    with Steps(model) as steps:
        static_batching.generate(model, stops)
    assert steps.n == max(text.index(text[4]) + 1 for text in free)  # a batch in which all have ended is done


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate memory")]
)
def test_a_cache_that_the_device_cannot_hold_is_refused_in_one_sentence(
    error: Exception, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        raise error

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(MinillmError) as caught:
        Engine(model, max_batch=1000, max_length=64_000)
    monkeypatch.undo()
    # 2 layers, keys and values of 2 heads of 8 float64 each: 512 bytes a token, 32.768 GB
    assert "A cache of 1000 slots of 64000 tokens takes 32.8 GB, which cpu does not have free: " in str(caught.value)
    assert is_one_sentence(str(caught.value))


def test_a_cache_beyond_any_memory_is_refused_in_one_sentence(model: Transformer) -> None:
    with pytest.raises(MinillmError, match="which cpu does not have free") as caught:
        Engine(model, max_batch=2, max_length=10**15)
    assert is_one_sentence(str(caught.value))


# --- Bad requests ----------------------------------------------------------------------------------------------------

BAD = {
    "no prompts": ([], 5, {}, "There are no prompts"),
    "one prompt in place of a list": ([1, 2, 3], 5, {}, "One of the prompts is 1: give a list of prompts"),
    "an array in place of a list": (np.array([1, 2, 3]), 5, {}, "give a list of prompts"),
    "a tensor in place of a list": (torch.tensor([1, 2, 3]), 5, {}, "give a list of prompts"),
    "a number among the prompts": ([[1], 2], 5, {}, "One of the prompts is 2: give a list of prompts"),
    "empty prompt": ([[1], [], [2]], 5, {}, "Prompt 2 of 3: The prompt is empty"),
    "empty prompt with an id": ([[1], Request([], 5, id="x")], 5, {}, "Request 'x': The prompt is empty"),
    "id out of range": ([[1], [2], [97]], 5, {}, "Prompt 3 of 3: "),
    "text": (["hello"], 5, {}, "Prompt 1 of 1: "),
    "prompt too long": (
        [[1], [1] * 193],
        1,
        {},
        "Prompt 2 of 2: A prompt of 193 tokens with 1 new ones passes the 192",
    ),
    "answer too long": (
        [[1] * 100, [1]],
        94,
        {},
        "Prompt 1 of 2: A prompt of 100 tokens with 94 new ones passes the 192",
    ),
    "max_batch 0": ([[1]], 5, {"max_batch": 0}, "max_batch is 0; at least one request must run at a time"),
    "max_batch -3": ([[1]], 5, {"max_batch": -3}, "max_batch is -3;"),
    "max_batch 2.5": ([[1]], 5, {"max_batch": 2.5}, "max_batch is 2.5;"),
    "max_batch text": ([[1]], 5, {"max_batch": "4"}, "max_batch is '4';"),
    "too few limits": ([[1], [2], [3]], [5, 5], {}, "There are 2 limits for 3 prompts"),
    "too many limits": ([[1]], [5, 5], {}, "There are 2 limits for 1 prompts"),
    "no limits": ([[1]], [], {}, "There are 0 limits for 1 prompts"),
    "text as limits": ([[1], [2]], "5", {}, "There are 1 limits for 2 prompts"),
    "a limit of 0": ([[1], [2]], [5, 0], {}, "Prompt 2 of 2: max_new_tokens is 0"),
    "a limit of 2.5": ([[1], [2]], [5, 2.5], {}, "Prompt 2 of 2: max_new_tokens is 2.5"),
    "2.5 for all": ([[1], [2]], 2.5, {}, "Prompt 1 of 2: max_new_tokens is 2.5"),
    "no limit": ([[1], [2]], 0, {}, "Prompt 1 of 2: max_new_tokens is 0"),
    "a request's limit": ([Request([1], 0)], 5, {}, "Prompt 1 of 1: max_new_tokens is 0"),
    "two of one id": ([Request([1], 5, id=7), [1], Request([2], 5, id=7)], 5, {}, "Two requests have the id 7"),
    "stop tokens": ([[1], Request([2], 5, stop_tokens=["</s>"])], 5, {}, "Prompt 2 of 2: stop_tokens is ['</s>']"),
}


@both
@pytest.mark.parametrize("prompts, limits, options, message", BAD.values(), ids=BAD)
def test_a_bad_batch_is_refused_in_one_sentence_before_any_runs(
    generate: Any, prompts: Any, limits: Any, options: dict[str, Any], message: str, model: Transformer
) -> None:
    seen: list[Any] = []
    with pytest.raises(UsageError) as error:
        generate(model, prompts, limits, on_token=lambda *token: seen.append(token), **options)
    assert message in str(error.value)
    assert is_one_sentence(str(error.value))
    assert seen == []


@both
def test_limits_left_out_are_asked_for_unless_all_are_requests(generate: Any, model: Transformer) -> None:
    with pytest.raises(UsageError, match="Prompt 1 of 1: max_new_tokens is 0; ask for at least 1"):
        generate(model, [[1]])
    assert len(generate(model, [Request([1], 3)])[0]) == 3


@both
def test_requests_without_ids_are_not_of_one_id(generate: Any, model: Transformer) -> None:
    assert len(generate(model, [Request([1], 2), Request([2], 2)])) == 2


@pytest.mark.parametrize(("n", "passes"), [(15, 1), (16, 1), (17, 2)])
def test_16_are_answered_at_a_time_unless_told_otherwise(n: int, passes: int, model: Transformer) -> None:
    with Steps(model) as steps:
        batching.generate(model, [[token] for token in range(n)], 1)
    assert steps.n == passes


def test_greedy_rows_are_chosen_all_at_once(model: Transformer) -> None:
    rows = [Row(model, Request([1], 5)) for _ in range(3)]
    logits = torch.randn(3, 97)
    assert count(lambda: choose(rows, logits)).calls == count(lambda: greedy(logits)).calls


@both
def test_numbers_may_be_those_of_numpy_and_of_tensors(generate: Any, model: Transformer) -> None:
    prompts, limits = [[3, 1, 4], [1, 5, 9]], [3, 5]
    expected = texts(generate(model, prompts, limits))
    for given_limits in (np.array(limits), torch.tensor(limits), tuple(limits), [np.int64(3), torch.tensor(5)]):
        for given_prompts in (np.array(prompts), torch.tensor(prompts), tuple(map(tuple, prompts))):
            assert texts(generate(model, given_prompts, given_limits, max_batch=np.int64(2))) == expected
    for limit in (np.int64(3), torch.tensor(3), np.array(3)):
        assert texts(generate(model, prompts, limit)) == [text[:3] for text in expected]


@both
def test_prompts_and_model_stay_as_they_were(generate: Any, model: Transformer) -> None:
    given_prompts = [list(prompt) for prompt in PROMPTS]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    generate(model, given_prompts, 5, max_batch=3)
    assert given_prompts == PROMPTS
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@both
def test_a_batch_runs_on_meta_and_has_no_tokens_there(generate: Any) -> None:
    generations = generate(lively_model(SHAPES["llama"]).to("meta"), PROMPTS, [4, 2, 9, 1, 3, 3, 8], max_batch=3)
    assert [len(generation) for generation in generations] == [4, 2, 9, 1, 3, 3, 8]
    with pytest.raises(MinillmError, match="on the meta device has shapes but no tokens"):
        _ = generations[0].tokens


# --- SmolLM2-135M ----------------------------------------------------------------------------------------------------

TEXTS = [
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    if n",
    "Als Gregor Samsa eines Morgens",
    "Water boils at",
    "Once",
    "The roofline model asks two questions of a program: how many operations does it do, and how many bytes does it move?",
    "In 1969, the first human beings walked on",
    "1, 2, 3, 5, 8, 13,",
]


@pytest.fixture(scope="module")
def real_prompts(smollm2: tuple[Transformer, Any]) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Eight prompts of different lengths, and what each gets alone."""
    model, tokenizer = smollm2
    prompts = [tokenizer.encode(text) for text in TEXTS]
    assert len({len(prompt) for prompt in prompts}) >= 6
    yield prompts, [kv_cache.generate(model, prompt, 16).tokens for prompt in prompts]


@both
@pytest.mark.parametrize("max_batch", [3, 8])
def test_smollm2_answers_each_of_eight_ragged_prompts_as_if_alone(
    generate: Any,
    max_batch: int,
    smollm2: tuple[Transformer, Any],
    real_prompts: tuple[list[list[int]], list[list[int]]],
) -> None:
    prompts, expected = real_prompts
    limits = [16, 9, 16, 3, 16, 12, 16, 16]
    generations = generate(smollm2[0], prompts, limits, max_batch=max_batch)
    assert texts(generations) == [text[:n] for text, n in zip(expected, limits, strict=True)]
