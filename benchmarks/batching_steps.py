"""Parts of batching.py: a decode step of B sequences in lockstep, and one of a single sequence after a long context."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from common import make_prompts, spread
from steps import Rounds, fill, make_meter, step_figures

from minillm.device import DTYPE_NAMES
from minillm.generation import Generation, Recorder
from minillm.model import Transformer
from minillm.roofline.counting import Cost, count
from minillm.roofline.position import meta_twin, phase_costs, phase_seconds
from minillm.sampling import greedy
from minillm.stages import known_stage
from minillm.stages.gqa import GroupedKVCache, with_kv_heads
from minillm.stages.kv_cache import KVCache, prefill_and_decode
from minillm.tokenizer import Tokenizer

LOCKSTEP_PROMPT = 40  # tokens
STAGE = known_stage("batching")  # whose batches are swept

# --- the batches ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def lockstep_seconds(model: Transformer, prompts: list[list[int]], steps: int) -> float:
    """Seconds of a decode step of B sequences that run in lockstep."""
    recorder = Recorder(model.device)
    STAGE.run(model, torch.tensor(prompts, device=model.device), steps + 1, greedy, recorder)
    return phase_seconds(recorder.finish().times)["decode"] / steps


def measure_batches(
    rounds: Rounds, model: Transformer, tokenizer: Tokenizer, batches: Sequence[int], steps: int
) -> dict[str, Any]:
    """A decode step at each batch size, after prompts of one length."""
    twin, meter = meta_twin(model.config, model.dtype), make_meter(model)
    prompts = make_prompts(tokenizer, LOCKSTEP_PROMPT, max(batches))
    for B in batches:
        lockstep_seconds(model, prompts[:B], 2)  # warm-up
    taken: dict[int, list[float]] = {B: [] for B in batches}
    for _ in rounds.of(f"batches in {DTYPE_NAMES[model.dtype]}"):
        for B in batches:
            meter.sample()
            taken[B].append(lockstep_seconds(model, prompts[:B], steps))
    rows = []
    for B, seconds in taken.items():
        cost = phase_costs(STAGE, twin, LOCKSTEP_PROMPT, steps + 1, B)["decode"]
        row = step_figures(cost, steps, meter.ceilings(), seconds)
        user = 1 / row["measured_s"]["median"]
        rows.append({"batch": B, **row, "tokens_per_s": B * user, "tokens_per_s_per_user": user})
    return {"dtype": DTYPE_NAMES[model.dtype], "ceilings": meter.ceilings().as_json(), "rows": rows}


# --- the contexts -----------------------------------------------------------------------------------------------------


Filled = KVCache | GroupedKVCache


class Variant(NamedTuple):
    """A stage on the model with this number of KV heads."""

    stage: str
    kv_heads: int

    def __str__(self) -> str:
        return f"{self.stage}, {self.kv_heads} KV heads" if self.kv_heads > 1 else f"{self.stage}, 1 KV head"

    def cache(self, model: Transformer, capacity: int) -> Filled:
        return (KVCache if self.stage == "kv_cache" else GroupedKVCache)(model, capacity)


def comparisons(n_heads: int, n_kv_heads: int) -> list[tuple[Variant, Variant]]:
    """What is set beside what: gqa beside kv_cache on the model as it is, and fewer KV heads beside one a query head."""
    pairs = [(Variant("gqa", n_kv_heads), Variant("kv_cache", n_kv_heads))]
    fewer = [heads for heads in dict.fromkeys((n_kv_heads, 1)) if heads < n_heads]
    return pairs + [(Variant("gqa", heads), Variant("gqa", n_heads)) for heads in fewer]


@torch.inference_mode()
def decode(model: Transformer, cache: Filled, context: int, steps: int) -> Generation:
    """`steps` decode steps, the first of which adds a token to the `context` tokens that the cache holds."""
    cache.length = context
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    recorder = Recorder(model.device)
    prefill_and_decode(model, cache, token, steps, greedy, recorder)
    return recorder.finish()


def context_seconds(model: Transformer, cache: Filled, context: int, steps: int) -> float:
    """Seconds of a decode step after `context` tokens."""
    return decode(model, cache, context, steps).times[-1] / steps


def filled_cache(variant: Variant, model: Transformer, capacity: int) -> Filled:
    """A cache of random numbers, which saves the time of a prefill."""
    cache = variant.cache(model, capacity)
    fill(cache.keys, cache.values)
    return cache


def measure_contexts(rounds: Rounds, model: Transformer, contexts: Sequence[int], steps: int) -> dict[str, Any]:
    """A decode step of one sequence at each length of its context, for each variant."""
    config, meter = model.config, make_meter(model)
    pairs = comparisons(config.n_heads, config.n_kv_heads)
    variants = sorted(
        {variant for pair in pairs for variant in pair}, key=lambda v: (v.stage != "kv_cache", -v.kv_heads)
    )
    twins = {heads: with_kv_heads(model, heads) for heads in {v.kv_heads for v in variants} - {config.n_kv_heads}}
    models = {config.n_kv_heads: model, **twins}
    caches = {v: filled_cache(v, models[v.kv_heads], max(contexts) + steps) for v in variants}
    for v in variants:
        context_seconds(models[v.kv_heads], caches[v], min(contexts), 2)  # warm-up
    taken: dict[tuple[int, Variant], list[float]] = {(S, v): [] for S in contexts for v in variants}
    for _ in rounds.of(f"contexts in {DTYPE_NAMES[model.dtype]}"):
        for S in contexts:
            meter.sample()
            for v in variants:
                taken[S, v].append(context_seconds(models[v.kv_heads], caches[v], S, steps))
    rows = []
    for (S, v), seconds in taken.items():
        cost = count_context(v, model, S, steps)
        cache_bytes = (caches[v].keys.nbytes + caches[v].values.nbytes) * S // caches[v].capacity
        row = step_figures(cost, steps, meter.ceilings(), seconds)
        rows.append({"context": S, **v._asdict(), "cache_bytes": cache_bytes, **row})
    gains = [
        {
            "context": S,
            **ours._asdict(),
            "beside": theirs._asdict(),
            "times_as_fast": spread([b / a for a, b in zip(taken[S, ours], taken[S, theirs], strict=True)]),
        }
        for ours, theirs in pairs
        for S in contexts
    ]
    return {"dtype": DTYPE_NAMES[model.dtype], "ceilings": meter.ceilings().as_json(), "rows": rows, "gains": gains}


def count_context(variant: Variant, model: Transformer, context: int, steps: int) -> Cost:
    """What `context_seconds` times, counted on shapes alone."""
    config = replace(model.config, n_kv_heads=variant.kv_heads)
    twin = meta_twin(config, model.dtype)
    cache = variant.cache(twin, context + steps)
    return count(lambda: decode(twin, cache, context, steps))
