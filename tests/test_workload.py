"""What serving a workload gives, by the clock and simulated."""

import math
import random
import statistics
import time
from collections import Counter
from dataclasses import replace

import pytest
from helpers import one_thread  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import workload
from minillm.batch import Request, Row
from minillm.config import known_model
from minillm.errors import UsageError
from minillm.metrics import RequestTimes, goodput, itl, percentile, system_tps, ttft, user_tps
from minillm.model import Transformer
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.hardware import known_hardware
from minillm.stages import batching, static_batching
from minillm.trace import MOST_TOKENS, Arrival, poisson_trace
from minillm.weights import random_model
from minillm.workload import Served, ideal_steps, serve, serve_rows, simulate, simulate_static, step_law


@pytest.fixture(scope="module")
def tiny() -> Transformer:
    return random_model(known_model("tiny"))


def second_a_step(n_tokens: int, lengths: list[int]) -> float:
    return 1.0


def spread_trace(seed: int = 0) -> list[Arrival]:
    """200 requests at once, answers spread 10 to 1 (2 to 20 tokens), the longest first."""
    trace = poisson_trace(200, math.inf, prompt_tokens=(1, 4), output_tokens=(2, 20), seed=seed)
    return sorted(trace, key=lambda arrival: -arrival.output_tokens)


# --- schedules --------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 80).map(lambda n: n / 4), st.integers(1, 5), st.integers(1, 9)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 5),
    st.integers(13, 40) | st.none(),
)
@settings(deadline=None)
def test_every_simulated_request_gets_its_tokens_in_steps_within_the_bounds(
    requests: list[tuple[float, int, int]], max_batch: int, max_tokens: int | None
) -> None:
    trace = [Arrival(i, *request) for i, request in enumerate(requests)]
    for served in (
        simulate(trace, second_a_step, max_batch=max_batch, max_tokens=max_tokens),
        simulate_static(trace, second_a_step, max_batch=max_batch),
    ):
        tokens = Counter(id for step in served.steps for id in step.slots if id is not None)
        assert tokens == {arrival.id: arrival.output_tokens for arrival in trace}
        for arrival in trace:
            request = served.requests[arrival.id]
            assert request.start == arrival.arrival_s
            assert list(request.tokens) == [step.end for step in served.steps if arrival.id in step.slots]
            assert ttft(request) >= 1
        for step, later in zip(served.steps, served.steps[1:], strict=False):
            assert step.end <= later.start
        for step in served.steps:
            assert 1 <= len(step.slots) <= max_batch
            assert step.end == step.start + 1


def test_a_request_waits_for_a_slot_and_the_server_for_a_request() -> None:
    trace = [Arrival("a", 1.0, 5, 3), Arrival("b", 1.5, 5, 2), Arrival("c", 10.0, 5, 1)]
    served = simulate(trace, second_a_step, max_batch=1)
    assert {id: list(times.tokens) for id, times in served.requests.items()} == {
        "a": [2.0, 3.0, 4.0],
        "b": [5.0, 6.0],
        "c": [11.0],
    }
    assert [ttft(request) for request in served.requests.values()] == [1.0, 3.5, 1.0]
    assert [(step.start, step.slots) for step in served.steps][-2:] == [(5.0, ("b",)), (10.0, ("c",))]


def test_static_slots_are_held_until_the_longest_answer_ends() -> None:
    trace = [Arrival("a", 0.0, 5, 1), Arrival("b", 0.0, 5, 3), Arrival("c", 0.5, 5, 1)]
    served = simulate_static(trace, second_a_step, max_batch=2)
    assert [step.slots for step in served.steps] == [("a", "b"), (None, "b"), (None, "b"), ("c",)]
    continuous = simulate(trace, second_a_step, max_batch=2)
    assert [step.slots for step in continuous.steps] == [("a", "b"), ("c", "b"), ("b",)]


