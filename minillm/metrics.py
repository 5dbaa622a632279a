"""The five numbers of a served model, from the times at which its tokens were ready.

    TTFT   time to first token           how long the reader waits for anything
    ITL    inter-token latency           how smoothly the text then flows
    TPS    tokens per second             of one user and of the whole system: two numbers, never mixed
    P99    the 99th percentile           the threshold that 99 of 100 values stay below, not a mean of the slow ones
    $      dollars per million tokens    what the system's rate costs

Tools give different formulas one name. "As in" says who defines a number so: the serving benchmarks of vLLM and SGLang,
NVIDIA's GenAI-Perf and AIPerf, MLPerf's loadgen. All five leave the first token out of ITL and TPOT: it is in TTFT.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from minillm.errors import UsageError


@dataclass(frozen=True)
class RequestTimes:
    """When a request was sent and when each of its tokens was ready, in seconds on one clock.

    Tokens may share a time: a speculative step delivers several at once. Raises `UsageError` where there is no token or
    a time that is not finite or lies before the preceding one.
    """

    start: float
    tokens: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))
        if not self.tokens:
            raise UsageError("A request without tokens has no times to measure: generate at least one token.")
        times = [self.start, *self.tokens]
        if not all(map(math.isfinite, times)) or times != sorted(times):
            raise UsageError("Token times must be finite numbers that do not decrease, none before the start.")


class FiveNumbers(TypedDict):
    """What `summarize` returns and `--json` writes. A number that this run does not define is None."""

    ttft_s: float
    itl_p50_s: float | None
    itl_p99_s: float | None
    tokens_per_s: float | None
    usd_per_million_tokens: float | None


def ttft(request: RequestTimes) -> float:
    """Time to first token, seconds: first token - start. As in all five. Under load mostly queueing."""
    return request.tokens[0] - request.start


def e2e(request: RequestTimes) -> float:
    """End-to-end latency, seconds: last token - start. As in vLLM and SGLang (E2EL), AIPerf ("request latency")."""
    return request.tokens[-1] - request.start


def itl(request: RequestTimes) -> list[float]:
    """Inter-token latencies, seconds: the n - 1 gaps between n tokens; none for one token. As in vLLM and SGLang.

    They see chunks of a stream, so there a chunk of several tokens ends one gap; AIPerf calls such gaps ICL, and calls
    `tpot`, one value a request, ITL. GenAI-Perf divides each gap by the number of tokens in the later chunk.
    """
    return [later - earlier for earlier, later in zip(request.tokens, request.tokens[1:], strict=False)]


def tpot(request: RequestTimes) -> float | None:
    """Time per output token, seconds: (E2E - TTFT) / (n - 1), None for one token. As in vLLM, SGLang and loadgen.

    It is the mean of this request's `itl`: a stall that shows in the P99 of ITL disappears in it.
    """
    n = len(request.tokens)
    return (request.tokens[-1] - request.tokens[0]) / (n - 1) if n > 1 else None


def user_tps(request: RequestTimes) -> float | None:
    """Tokens/s that one user sees flow: 1 / TPOT, without TTFT; 50 ms make 20. As in AIPerf ("per user").

    None where TPOT is undefined or 0.
    """
    seconds = tpot(request)
    return 1 / seconds if seconds else None


def system_tps(requests: Sequence[RequestTimes]) -> float | None:
    """Output tokens/s of the whole system: all tokens / (last token - first start). As in vLLM, SGLang and AIPerf.

    Waiting and prefill count, as they do on the bill. None when no time passed.
    """
    seconds = _duration(requests)
    return sum(len(request.tokens) for request in requests) / seconds if seconds else None


def mean_itl(requests: Sequence[RequestTimes]) -> float | None:
    """Mean of all requests' gaps, seconds: sum of gaps / sum of (n - 1). As in vLLM and SGLang: *token*-weighted.

    The divisor is not the number of tokens: a first token has no gap. None where no request has two tokens.
    """
    return _mean([gap for request in requests for gap in itl(request)])


def mean_tpot(requests: Sequence[RequestTimes]) -> float | None:
    """Mean of the requests' TPOTs, seconds: *request*-weighted. As in vLLM and SGLang; AIPerf's mean "ITL".

    A short request weighs as much as a long one, so this differs from `mean_itl` of the same run. Requests of one token
    are left out. None where no request has two.
    """
    return _mean([value for request in requests if (value := tpot(request)) is not None])


def percentile(values: Sequence[float], p: float, rule: Literal["interpolated", "nearest"] = "interpolated") -> float:
    """The p-th percentile (0 to 100) of n values, in their unit. Raises `UsageError` for no values or another p.

    interpolated   sorted values at position (n - 1) p / 100, linear between neighbours. As in vLLM (np.percentile).
    nearest        sorted[floor(n p / 100)], always a value that occurred; at most the last. As in MLPerf loadgen.

    P99 of 1, 2, ..., 100 is 99.01 by the first and 100 by the second. (Textbooks mean sorted[ceil(n p / 100) - 1] by
    nearest rank, here 99.) Of up to 100 values P99 lies between the two largest, or is the largest: it tells of the one
    slowest value, not of a tail.
    """
    if len(values) == 0:
        raise UsageError("No values: a percentile needs at least one.")
    if not 0 <= p <= 100:
        raise UsageError(f"Percentile {p} does not lie between 0 and 100.")
    if not all(map(math.isfinite, values)):
        raise UsageError("A percentile needs finite values.")
    if rule not in ("interpolated", "nearest"):
        raise UsageError(f"Unknown percentile rule {rule!r}: choose interpolated or nearest.")
    ordered, last = sorted(values), len(values) - 1
    if rule == "nearest":
        return ordered[min(math.floor(len(values) * p / 100), last)]
    below, part = divmod(last * p / 100, 1)
    lower, upper = ordered[int(below)], ordered[min(int(below) + 1, last)]
    return lower + part * (upper - lower)


def goodput(
    requests: Sequence[RequestTimes], *, ttft_s: float = math.inf, tpot_s: float = math.inf, e2e_s: float = math.inf
) -> float | None:
    """Requests per second that keep *all* limits (seconds; equal is kept). As in vLLM and AIPerf.

    Divided by last token - first start over all requests, good or not; None when no time passed. A request of one token
    counts as TPOT 0, as in vLLM, where ITL has no limit either. MLPerf has none of this: there a run is invalid unless
    the P99s of TTFT and TPOT keep the limits. Raises `UsageError` for a negative limit.
    """
    for name, limit in (("ttft_s", ttft_s), ("tpot_s", tpot_s), ("e2e_s", e2e_s)):
        if not limit >= 0:
            raise UsageError(f"{name} is {limit}; a limit is 0 seconds or more.")
    seconds = _duration(requests)
    good = sum(ttft(r) <= ttft_s and (tpot(r) or 0.0) <= tpot_s and e2e(r) <= e2e_s for r in requests)
    return good / seconds if seconds else None


def usd_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Dollars per million output tokens: price per hour / 3600 / tokens per second x 10^6. None of the tools prints it.

    The rate is the *system's*, all users together, on a machine that is always busy: at half load, double the result.
    2.50 $/h is 6.94 $ at 100 tokens/s. Raises `UsageError` for a negative price and a rate that is not positive.
    """
    if not 0 <= price_per_hour < math.inf:
        raise UsageError(f"The price is {price_per_hour} $/h; it must be 0 or more.")
    if not 0 < tokens_per_s < math.inf:
        raise UsageError(f"The rate is {tokens_per_s} tokens/s; it must be more than 0.")
    return price_per_hour / 3600 / tokens_per_s * 1e6


