"""The ladder: one module a chapter, in chapter order. A stage imports only from earlier ones and from the package's core."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from minillm.errors import UsageError
from minillm.generation import Generation, OnToken, Run
from minillm.model import Transformer
from minillm.sampling import SamplerLike, greedy
from minillm.stages import batching, gqa, kv_cache, naive, static_batching


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder.

    `generate` answers one prompt: (model, prompt, max_new_tokens, sampler=, stop_tokens=, on_token=) -> Generation. `run` takes
    B prompts of equal length in lockstep, for counting and profiling. `generate_batch` answers several prompts at once, None
    where a stage does not.
    """

    generate: Callable[..., Generation]
    run: Run
    generate_batch: Callable[..., list[Generation]] | None = None


def _batched(generate_batch: Callable[..., list[Generation]], run: Run) -> Stage:
    """A batched stage, which answers one prompt as a batch of one."""

    def generate(
        model: Transformer,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        sampler: SamplerLike = greedy,
        stop_tokens: Collection[int] = (),
        on_token: OnToken | None = None,
    ) -> Generation:
        tell = None if on_token is None else lambda _, token: on_token(token)
        return generate_batch(
            model, [prompt], max_new_tokens, max_batch=1, sampler=sampler, stop_tokens=stop_tokens, on_token=tell
        )[0]

    return Stage(generate, run, generate_batch)


STAGES = {
    "naive": Stage(naive.generate, naive.run),
    "kv_cache": Stage(kv_cache.generate, kv_cache.run),
    "gqa": Stage(gqa.generate, gqa.run),
    "batching_static": _batched(static_batching.generate, static_batching.run),
    "batching": _batched(batching.generate, batching.run),
}


def known_stage(name: str) -> Stage:
    """The stage called `name`. Raises `UsageError` for any other name."""
    try:
        return STAGES[name]
    except KeyError:
        raise UsageError(f"Unknown stage {name!r}: choose one of {', '.join(STAGES)}.") from None
