"""What serving a workload gives: in real time on a model, or simulated by a law of step times.

A workload is a list of `Arrival`, as `minillm/trace.py` draws and reads them.

    serve                          the engine of chapter 4 on a model, by the clock
    simulate, simulate_static      the same schedule without a model: a step lasts what a law says
    ideal_steps                    how few steps of the model could do

`serve` and the simulations give a `Served`, from which the five numbers of one run come.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from minillm.batch import Request, Row, check_max_batch, rows_of
from minillm.config import ModelConfig
from minillm.device import DTYPES, wait_for
from minillm.errors import UsageError
from minillm.metrics import FiveNumbers, RequestTimes, goodput, percentile, summarize_requests, ttft, user_tps
from minillm.model import Transformer
from minillm.roofline.ceilings import Ceilings
from minillm.stages.batching import Engine, Scheduler
from minillm.trace import MOST_TOKENS, Arrival

# --- What serving gave


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the model, in seconds after the beginning. `slots` says whose token each slot gave.

    None is a slot that was computed for nobody: in a static batch, one whose answer has ended.
    """

    start: float
    end: float
    slots: tuple[Hashable | None, ...]


class ServedNumbers(FiveNumbers):
    """The five numbers of one run of a workload, and what they leave open. `ttft_s` is the median over requests."""

    ttft_p99_s: float
    user_tokens_per_s: float | None  # the median over requests of `user_tps`
    goodput_per_s: float | None  # requests that kept the objective


@dataclass(frozen=True)
class Served:
    """When each request came and got its tokens, by id in the order in which they ended, and every step of the model."""

    requests: dict[Hashable, RequestTimes]
    steps: list[Step]

    def numbers(
        self, price_per_hour: float | None = None, *, ttft_s: float = math.inf, tpot_s: float = math.inf
    ) -> ServedNumbers:
        """All numbers of this run; `ttft_s` and `tpot_s` are the objective that goodput counts by.

        Raises `UsageError` for a negative price or limit.
        """
        requests = list(self.requests.values())
        rates = [rate for request in requests if (rate := user_tps(request)) is not None]
        return {
            **summarize_requests(requests, price_per_hour),
            "ttft_p99_s": percentile([ttft(request) for request in requests], 99),
            "user_tokens_per_s": statistics.median(rates) if rates else None,
            "goodput_per_s": goodput(requests, ttft_s=ttft_s, tpot_s=tpot_s),
        }