def summarize(times: Sequence[float], price_per_hour: float | None = None) -> FiveNumbers:
    """The five numbers of one run from `Generation.times`, seconds since its call began; percentiles interpolated.

    `tokens_per_s` is `system_tps` of this run, n / times[-1]: prefill counts, as in vLLM's throughput and on the bill.
    (The rate at which this user sees tokens flow is `user_tps`.) ITL is None for one token, dollars without a price.
    """
    return summarize_requests([RequestTimes(0.0, times)], price_per_hour)


def summarize_requests(requests: Sequence[RequestTimes], price_per_hour: float | None = None) -> FiveNumbers:
    """The five numbers of requests served together. TTFT is the median over requests, ITL is pooled over all their gaps.

    `tokens_per_s` is the *system's*, `system_tps`, and dollars follow from it. What one user sees is `user_tps` of a request.
    """
    gaps = [gap for request in requests for gap in itl(request)]
    rate = system_tps(requests)
    usd = usd_per_million_tokens(price_per_hour, rate) if price_per_hour is not None and rate else None
    return {
        "ttft_s": percentile([ttft(request) for request in requests], 50),
        "itl_p50_s": percentile(gaps, 50) if gaps else None,
        "itl_p99_s": percentile(gaps, 99) if gaps else None,
        "tokens_per_s": rate,
        "usd_per_million_tokens": usd,
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _duration(requests: Sequence[RequestTimes]) -> float:
    """Seconds from the first start to the last token."""
    if not requests:
        raise UsageError("No requests: give at least one.")
    return max(request.tokens[-1] for request in requests) - min(request.start for request in requests)
