"""Chapter 4, second half. Continuous batching: the batch is chosen anew at every step.

A static batch waits for its longest answer. Here a request leaves as soon as it is done and the next one takes its slot in the
very next step: iteration-level scheduling (Orca; Yu et al., OSDI 2022). One pass serves all: the tokens of all running
requests, one for a request that decodes and the whole prompt for a new one, are *packed* into one row (1, N) without padding.
The linear layers see N tokens and do not care whose they are; only attention, in the cache, treats each request by itself.

    Scheduler     decides who runs: knows lengths, never tokens. First come, first served.
    SlottedCache  keeps the keys and values of each running request in a slot (slotted_cache.py)
    Engine        one step: schedule, pack, run the model, choose the next tokens

Invariants: the running requests hold the slots 0 to n-1, in the order of the rows; a token's position is its place in its slot;
what running requests may still write never exceeds the cache, so no request, once admitted, is ever thrown out.
"""

from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from minillm.batch import OnBatchToken, Request, Row, check_max_batch, choose, record, requests_of, rows_of
from minillm.errors import UsageError
from minillm.generation import Generation, Recorder
from minillm.model import Transformer
from minillm.sampling import SamplerLike, greedy
from minillm.stages import static_batching
from minillm.stages.slotted_cache import SlottedCache


class Scheduler:
    """Who runs in the next step. Bounded by slots and by the tokens that all running requests together may keep.

    Requests are admitted in the order in which they came, and none overtakes: the first in the queue gets the next room that is
    enough for it, so none starves. `max_tokens` None is no bound beyond that of the slots.
    """

    def __init__(self, max_batch: int, max_length: int, max_tokens: int | None = None) -> None:
        check_max_batch(max_batch)
        self.max_batch = max_batch
        self.max_length = max_length  # tokens that one slot holds
        self.max_tokens = max_batch * max_length if max_tokens is None else max_tokens
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []  # in the order of their slots

    def submit(self, row: Row) -> None:
        """Put a request at the end of the queue. Raises `UsageError` for one that would never fit."""
        limit = min(self.max_length, self.max_tokens)
        if row.size > limit:
            raise UsageError(
                f"A request of {len(row.prompt)} prompt tokens and {row.request.max_new_tokens} new ones keeps {row.size} "
                f"tokens, and the cache has room for {limit}: shorten it or give the cache more."
            )
        self.waiting.append(row)

    @property
    def reserved(self) -> int:
        """Tokens that the running requests may come to keep."""
        return sum(row.size for row in self.running if not row.finished)

    def schedule(self) -> list[tuple[int, int]]:
        """Retire finished requests and admit waiting ones: `running` is then the next step's batch.

        A new request takes the slot of one that has finished. Where no new one comes, a running request from the end moves
        into the gap; these moves are returned as (from slot, to slot).
        """
        free = [slot for slot, row in enumerate(self.running) if row.finished]
        reserved = self.reserved
        while self.waiting and reserved + self.waiting[0].size <= self.max_tokens:
            if free:
                self.running[free.pop(0)] = self.waiting[0]
            elif len(self.running) < self.max_batch:
                self.running.append(self.waiting[0])
            else:
                break
            reserved += self.waiting.popleft().size
        n = len(self.running) - len(free)
        behind = [slot for slot in range(n, len(self.running)) if slot not in free]
        moves = list(zip(behind, [slot for slot in free if slot < n], strict=True))  # as many as there are gaps
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[n:]
        return moves


class Engine:
    """Serves requests, each of which comes when it comes: `submit` at any time, then `step` until `busy` is False.

    `max_batch` requests run at a time, of at most `max_length` tokens each and `max_tokens` all together. Memory for
    max_batch x max_length tokens is taken at once; raises `MinillmError` where the device has less.
    """

    def __init__(self, model: Transformer, max_batch: int, max_length: int, max_tokens: int | None = None) -> None:
        self.model = model
        self.scheduler = Scheduler(max_batch, max_length, max_tokens)
        self.cache = SlottedCache(model, max_batch, max_length)
        self.steps = 0  # passes of the model so far
        self.tokens: Tensor  # (n,): what the last step gave, in the order of the slots

    def submit(self, row: Row) -> None:
        """Put a request into the queue. Raises `UsageError` for one that would never fit."""
        self.scheduler.submit(row)

    @property
    def busy(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.scheduler.waiting) or any(not row.finished for row in self.scheduler.running)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """One pass of the model: every running request gets its next token. Returns those that this finished.

        With no request to run, none finishes and the model does not run.
        """
        for source, target in self.scheduler.schedule():
            self.cache.move(source, target)
        rows = self.scheduler.running
        if not rows:
            return []
        for slot, row in enumerate(rows):
            if row.is_new:
                self.cache.clear(slot)
        last = self.cache.pack([len(row.feed) for row in rows])  # (n,)
        hidden = self.model.hidden(torch.cat([row.feed for row in rows])[None], self.cache)[0]  # (1, N) -> (N, C)
        if len(hidden) > len(rows):
            hidden = hidden[last]  # of a prompt, only the last position is asked
        self.tokens = choose(rows, self.model.head(hidden))  # (n, V) -> (n,)
        record(rows, self.tokens)
        self.steps += 1
        return [row for row in rows if row.finished]


def run(model: Transformer, tokens: Tensor, max_new_tokens: int, sampler: SamplerLike, recorder: Recorder) -> None:
    """Extend B prompts of equal length, tokens (B, T), admitted together, by up to `max_new_tokens` each."""
    B, T = tokens.shape
    engine = Engine(model, max_batch=B, max_length=T + max_new_tokens - 1)
    for prompt in tokens:
        row = Row(model, Request([0] * T, max_new_tokens, sampler))
        row.feed = prompt  # as it is: on `meta` it cannot be read
        engine.submit(row)
    for _ in range(max_new_tokens):
        engine.step()
        if recorder.add(engine.tokens):
            break


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    max_new_tokens: int | Sequence[int] = 0,
    *,
    max_batch: int = 16,
    max_cache_tokens: int | None = None,
    sampler: SamplerLike = greedy,
    stop_tokens: Collection[int] = (),
    on_token: OnBatchToken | None = None,
) -> list[Generation]:
    """Answer all prompts, `max_batch` at a time, each leaving its slot to the next one as soon as it is done.

    `max_new_tokens` is one limit or one a prompt, `on_token` is called with the index of a prompt and its token; a `Request`
    among the prompts has settings of its own, so where all are `Request`s the limit is left out. `max_cache_tokens` bounds what
    the running ones may keep all together. Answers come in the order of the prompts, their times count from this call. Raises
    `UsageError` for a request that cannot run, before any runs.
    """
    check_max_batch(max_batch)
    rows = rows_of(model, requests_of(prompts, max_new_tokens, sampler, stop_tokens, on_token))
    engine = Engine(model, min(max_batch, len(rows)), max(row.size for row in rows), max_cache_tokens)
    # All have come at once, so nobody is overtaken: the longest first, or the last steps would run for one straggler.
    for row in sorted(rows, key=lambda row: -row.remaining):
        engine.submit(row)
    while engine.busy:
        engine.step()
    return [row.generation() for row in rows]


generate_static = static_batching.generate
