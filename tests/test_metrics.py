"""The five numbers on made-up timestamps, with the values written out by hand."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from helpers import is_one_sentence
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import UsageError
from minillm.metrics import (
    RequestTimes,
    e2e,
    goodput,
    itl,
    mean_itl,
    mean_tpot,
    percentile,
    summarize,
    summarize_requests,
    system_tps,
    tpot,
    ttft,
    usd_per_million_tokens,
    user_tps,
)

# Sent at 10 s; first token after 0.5 s; then gaps of 0.25, 0.25 and 1 s. Binary fractions, so that sums are exact.
REQUEST = RequestTimes(10.0, [10.5, 10.75, 11.0, 12.0])
ONE_TOKEN = RequestTimes(10.0, [10.5])


def test_times_of_one_request() -> None:
    assert ttft(REQUEST) == 0.5
    assert e2e(REQUEST) == 2.0
    assert itl(REQUEST) == [0.25, 0.25, 1.0]
    assert tpot(REQUEST) == 0.5  # (2.0 - 0.5) / 3
    assert user_tps(REQUEST) == 2.0


def test_first_token_is_in_ttft_and_in_neither_itl_nor_tpot() -> None:
    later = RequestTimes(0.0, REQUEST.tokens)  # the same tokens, sent 10 s earlier
    assert ttft(later) == 10.5
    assert itl(later) == itl(REQUEST)
    assert tpot(later) == tpot(REQUEST)
    assert user_tps(later) == user_tps(REQUEST)


def test_one_token_has_no_gap_no_tpot_and_no_user_rate() -> None:
    assert itl(ONE_TOKEN) == []
    assert tpot(ONE_TOKEN) is None
    assert user_tps(ONE_TOKEN) is None
    assert mean_itl([ONE_TOKEN]) is None
    assert mean_tpot([ONE_TOKEN]) is None


def test_tokens_that_come_together_have_gap_zero_and_no_user_rate() -> None:
    burst = RequestTimes(0.0, [1.0, 1.0, 1.0])
    assert itl(burst) == [0.0, 0.0]
    assert tpot(burst) == 0.0
    assert user_tps(burst) is None


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_tpot_is_the_mean_of_the_requests_own_gaps(times: list[float]) -> None:
    request = RequestTimes(0.0, sorted(times))
    assert tpot(request) == pytest.approx(math.fsum(itl(request)) / len(itl(request)), rel=1e-9, abs=1e-9)


def test_50_ms_a_token_is_20_tokens_per_second_for_the_user() -> None:
    assert user_tps(RequestTimes(0.0, [3.0, 3.05, 3.1])) == pytest.approx(20.0)


def test_system_rate_counts_all_tokens_over_first_start_to_last_token() -> None:
    requests = [RequestTimes(1.0, [2.0, 3.0]), RequestTimes(2.0, [2.5, 3.5, 4.0, 5.0])]
    assert system_tps(requests) == 6 / 4
    assert system_tps([RequestTimes(1.0, [1.0])]) is None


def test_mean_itl_weighs_tokens_and_mean_tpot_weighs_requests() -> None:
    long_fast = RequestTimes(0.0, [1.0, 2.0, 3.0, 4.0, 5.0])  # four gaps of 1 s
    short_slow = RequestTimes(0.0, [1.0, 7.0])  # one gap of 6 s
    assert mean_itl([long_fast, short_slow]) == 10 / 5  # 5 = (5 - 1) + (2 - 1), not 7 tokens
    assert mean_tpot([long_fast, short_slow]) == (1 + 6) / 2
    assert mean_tpot([long_fast, short_slow, ONE_TOKEN]) == (1 + 6) / 2


def test_p99_of_1_to_100_under_both_rules() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 99) == pytest.approx(99.01, rel=1e-15)
    assert percentile(values, 99, "nearest") == 100
    assert percentile(values, 50) == 50.5
    assert percentile(values, 50, "nearest") == 51


@pytest.mark.parametrize("rule", ["interpolated", "nearest"])
def test_percentiles_0_and_100_are_the_extremes(rule: str) -> None:
    assert percentile([3.0, 1.0, 2.0], 0, rule) == 1.0
    assert percentile([3.0, 1.0, 2.0], 100, rule) == 3.0
    assert percentile([7.0], 50, rule) == 7.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0, 100))
def test_interpolated_percentile_is_numpys(values: list[float], p: float) -> None:
    # Both find position (n - 1) p / 100 < 200 and blend two values: a few roundings of numbers up to 200 and up to 1e6.
    assert percentile(values, p) == pytest.approx(np.percentile(values, p), rel=1e-12, abs=1e6 * 200 * 2**-51)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.sampled_from([50, 90, 95, 99]))
def test_nearest_percentile_is_loadgens(values: list[float], p: int) -> None:
    expected = sorted(values)[int(len(values) * p) // 100]
    assert percentile(values, p, "nearest") == expected


def test_p99_of_fewer_than_100_values_tells_of_the_slowest_one_only() -> None:
    usual, slowest = [1.0] * 19, [1001.0]
    assert percentile(usual + slowest, 99, "nearest") == 1001.0
    assert percentile(usual + slowest, 99) == pytest.approx(1 + 0.81 * 1000)  # position 19 x 0.99 = 18.81


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    fast = RequestTimes(0.0, [1.0, 1.5, 2.0])  # TTFT 1, TPOT 0.5, E2E 2
    late = RequestTimes(0.0, [3.0, 3.5, 4.0])  # TTFT 3, TPOT 0.5, E2E 4
    slow = RequestTimes(0.0, [1.0, 3.0, 5.0])  # TTFT 1, TPOT 2,   E2E 5
    requests = [fast, late, slow]  # within 5 s
    assert goodput(requests) == 3 / 5
    assert goodput(requests, ttft_s=2) == 2 / 5
    assert goodput(requests, tpot_s=1) == 2 / 5
    assert goodput(requests, ttft_s=2, tpot_s=1) == 1 / 5
    assert goodput(requests, ttft_s=1, tpot_s=0.5, e2e_s=2) == 1 / 5  # exactly on a limit keeps it
    assert goodput(requests, e2e_s=4) == 2 / 5
    assert goodput(requests, e2e_s=1) == 0.0


def test_goodput_takes_tpot_of_one_token_as_0() -> None:
    assert goodput([ONE_TOKEN], tpot_s=0.0) == 1 / 0.5


def test_dollars_per_million_tokens() -> None:
    assert usd_per_million_tokens(3.6, 1000.0) == pytest.approx(1.0, rel=1e-15)
    assert usd_per_million_tokens(2.5, 100.0) == pytest.approx(6.944444444444445, rel=1e-15)
    assert usd_per_million_tokens(2.5, 3000.0) == pytest.approx(0.23148148148148148, rel=1e-15)
    assert usd_per_million_tokens(3.6, 0.5) == pytest.approx(2000.0, rel=1e-15)  # two seconds a token is a rate too
    assert usd_per_million_tokens(0.0, 100.0) == 0.0


def test_summary_of_a_run() -> None:
    # Four tokens in 2 s: 2 tokens/s, so 7.2 $/h = 0.002 $/s is 0.001 $ a token. Gaps 0.25, 0.25, 1: P99 at position 1.98.
    assert summarize([0.5, 0.75, 1.0, 2.0], price_per_hour=7.2) == {
        "ttft_s": 0.5,
        "itl_p50_s": 0.25,
        "itl_p99_s": pytest.approx(0.25 + 0.98 * 0.75, rel=1e-12),
        "tokens_per_s": 2.0,
        "usd_per_million_tokens": pytest.approx(1000.0, rel=1e-12),
    }


def test_summary_of_two_gaps_has_their_mean_as_median() -> None:
    assert summarize([0.5, 0.75, 1.5])["itl_p50_s"] == 0.5  # of 0.25 and 0.75


def test_summary_of_several_requests_pools_their_gaps_and_takes_the_median_of_their_ttft() -> None:
    first = RequestTimes(0.0, [1.0, 1.5])  # TTFT 1, gap 0.5
    second = RequestTimes(1.0, [5.0, 5.25, 6.25])  # TTFT 4, gaps 0.25 and 1
    assert summarize_requests([first, second], price_per_hour=3.6) == {
        "ttft_s": 2.5,  # of 1 and 4
        "itl_p50_s": 0.5,
        "itl_p99_s": pytest.approx(0.5 + 0.98 * 0.5, rel=1e-12),  # position 1.98 of 0.25, 0.5, 1
        "tokens_per_s": 5 / 6.25,
        "usd_per_million_tokens": pytest.approx(1250.0, rel=1e-12),  # 0.001 $/s at 0.8 tokens/s
    }


def test_summary_leaves_undefined_numbers_none() -> None:
    assert summarize([0.5]) == {
        "ttft_s": 0.5,
        "itl_p50_s": None,
        "itl_p99_s": None,
        "tokens_per_s": 2.0,
        "usd_per_million_tokens": None,
    }
    assert summarize([0.0], price_per_hour=1.0) == {
        "ttft_s": 0.0,
        "itl_p50_s": None,
        "itl_p99_s": None,
        "tokens_per_s": None,
        "usd_per_million_tokens": None,
    }


BAD_INPUT = {
    "no tokens": (lambda: RequestTimes(0.0, []), "A request without tokens"),
    "no tokens in a summary": (lambda: summarize([]), "A request without tokens"),
    "a token before the start": (lambda: RequestTimes(1.0, [0.5]), "none before the start"),
    "a negative time in a summary": (lambda: summarize([-0.1, 0.2]), "none before the start"),
    "decreasing times": (lambda: RequestTimes(0.0, [1.0, 0.9]), "do not decrease"),
    "a time that is not a number": (lambda: RequestTimes(0.0, [math.nan]), "finite numbers"),
    "an infinite time": (lambda: RequestTimes(0.0, [1.0, math.inf]), "finite numbers"),
    "a percentile of nothing": (lambda: percentile([], 50), "No values"),
    "a percentile below 0": (lambda: percentile([1.0], -1), "Percentile -1 does not lie"),
    "a percentile above 100": (lambda: percentile([1.0], 100.5), "Percentile 100.5 does not lie"),
    "a percentile that is not a number": (lambda: percentile([1.0], math.nan), "Percentile nan does not lie"),
    "a percentile of values that are not numbers": (lambda: percentile([1.0, math.nan], 50), "needs finite values"),
    "an unknown rule": (lambda: percentile([1.0], 50, "median"), "rule 'median'"),  # type: ignore[arg-type]
    "no requests, rate": (lambda: system_tps([]), "No requests"),
    "no requests, goodput": (lambda: goodput([]), "No requests"),
    "a negative limit": (lambda: goodput([REQUEST], ttft_s=-1.0), "ttft_s is -1.0"),
    "a negative price": (lambda: usd_per_million_tokens(-1.0, 10.0), "price is -1.0 $/h"),
    "an infinite price": (lambda: usd_per_million_tokens(math.inf, 10.0), "price is inf $/h"),
    "a negative price in a summary": (lambda: summarize([0.5], price_per_hour=-1.0), "price is -1.0 $/h"),
    "a rate of 0": (lambda: usd_per_million_tokens(1.0, 0.0), "rate is 0.0 tokens/s"),
    "an infinite rate": (lambda: usd_per_million_tokens(1.0, math.inf), "rate is inf tokens/s"),
}


@pytest.mark.parametrize(("run", "words"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_refused_in_one_sentence(run: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError) as error:
        run()
    assert words in str(error.value)
    assert is_one_sentence(str(error.value))


def test_request_times_keep_a_copy() -> None:
    times = [1.0, 2.0]
    request = RequestTimes(0.0, times)
    times.append(0.0)
    assert request.tokens == (1.0, 2.0)
