"""The ladder: one module a chapter, in chapter order. A stage imports only from earlier ones and from the package's core."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from minillm.errors import UsageError
from minillm.generation import Generation, OnToken, Run
from minillm.model import Transformer
from minillm.sampling import SamplerLike, greedy
from minillm.stages import batching, gqa, kernels, kv_cache, naive, speculative, static_batching
from minillm.stages.drafters import ModelDrafter
from minillm.stages.quantization import quantize


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder.

    `generate` answers one prompt: (model, prompt, max_new_tokens, sampler=, stop_tokens=, on_token=) -> Generation. `run` takes
    B prompts of equal length in lockstep, for counting on any device; None where only a real run tells what there is to do.
    `generate_batch` answers several prompts at once, None where a stage does not. `prepare` gives the model that the stage
    runs, made once before; where it is None, the model is run as it is. `launched` tells that decode steps run compiled or
    captured, so that their operators cost no overhead.
    """

    generate: Callable[..., Generation]
    run: Run | None
    generate_batch: Callable[..., list[Generation]] | None = None
    prepare: Callable[[Transformer], Transformer] | None = None
    launched: bool = False

    def prepared(self, model: Transformer) -> Transformer:
        """The model that this stage runs. Raises `MinillmError` where the device or the dtype does not allow it."""
        return model if self.prepare is None else self.prepare(model)


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


def _quantized(scheme: str) -> Stage:
    """The gqa stage on a model with quantized weights."""
    return Stage(gqa.generate, gqa.run, prepare=lambda model: quantize(model, scheme))


@lru_cache(maxsize=1)
def _int8_drafter(model: Transformer) -> ModelDrafter:
    return ModelDrafter(quantize(model, "int8"))


def _with_its_twin(model: Transformer) -> Transformer:
    _int8_drafter(model)
    return model


def _speculate(model: Transformer, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> Generation:
    """The model's own int8 twin drafts for it."""
    return speculative.generate(model, prompt, max_new_tokens, drafter=_int8_drafter(model), **options)


STAGES = {
    "naive": Stage(naive.generate, naive.run),
    "kv_cache": Stage(kv_cache.generate, kv_cache.run),
    "gqa": Stage(gqa.generate, gqa.run),
    "batching_static": _batched(static_batching.generate, static_batching.run),
    "batching": _batched(batching.generate, batching.run),
    "quantization": _quantized("int8"),
    "quantization_int4": _quantized("int4"),
    "speculative": Stage(_speculate, run=None, prepare=_with_its_twin),
    "kernels": Stage(kernels.generate, kernels.run, prepare=kernels.prepare, launched=True),
}


def known_stage(name: str) -> Stage:
    """The stage called `name`. Raises `UsageError` for any other name."""
    try:
        return STAGES[name]
    except KeyError:
        raise UsageError(f"Unknown stage {name!r}: choose one of {', '.join(STAGES)}.") from None
