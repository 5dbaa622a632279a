"""What every stage's `generate` shares: checking the request, recording tokens and their times, the result."""

import operator
import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import SupportsIndex, TypeAlias

import torch
from torch import Tensor

from minillm.config import ModelConfig, check_token
from minillm.device import wait_for
from minillm.errors import MinillmError, UsageError
from minillm.model import Transformer
from minillm.sampling import SamplerLike, fresh

OnToken = Callable[[int], None]


class Generation:
    """The new tokens of one request and when each was ready.

    Both are read from the device when first asked for, so that generating itself forces no synchronization.
    """

    def __init__(self, tokens: list[Tensor], clock: "Clock") -> None:
        self._tokens = tokens
        self._clock = clock

    @cached_property
    def tokens(self) -> list[int]:
        """The new token ids, in order, a stop token included. Raises `MinillmError` on the `meta` device."""
        if self._tokens and self._tokens[0].is_meta:
            raise MinillmError(
                "A generation on the meta device has shapes but no tokens: load the model on cpu or cuda."
            )
        return torch.cat(self._tokens).tolist() if self._tokens else []

    @cached_property
    def times(self) -> list[float]:
        """Seconds from the start of the call until each token was ready, one a token."""
        return self._clock.seconds()

    def __len__(self) -> int:
        return len(self._tokens)


class Clock:
    """Marks moments without making the host wait: CUDA events on a GPU, `time.perf_counter` elsewhere.

    On mps, which is untested, the host waits at each mark: `perf_counter` alone would tell when work was asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._device = device
        self._start = self._now()
        self._marks: list[torch.cuda.Event | float] = []

    def _now(self) -> "torch.cuda.Event | float":
        if not self.on_gpu:
            wait_for(self._device)
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark(self) -> None:
        self._marks.append(self._now())

    def seconds(self) -> list[float]:
        """Seconds from the start to each mark. On a GPU this waits for the last of them."""
        if not self._marks:
            return []
        if self.on_gpu:
            self._marks[-1].synchronize()  # type: ignore[union-attr]
            return [self._start.elapsed_time(mark) / 1e3 for mark in self._marks]  # type: ignore[union-attr, arg-type]
        return [mark - self._start for mark in self._marks]  # type: ignore[operator]


class Recorder:
    """Collects a request's tokens as they come. The host looks at a token only when someone asked to see it.

    Raises `UsageError` for stop tokens that are no ids.
    """

    def __init__(
        self, device: torch.device, stop_tokens: Collection[int] = (), on_token: OnToken | None = None
    ) -> None:
        self._tokens: list[Tensor] = []
        self._clock = Clock(device)
        try:  # as ints: tensors of equal ids are not equal keys of a set
            self._stop_tokens = frozenset(map(operator.index, stop_tokens))
        except TypeError:
            raise UsageError(f"stop_tokens is {stop_tokens!r}; give a collection of token ids, such as [2].") from None
        self._on_token = on_token

    @property
    def reads(self) -> bool:
        """Whether someone asked to see tokens as they come."""
        return self._on_token is not None or bool(self._stop_tokens)

    def add(self, token: Tensor, value: int | None = None) -> bool:
        """Take the next token (1,); True when it is a stop token, which is kept as the last one.

        `value` is the same token where the host knows it already: a batch reads those of all its rows at once.
        """
        self._tokens.append(token)
        self._clock.mark()
        if not self.reads:
            return False
        if value is None:
            value = int(token)  # the only place where the generation of one prompt waits for the device
        if self._on_token is not None:
            self._on_token(value)
        return value in self._stop_tokens

    def finish(self) -> Generation:
        return Generation(self._tokens, self._clock)


# The loop of a stage: tokens (B, T) of prompts of equal length, up to that many new tokens for each, sampler, recorder.
Run: TypeAlias = Callable[[Transformer, Tensor, int, SamplerLike, Recorder], None]


def check_prompt(config: ModelConfig, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """The prompt as a list. Raises `UsageError` unless it holds token ids and with its answer fits the model's positions."""
    if not isinstance(max_new_tokens, SupportsIndex) or max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens!r}; ask for at least 1.")
    if len(prompt) == 0:
        raise UsageError("The prompt is empty: give at least one token.")
    ids = [check_token(token, config.vocab_size) for token in prompt]
    needed = len(prompt) + max_new_tokens - 1  # the last new token is never fed back
    if needed > config.max_positions:
        raise UsageError(
            f"A prompt of {len(prompt)} tokens with {max_new_tokens} new ones passes the {config.max_positions} positions "
            f"of {config.name}: shorten the prompt or ask for fewer tokens."
        )
    return ids


def generate_alone(
    run: Run,
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampler: SamplerLike,
    stop_tokens: Collection[int],
    on_token: OnToken | None,
) -> Generation:
    """What `generate` of a stage for one prompt does around its `run`: check, record, begin the sampler's sequence anew."""
    recorder = Recorder(model.device, stop_tokens, on_token)  # its clock starts here
    tokens = prompt_tensor(model, prompt, max_new_tokens)  # (1, T)
    with torch.inference_mode():
        run(model, tokens, max_new_tokens, fresh(sampler), recorder)
    return recorder.finish()


def prompt_tensor(model: Transformer, prompt: Sequence[int], max_new_tokens: int) -> Tensor:
    """The checked prompt as a (1, T) tensor on the model's device. Raises `UsageError` as `check_prompt` does."""
    return torch.tensor([check_prompt(model.config, prompt, max_new_tokens)], device=model.device)