def test_the_law_is_told_the_tokens_and_the_lengths_of_each_step() -> None:
    calls: list[tuple[int, list[int]]] = []

    def law(n_tokens: int, lengths: list[int]) -> float:
        calls.append((n_tokens, list(lengths)))
        return 1.0

    trace = [Arrival("a", 0.0, 5, 2), Arrival("b", 0.0, 3, 3), Arrival("c", 0.0, 4, 1)]
    simulate(trace, law, max_batch=2)
    assert calls == [(8, [5, 3]), (2, [6, 4]), (5, [4, 5])]  # the last: c's prompt beside one token of b
    calls.clear()
    simulate_static(trace, law, max_batch=2)
    assert calls == [(10, [5, 5]), (2, [6, 6]), (2, [7, 7]), (4, [4])]  # padded to 5


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 8))
@settings(deadline=None)
def test_no_schedule_needs_fewer_steps_than_the_ideal(lengths: list[int], max_batch: int) -> None:
    trace = [Arrival(i, 0.0, 1, n) for i, n in enumerate(sorted(lengths, reverse=True))]
    ideal, steps = ideal_steps(lengths, max_batch), len(simulate(trace, second_a_step, max_batch=max_batch).steps)
    assert ideal <= steps <= len(simulate_static(trace, second_a_step, max_batch=max_batch).steps)
    # Longest first is within 4/3 - 1/(3 m) of the best schedule that moves nobody (Graham 1969), which for two slots of these
    # small numbers is found by trying all subsets.
    if max_batch == 1:
        assert steps == ideal == sum(lengths)
    if max_batch == 2:
        sums = {0}
        for n in lengths:
            sums |= {total + n for total in sums}
        best = min(max(total, sum(lengths) - total) for total in sums)
        assert ideal <= best <= steps <= best * 7 / 6


def test_ideal_steps_by_hand() -> None:
    assert ideal_steps([10, 10, 10], 2) == 15
    assert ideal_steps([1, 1, 30], 2) == 30
    assert ideal_steps([3, 3, 1], 2) == 4
    assert ideal_steps([], 2) == 0
    with pytest.raises(UsageError):
        ideal_steps([1], 0)


@pytest.mark.parametrize("max_batch", [1, 2, 4, 8, 16, 32])
def test_continuous_batching_needs_hardly_more_steps_than_the_ideal(max_batch: int) -> None:
    for seed in range(10):
        trace = spread_trace(seed)
        ideal = ideal_steps([arrival.output_tokens for arrival in trace], max_batch)
        assert ideal <= len(simulate(trace, second_a_step, max_batch=max_batch).steps) <= 1.05 * ideal


def test_with_three_requests_a_slot_the_ideal_is_out_of_reach() -> None:
    """64 slots serve 200 answers: 3.1 each, and no whole answers fill them evenly. What is lost is less than half an answer."""
    for seed in range(10):
        trace = spread_trace(seed)
        ideal = ideal_steps([arrival.output_tokens for arrival in trace], 64)
        assert ideal <= len(simulate(trace, second_a_step, max_batch=64).steps) <= 1.10 * ideal
    # Where it is out of reach for every server that keeps a request in its slot: 65 answers of one length in 64 slots.
    equal = [Arrival(i, 0.0, 1, 10) for i in range(65)]
    assert ideal_steps([10] * 65, 64) == 11
    assert len(simulate(equal, second_a_step, max_batch=64).steps) == 20


def test_static_batching_of_the_same_trace_needs_far_more() -> None:
    trace = spread_trace()
    random.Random(0).shuffle(trace)
    continuous = simulate(trace, second_a_step, max_batch=8)
    static = simulate_static(trace, second_a_step, max_batch=8)
    # A batch of 8 lengths, uniform from 2 to 20, ends with its longest: 18.4 steps on average, for 11 tokens a slot.
    assert len(static.steps) > 1.5 * len(continuous.steps)
    assert static.numbers()["tokens_per_s"] < continuous.numbers()["tokens_per_s"] / 1.5  # type: ignore[operator]


# --- the engine, by the clock -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch", [4, 16, 64])
def test_the_engine_takes_the_steps_that_the_simulation_says(tiny: Transformer, max_batch: int) -> None:
    trace = spread_trace()
    simulated = simulate(trace, second_a_step, max_batch=max_batch)
    engine = batching.Engine(tiny, max_batch, 30)
    batching_steps = _count_steps(engine, tiny, trace)
    served = serve(tiny, trace, max_batch=max_batch)
    assert len(served.steps) == batching_steps == len(simulated.steps)
    assert [step.slots for step in served.steps] == [step.slots for step in simulated.steps]
    assert list(served.requests) == list(simulated.requests)  # they end in the same order


def _count_steps(engine: batching.Engine, model: Transformer, trace: list[Arrival]) -> int:
    for arrival in trace:
        engine.submit(batching.Row(model, Request(arrival.ids(320), arrival.output_tokens)))
    while engine.busy:
        engine.step()
    return engine.steps