def ideal_steps(output_tokens: Sequence[int], max_batch: int) -> int:
    """The least number of steps in which answers of these lengths, all asked for at the start, can be given.

    A step gives at most `max_batch` tokens, and of one answer at most one:

        max(ceil(sum of lengths / max_batch), longest)

    It is reached by a server that may put an answer aside and go on with it later (McNaughton 1959, Management Science
    6(1)). One that keeps a request in its slot until it is done cannot always: three answers of 10 tokens in two slots take 20
    steps, not 15. Longest first, it stays below 4/3 of the least that it could (Graham 1969, SIAM J. Appl. Math. 17(2)), and
    comes within a few percent as soon as each slot serves several requests. Raises `UsageError` for max_batch below 1.
    """
    check_max_batch(max_batch)
    return max(-(-sum(output_tokens) // max_batch), max(output_tokens, default=0))


# --- The law of step times

StepSeconds: TypeAlias = Callable[[int, Sequence[int]], float]  # tokens in the step, and S of each running request


def step_law(config: ModelConfig, ceilings: Ceilings, operators: int = 0) -> StepSeconds:
    """How long a step lasts, by the roofline: weights are read while the products run, then each request's own cache is.

        max(2 P N / peak, weights / bandwidth) + KV bytes / bandwidth + operators x overhead

    P weights in products, N tokens in the step, `operators` launched in it. Attention's FLOPs are left out, and the head is
    counted for every token of a prompt. Source: Austin et al., "How to Scale Your Model" (2025), chapter on inference.
    """
    item = DTYPES[ceilings.dtype].itemsize
    flop_seconds = 2 * config.matmul_params / ceilings.peak  # a token
    weight_seconds = config.streamed_params * item / ceilings.bandwidth
    kv_seconds = config.kv_bytes_per_token(item) / ceilings.bandwidth
    window = config.sliding_window or 2 * MOST_TOKENS  # longer than any prompt and its answer

    def seconds(n_tokens: int, lengths: Sequence[int]) -> float:
        cached = sum(min(length, window) for length in lengths)
        return max(n_tokens * flop_seconds, weight_seconds) + cached * kv_seconds + operators * ceilings.overhead

    return seconds


# --- Serving


class _WallClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, moment: float) -> None:
        time.sleep(max(moment - self.now(), 0.0))


class _SimulatedClock:
    """Seconds that pass when someone says so."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = moment


class _Lengths(Row):
    """A request of which only the lengths are known: a scheduler asks for no more, and there is no model."""

    def __init__(self, arrival: Arrival) -> None:
        self.prompt = range(arrival.prompt_tokens)  # type: ignore[assignment]  # of any length, without memory
        self.request = Request(self.prompt, arrival.output_tokens, id=arrival.id)
        self.remaining = arrival.output_tokens
        self.stopped = False


OnFinished: TypeAlias = Callable[[Row, RequestTimes], None]


def _play(
    queue: Iterable[tuple[float, Row]],
    submit: Callable[[Row], None],
    step: Callable[[], Sequence[Row | None]],
    clock: _WallClock | _SimulatedClock,
    on_finished: OnFinished | None = None,
) -> Served:
    """Submit each request once it has arrived, and step as long as one is unfinished.

    `step` returns the rows in the order of their slots, each of which has got a token, and None for a slot that gave none.
    Requests that arrive at one moment are taken in the order given.
    """
    coming = deque(sorted(queue, key=lambda entry: entry[0]))
    arrived = {row.request.id: moment for moment, row in coming}
    times: dict[Hashable, list[float]] = {id: [] for id in arrived}
    served = Served({}, [])
    while times:
        while coming and coming[0][0] <= clock.now():
            submit(coming.popleft()[1])
        if len(times) == len(coming):  # nobody is here
            clock.wait_until(coming[0][0])
            continue
        start = clock.now()
        rows = step()
        end = clock.now()
        served.steps.append(Step(start, end, tuple(None if row is None else row.request.id for row in rows)))
        for row in rows:
            if row is None:
                continue
            id = row.request.id
            times[id].append(end)
            if row.finished:
                served.requests[id] = RequestTimes(arrived[id], times.pop(id))
                if on_finished is not None:
                    on_finished(row, served.requests[id])
    return served


def serve_rows(engine: Engine, queue: Iterable[tuple[float, Row]], on_finished: OnFinished | None = None) -> Served:
    """Serve requests, each with the second at which it comes, by the clock; sleeps only while there is nothing to do.

    A token's time is when the host could read it: a step is over when the device is done. `on_finished` is called with each
    request that ends and its times. Each needs an `id` of its own. Raises `UsageError` for one that would never fit.
    """

    def step() -> Sequence[Row]:
        engine.step()
        wait_for(engine.model.device)
        return engine.scheduler.running

    return _play(queue, engine.submit, step, _WallClock(), on_finished)


def serve(model: Transformer, arrivals: Sequence[Arrival], *, max_batch: int, max_tokens: int | None = None) -> Served:
    """Serve a workload in real time with continuous batching: `Engine` on `model`, first come, first served.

    `max_batch` and `max_tokens` bound what runs at a time, as in `Scheduler`. Every answer has just as many tokens as the
    workload says. Raises `UsageError` for a request that cannot run, before any runs.
    """
    vocab_size = model.config.vocab_size
    rows = rows_of(model, [Request(a.ids(vocab_size), a.output_tokens, id=a.id) for a in arrivals])
    engine = Engine(model, max_batch, _longest(rows, max_batch, max_tokens), max_tokens)
    return serve_rows(engine, _queue(arrivals, rows))


def simulate(
    arrivals: Sequence[Arrival], step_seconds: StepSeconds, *, max_batch: int, max_tokens: int | None = None
) -> Served:
    """What `serve` would do, without a model: the same scheduler, and each step lasts what `step_seconds` says.

    It is told the tokens in the step and, for each running request, the tokens that are attended over. See `step_law`.
    """
    rows = [_Lengths(arrival) for arrival in arrivals]
    scheduler = Scheduler(max_batch, _longest(rows, max_batch, max_tokens), max_tokens)
    clock = _SimulatedClock()

    def step() -> Sequence[Row]:
        scheduler.schedule()
        running = scheduler.running
        n_tokens = sum(len(row.prompt) if row.is_new else 1 for row in running)
        for row in running:
            row.remaining -= 1
        clock.wait_until(clock.now() + step_seconds(n_tokens, [row.size - row.remaining for row in running]))
        return running

    return _play(_queue(arrivals, rows), scheduler.submit, step, clock)


def simulate_static(arrivals: Sequence[Arrival], step_seconds: StepSeconds, *, max_batch: int) -> Served:
    """The same workload with static batching: when idle, the server takes those who wait, at most `max_batch`.

    Prompts are padded to the longest of the batch, and all its slots are computed until its longest answer ends; who comes in
    the meantime waits. With all requests there at the start these are the batches of `generate_static`.
    """
    rows = [_Lengths(arrival) for arrival in arrivals]
    _longest(rows, max_batch, None)
    waiting: deque[Row] = deque()
    batch: list[Row] = []
    clock = _SimulatedClock()

    def step() -> Sequence[Row | None]:
        if all(row.finished for row in batch):  # also where there was none yet
            batch[:] = [waiting.popleft() for _ in range(min(max_batch, len(waiting)))]
        T = max(len(row.prompt) for row in batch)
        n_tokens = len(batch) * (T if batch[0].is_new else 1)
        slots = [None if row.finished else row for row in batch]
        for row in batch:
            row.remaining = max(row.remaining - 1, 0)
        S = T - 1 + max(row.request.max_new_tokens - row.remaining for row in batch)
        clock.wait_until(clock.now() + step_seconds(n_tokens, [S] * len(batch)))
        return slots

    return _play(_queue(arrivals, rows), waiting.append, step, clock)


def _longest(rows: Sequence[Row], max_batch: int, max_tokens: int | None) -> int:
    """The tokens that the longest request keeps. Raises `UsageError` for none, for two of one id, and for what never fits."""
    if not rows:
        raise UsageError("There are no requests: give at least one.")
    if len({row.request.id for row in rows}) < len(rows):
        raise UsageError("Two requests have the same id: give each its own.")
    longest = max(rows, key=lambda row: row.size)
    Scheduler(max_batch, longest.size, max_tokens).submit(longest)
    return longest.size


def _queue(arrivals: Iterable[Arrival], rows: Iterable[Row]) -> list[tuple[float, Row]]:
    return [(arrival.arrival_s, row) for arrival, row in zip(arrivals, rows, strict=True)]
