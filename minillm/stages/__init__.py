"""The ladder: one module a chapter, in chapter order. A stage imports only from earlier ones and from the package's core."""

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from minillm.errors import UsageError
from minillm.generation import Generation, OnToken, Recorder
from minillm.model import Transformer
from minillm.sampling import SamplerLike, greedy
from minillm.stages import kv_cache, naive


class Stage(Protocol):
    """What a stage module offers: `generate` for one prompt, and `run` for B prompts of equal length in lockstep."""

    def generate(
        self,
        model: Transformer,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        sampler: SamplerLike = greedy,
        stop_tokens: Collection[int] = (),
        on_token: OnToken | None = None,
    ) -> Generation: ...

    def run(
        self, model: Transformer, tokens: Tensor, max_new_tokens: int, sampler: SamplerLike, recorder: Recorder
    ) -> None: ...


STAGES: dict[str, Stage] = {"naive": naive, "kv_cache": kv_cache}


def known_stage(name: str) -> Stage:
    """The stage called `name`. Raises `UsageError` for any other name."""
    try:
        return STAGES[name]
    except KeyError:
        raise UsageError(f"Unknown stage {name!r}: choose one of {', '.join(STAGES)}.") from None
