"""What the batched stages share: requests, the rows of a batch, and how each row gets and keeps its next token."""

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from minillm.errors import UsageError
from minillm.generation import Generation, OnToken, Recorder, check_prompt
from minillm.model import Transformer
from minillm.sampling import SamplerLike, fresh, greedy

OnBatchToken = Callable[[int, int], None]  # which prompt, and its new token


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt with settings of its own. `id` tells it from others in traces and reports; None is no id."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampler: SamplerLike = greedy
    stop_tokens: Collection[int] = ()
    on_token: OnToken | None = None
    id: Hashable = None


class Row:
    """A request on its way: what it still wants, its own sampler, and the tokens so far with their times.

    The clock of its times starts when the row is made. Raises `UsageError` for a request that the model cannot run.
    """

    def __init__(self, model: Transformer, request: Request) -> None:
        self.request = request
        self.recorder = Recorder(model.device, request.stop_tokens, request.on_token)
        self.prompt = check_prompt(model.config, request.prompt, request.max_new_tokens)
        self.feed = torch.tensor(self.prompt, device=model.device)  # (T,): what the model is given next
        self.sampler = fresh(request.sampler)
        self.remaining = operator.index(request.max_new_tokens)  # new tokens that it may still get
        self.stopped = False

    @property
    def size(self) -> int:
        """Tokens that it may keep in a cache: the last new one is never fed back."""
        return len(self.prompt) + self.request.max_new_tokens - 1

    @property
    def is_new(self) -> bool:
        """Whether it has no token yet: its prompt is to be run."""
        return self.remaining == self.request.max_new_tokens

    @property
    def finished(self) -> bool:
        return self.stopped or self.remaining == 0

    def add(self, token: Tensor, value: int | None) -> None:
        """Take its next token (1,), which is also what it feeds to the model in the next step."""
        self.feed = token
        self.remaining -= 1
        self.stopped = self.recorder.add(token, value)

    def generation(self) -> Generation:
        return self.recorder.finish()


def requests_of(
    prompts: Sequence[Sequence[int] | Request],
    max_new_tokens: int | Iterable[int],
    sampler: SamplerLike,
    stop_tokens: Collection[int],
    on_token: OnBatchToken | None,
) -> list[Request]:
    """One request a prompt, with these settings; what is a `Request` already keeps its own.

    Raises `UsageError` for no prompts at all, for one prompt where a list of them belongs, and for limits that are not one a
    prompt.
    """
    if len(prompts) == 0:
        raise UsageError("There are no prompts: give at least one.")
    if numbers := [prompt for prompt in prompts if _is_number(prompt)]:
        raise UsageError(f"One of the prompts is {numbers[0]!r}: give a list of prompts, each a list of token ids.")
    limits: list[Any]
    if isinstance(max_new_tokens, Iterable) and not _is_number(max_new_tokens):
        limits = list(max_new_tokens)
    else:
        limits = [max_new_tokens] * len(prompts)
    if len(limits) != len(prompts):
        raise UsageError(
            f"There are {len(limits)} limits for {len(prompts)} prompts: give one number, or one a prompt."
        )

    def tell(index: int) -> OnToken | None:
        return None if on_token is None else lambda token: on_token(index, token)

    return [
        prompt if isinstance(prompt, Request) else Request(prompt, limit, sampler, stop_tokens, tell(i))
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def _is_number(x: object) -> bool:
    return isinstance(x, SupportsIndex) and getattr(x, "ndim", 0) == 0  # a tensor of several passes for an index too


def rows_of(model: Transformer, requests: Sequence[Request]) -> list[Row]:
    """All requests checked, before anything runs. Raises `UsageError` that names the one which is wrong."""
    seen: set[Hashable] = set()
    for request in requests:
        if request.id is not None and request.id in seen:
            raise UsageError(f"Two requests have the id {request.id!r}: give each its own.")
        seen.add(request.id)
    rows = []
    for i, request in enumerate(requests):
        try:
            rows.append(Row(model, request))
        except UsageError as error:
            name = f"Prompt {i + 1} of {len(requests)}" if request.id is None else f"Request {request.id!r}"
            raise UsageError(f"{name}: {error}") from None
    return rows


def check_max_batch(max_batch: int) -> None:
    """Raise `UsageError` unless at least one request can run."""
    if not isinstance(max_batch, SupportsIndex) or max_batch < 1:
        raise UsageError(f"max_batch is {max_batch!r}; at least one request must run at a time.")


def choose(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """The next token of every row, (n, V) -> (n,), each drawn by its row's sampler as if it were alone."""
    tokens = greedy(logits)
    drawn = [i for i, row in enumerate(rows) if row.sampler is not greedy and not row.finished]
    if not drawn:
        return tokens
    parts = list(tokens.split(1))
    for i in drawn:
        parts[i] = rows[i].sampler(logits[i : i + 1])
    return torch.cat(parts)


def record(rows: Sequence[Row], tokens: Tensor) -> None:
    """Give every row that is not finished its token of (n,). The host reads them all at once, if anyone wants to see one."""
    reads = any(row.recorder.reads and not row.finished for row in rows)
    values: Sequence[int | None] = tokens.tolist() if reads else [None] * len(rows)
    for row, token, value in zip(rows, tokens.split(1), values, strict=True):
        if not row.finished:
            row.add(token, value)