def test_simulated_static_takes_the_steps_of_the_static_stage(
    tiny: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = spread_trace()[::7]
    passes = []
    hidden = Transformer.hidden
    monkeypatch.setattr(Transformer, "hidden", lambda self, *args: passes.append(1) or hidden(self, *args))
    static_batching.generate(
        tiny, [arrival.ids(320) for arrival in trace], [arrival.output_tokens for arrival in trace], max_batch=4
    )
    assert len(simulate_static(trace, second_a_step, max_batch=4).steps) == len(passes)


def test_serving_follows_the_clock(tiny: Transformer) -> None:
    trace = [Arrival("late", 0.25, [5, 6], 3), Arrival("first", 0.0, 4, 6), Arrival("second", 0.0, [1], 2)]
    began = time.perf_counter()
    served = serve(tiny, trace, max_batch=2)
    took = time.perf_counter() - began
    assert {id: len(times.tokens) for id, times in served.requests.items()} == {"first": 6, "second": 2, "late": 3}
    assert served.requests["late"].start == 0.25
    assert 0.25 < served.requests["late"].tokens[0] <= served.requests["late"].tokens[-1] < took
    assert served.requests["first"].tokens[0] == served.requests["second"].tokens[0] == served.steps[0].end
    for step, later in zip(served.steps, served.steps[1:], strict=False):
        assert 0 <= step.start <= step.end <= later.start


def test_a_server_sleeps_until_the_next_request_comes(tiny: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 100.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(workload.time, "perf_counter", lambda: now)
    monkeypatch.setattr(workload.time, "sleep", sleep)
    served = serve(tiny, [Arrival("a", 0.5, 3, 2), Arrival("b", 7.0, 3, 1), Arrival("c", 7.0, 3, 1)], max_batch=2)
    assert slept == [0.5, 6.5]
    assert [(step.start, step.end) for step in served.steps] == [(0.5, 0.5), (0.5, 0.5), (7.0, 7.0)]
    assert served.steps[-1].slots == ("b", "c")


def test_who_waits_for_an_answer_is_told_its_times(tiny: Transformer) -> None:
    told: list[tuple[object, RequestTimes]] = []
    rows = [Row(tiny, Request([1, 2], n, id=n)) for n in (3, 1)]
    engine = batching.Engine(tiny, max_batch=2, max_length=9)
    served = serve_rows(engine, [(0.0, row) for row in rows], lambda row, times: told.append((row.request.id, times)))
    assert told == list(served.requests.items()) and [id for id, _ in told] == [1, 3]


def test_simulated_time_begins_with_0() -> None:
    served = simulate([Arrival("a", 0.0, 3, 2)], second_a_step, max_batch=1)
    assert [(step.start, step.end) for step in served.steps] == [(0.0, 1.0), (1.0, 2.0)]


def test_queueing_counts(tiny: Transformer) -> None:
    """One slot, two requests at once: the second one's time to first token contains the whole answer of the first."""
    served = serve(tiny, [Arrival("a", 0.0, 4, 5), Arrival("b", 0.0, 4, 1)], max_batch=1)
    assert ttft(served.requests["b"]) > served.requests["a"].tokens[-1]


@pytest.mark.parametrize(
    ("trace", "settings", "says"),
    [
        ([], {}, "There are no requests"),
        ([Arrival("a", 0.0, 1, 1), Arrival("a", 1.0, 1, 1)], {}, "id"),
        ([Arrival("a", 0.0, 1, 1)], {"max_batch": 0}, "max_batch is 0"),
        ([Arrival("a", 0.0, 1, 1), Arrival("b", 5.0, 9, 3)], {"max_tokens": 10}, "keeps 11 tokens"),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_runs(
    tiny: Transformer,
    trace: list[Arrival],
    settings: dict[str, int],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ran(*_: object) -> float:
        pytest.fail("it ran")

    monkeypatch.setattr(Transformer, "hidden", ran)
    settings = {"max_batch": 2} | settings
    for run in (lambda: serve(tiny, trace, **settings), lambda: simulate(trace, ran, **settings)):
        with pytest.raises(UsageError) as error:
            run()
        assert says in str(error.value)
    if "max_tokens" not in settings:
        with pytest.raises(UsageError, match=says):
            simulate_static(trace, ran, **settings)
    with pytest.raises(UsageError, match="256 positions"):
        serve(tiny, [Arrival("a", 0.0, 1, 1), Arrival("b", 0.0, 300, 1)], max_batch=2)


# --- numbers and laws -------------------------------------------------------------------------------------------------


def test_all_numbers_come_from_the_times_of_the_requests() -> None:
    requests = {
        "a": RequestTimes(0.0, [1.0, 1.5, 2.0]),
        "b": RequestTimes(0.5, [2.5, 3.5, 5.5]),
        "c": RequestTimes(1.0, [5.0]),
    }
    numbers = Served(requests, []).numbers(3600.0, ttft_s=2.0, tpot_s=1.0)
    assert numbers["ttft_s"] == 2.0  # of 1, 2 and 4
    assert numbers["ttft_p99_s"] == percentile([1.0, 2.0, 4.0], 99)
    assert numbers["itl_p50_s"] == 0.75  # of 0.5, 0.5, 1 and 2, pooled
    assert numbers["itl_p99_s"] == percentile([gap for request in requests.values() for gap in itl(request)], 99)
    assert numbers["user_tokens_per_s"] == statistics.median([2.0, 1 / 1.5])  # c has one token
    assert numbers["tokens_per_s"] == system_tps(list(requests.values())) == 7 / 5.5
    assert numbers["usd_per_million_tokens"] == pytest.approx(1e6 * 5.5 / 7)
    assert numbers["goodput_per_s"] == goodput(list(requests.values()), ttft_s=2.0, tpot_s=1.0) == 1 / 5.5  # a alone
    assert Served(requests, []).numbers()["goodput_per_s"] == 3 / 5.5
    assert Served(requests, []).numbers()["usd_per_million_tokens"] is None
    assert user_tps(requests["c"]) is None


def test_step_law_of_llama_3_8b_on_an_h100() -> None:
    law = step_law(known_model("llama-3-8b"), known_hardware("h100-sxm").ceilings("bf16"))
    # One user: 7.505e9 weights of 2 bytes at 3.35 TB/s are 4.48 ms. 32 users of 4096 tokens add 17.2 GB, 5.13 ms.
    assert law(1, [0]) == pytest.approx(4.48e-3, rel=1e-3)
    assert law(32, [4096] * 32) == pytest.approx(4.48e-3 + 4096 * 32 * 131_072 / 3.35e12, rel=1e-3)
    # A prompt of 2048 tokens is bound by compute: 2 x 7.505e9 x 2048 FLOP at 989.4 TFLOP/s.
    assert law(2048, [0]) == pytest.approx(2 * 7.505e9 * 2048 / 989.4e12, rel=1e-3)


def test_step_law_counts_a_window_and_the_overhead() -> None:
    ceilings = Ceilings("test", "fp32", bandwidth=1e9, peak=1e12, overhead=1e-5)
    config = known_model("mistral-7b-v0.1")
    assert step_law(config, ceilings)(2, [9000, 100]) == step_law(config, ceilings)(2, [4096, 100])
    whole = step_law(replace(config, sliding_window=None), ceilings)  # the longest prompt with the longest answer
    assert whole(1, [2 * MOST_TOKENS]) - whole(1, [MOST_TOKENS]) == pytest.approx(
        MOST_TOKENS * config.kv_bytes_per_token(4) / 1e9
    )
    assert step_law(config, ceilings, operators=400)(1, [1]) - step_law(config, ceilings)(1, [1]) == pytest.approx(4e-3)


def test_under_more_load_requests_wait_longer_and_fewer_keep_the_objective() -> None:
    law = step_law(known_model("llama-3-8b"), known_hardware("h100-sxm").ceilings("bf16"))
    runs = []
    for rate in (2.0, 20.0, 200.0):
        trace = poisson_trace(100, rate, prompt_tokens=(100, 500), output_tokens=(10, 100), seed=3)
        runs.append(simulate(trace, law, max_batch=8).numbers(2.5, ttft_s=0.5, tpot_s=0.05))
    assert runs[0]["ttft_p99_s"] < runs[1]["ttft_p99_s"] < runs[2]["ttft_p99_s"]
    shares = [run["goodput_per_s"] / rate for run, rate in zip(runs, (2.0, 20.0, 200.0), strict=True)]  # type: ignore[operator]
    assert shares[0] > shares[1] > shares[2]
