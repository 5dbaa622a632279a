"""A decode step on a cache that no prompt has filled: what gpu_decode.py times and gpu_counters.py watches."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from steps import fill

from minillm.generation import Recorder
from minillm.model import Transformer
from minillm.roofline.counting import Cost, count
from minillm.sampling import greedy
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.kernels import Launched
from minillm.stages.kv_cache import KVCache, prefill_and_decode
from minillm.stages.quantization import quantize, streamed_bytes
from minillm.stages.static_cache import StaticKVCache
from minillm.stages.triton_kernels import with_triton_kernels

STEPS = 16  # that lead to the context that is asked for


@dataclass(frozen=True)
class Weights:
    """How a model's layers are stored, and whose kernel multiplies them."""

    scheme: str | None = None  # int8, int4; None as the model has them
    kernel: str = "pytorch"  # or triton

    def of(self, model: Transformer) -> Transformer:
        """A model with its layers stored so. Raises `MinillmError` for a shape or a device that does not allow it."""
        if self.scheme is None:
            return model
        if self.kernel == "pytorch":
            return quantize(model, self.scheme)
        return with_triton_kernels(quantize(model, self.scheme, readable=True))


PLAIN, INT8, INT4 = Weights(), Weights("int8", "triton"), Weights("int4", "triton")

Filled = KVCache | GroupedKVCache | StaticKVCache


def fill_cache(cache: Filled) -> None:
    layers: Sequence[Any] = cache.layers if isinstance(cache, StaticKVCache) else [cache]
    for layer in layers:
        fill(layer.keys, layer.values)


@torch.inference_mode()
def step_seconds(model: Transformer | Launched, cache: Filled, device: torch.device, context: int, batch: int) -> float:
    """Seconds of a decode step that attends over `context` tokens: a median over those that lead there."""
    steps = min(STEPS, context - 1)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    times: list[float] = []
    for n in (min(3, steps), steps):  # first a warm-up, which compiles and captures
        cache.length = context - n
        recorder = Recorder(device)
        prefill_and_decode(cast(Transformer, model), cache, tokens, n, greedy, recorder)
        times = recorder.finish().times
    return statistics.median(b - a for a, b in pairwise(times))


def count_step(model: Transformer, cache: Filled, context: int, batch: int) -> Cost:
    """What such a step costs; of a model and a cache on `meta`."""
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device="meta")
    cache.length = context - 1
    return count(lambda: prefill_and_decode(model, cache, tokens, 1, greedy, Recorder(torch.device("meta"))))


def least_bytes(model: Transformer, batch: int, context: int) -> int:
    """What any step reads: the weights as they are stored, once, and each key and value of each KV head, once."""
    c = model.config
    return streamed_bytes(model) + 2 * batch * c.n_layers * c.n_kv_heads * context * c.head_dim * model.dtype.itemsize
