"""Chapter 8, first half. Overhead is the third limit: run a decode step as one program in place of hundreds of operators.

Each operator costs the host a fixed price, whatever it computes: Python, dispatch, and on a GPU the launch. A step of L layers
calls some 20 L of them, so it takes at least 20 L x overhead, however fast the device. Two ways around it, from outside:

    compile    neighbours that only pass numbers on (norms, rotations, additions, casts) become one kernel, and the host walks
               through them in C++. Layers are alike, so a *stretch* of a few is compiled once and serves all others: the more
               layers a stretch has, the fewer calls from Python, and the longer the compiler takes.
    capture    on CUDA: record the launches of one step in a graph, and let the GPU repeat them without the host.

They go together. Neither changes a byte of the weights and the cache that a step reads, so both help where overhead binds, and
nowhere else: a prompt, a large batch, weights that take longer to read than a step takes to launch.

Invariant: a step is the same program at each token of a bucket (`static_cache.py`), on the same memory.
"""

import os
import types
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from minillm.download import cache_folder
from minillm.errors import MinillmError, UsageError
from minillm.generation import Generation, OnToken, Recorder, generate_alone
from minillm.model import Transformer
from minillm.sampling import SamplerLike, greedy
from minillm.stages.kv_cache import prefill_and_decode
from minillm.stages.quantization import quantize
from minillm.stages.static_cache import LayerCache, StaticKVCache, bucket
from minillm.stages.triton_kernels import triton_is_here, with_triton_kernels

STRETCH = 6  # layers at most that are compiled as one

Rotation = tuple[Tensor, Tensor]


class NotCompiled(UserWarning):
    """What was to be compiled runs eagerly, for the reason that the message tells."""


class Launched:
    """A model whose decode steps run compiled, captured or both: it stands in the place of the model in a decode loop.

    The steps run on a cache that `cache` gives. Its memory, and what was captured over it, stays from one call to the next.
    Raises `UsageError` when it is asked to capture on another device than CUDA.
    """

    def __init__(self, model: Transformer, *, compiled: bool, captured: bool) -> None:
        if captured and model.device.type != "cuda":
            raise UsageError(f"Only CUDA captures a step in a graph, and this model is on {model.device.type}.")
        self.model = model
        self.captured = captured
        blocks: list[nn.Module] = list(model.blocks)
        self._stretches = [(i, blocks[i : i + STRETCH]) for i in range(0, len(blocks), STRETCH)]
        self._programs: dict[Any, Callable[..., Any]] = {}
        self.compiled = compiled
        if compiled:
            self.compiled = self._can_compile()
        self._cache: StaticKVCache | None = None
        # By bucket: a step, and where its result lies.
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def cache(self, capacity: int, batch: int = 1) -> StaticKVCache:
        """An empty cache: the last one, where that has the room."""
        if self._cache is None or self._cache.batch != batch or self._cache.capacity < capacity:
            self._graphs.clear()
            self._cache = None  # there may be no room for both
            # All columns of the bucket may be filled, so that a request of a few more tokens captures nothing anew.
            self._cache = StaticKVCache(self.model, bucket(capacity), batch)
            if self.captured:
                self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.model.device)
                self._pool = torch.cuda.graph_pool_handle()
        self._cache.forget()
        return self._cache

    def hidden(self, tokens: Tensor, cache: StaticKVCache) -> Tensor:
        """As the model's: (B, T) -> (B, T, C). A prompt, T > 1, runs as it always does."""
        if tokens.shape[1] > 1 or not (self.compiled or self.captured):
            return self.model.hidden(tokens, cache)
        if self.captured and cache is not self._cache:
            raise MinillmError("What is captured runs on the cache that was asked for last: ask for one again.")
        positions = cache.positions(1)
        if not self.captured:
            return self._step(tokens, positions, cache)
        self._tokens.copy_(tokens)
        S = cache.visible.shape[-1]
        if S not in self._graphs:
            step = partial(self._step, self._tokens, positions, cache)
            self._graphs[S] = _capture(step, self.model.device, self._pool)
        graph, result = self._graphs[S]
        graph.replay()
        return result.clone()  # which the next replay overwrites

    def head(self, x: Tensor) -> Tensor:
        """As the model's: (..., C) -> (..., V)."""
        return self._program(_apply, "head", x.shape)(self.model.head, x)

    def _step(self, tokens: Tensor, positions: Tensor, cache: StaticKVCache) -> Tensor:
        x, rotation = self._program(_begin, len(tokens))(self.model, tokens, positions)
        for first, blocks in self._stretches:
            layers = cache.layers[first : first + len(blocks)]
            through = self._program(_through, len(blocks), layers[0].keys.shape, cache.visible.shape)
            x = through(blocks, x, rotation, layers)
        return self._program(_apply, "norm", x.shape)(self.model.norm, x)

    def _program(self, fn: Callable[..., Any], *fits: Any) -> Callable[..., Any]:
        """The function itself or, compiled, a program that fits what is named: calls that differ in anything else share it."""
        if not self.compiled:
            return fn
        if (fn, *fits) not in self._programs:
            self._programs[fn, *fits] = _compile(fn, self.model.device)
        return self._programs[fn, *fits]

    def _can_compile(self) -> bool:
        """Compiles the smallest part, to find out. Warns with the reason if that fails."""
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))  # and not one in /tmp
        # Two tensors: of one that is given twice, a program would read the first only.
        token, position = (torch.zeros(1, 1, dtype=torch.int64, device=self.model.device) for _ in range(2))
        try:
            with torch.inference_mode():
                self._program(_begin, 1)(self.model, token, position)
        except RuntimeError as error:  # no compiler, no headers, no space, no Triton
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            message = f"Decode steps run eagerly, since nothing can be compiled here ({reason}): see minillm doctor."
            warnings.warn(message, NotCompiled, stacklevel=5)  # where `generate` was called
            return False
        return True


# --- The parts of a step, with all that changes from layer to layer and from token to token in tensors -------------------


def _begin(model: Transformer, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
    return model.embed(tokens), model.rope(positions, model.dtype)


def _through(blocks: list[nn.Module], x: Tensor, rotation: Rotation, layers: list[LayerCache]) -> Tensor:
    for block, layer in zip(blocks, layers, strict=True):
        x = block(x, 0, rotation, layer)
    return x


def _apply(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


# --- Compilation and capture ----------------------------------------------------------------------------------------------


def _compile(fn: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    # PyTorch keeps a program beside the code of its function, and checks at each call whether it still fits: dozens of checks a
    # layer, which cost as much as small kernels. Ours has a copy of the code to itself, and is called for what it fits only.
    own = types.FunctionType(fn.__code__.replace(), fn.__globals__)
    options: dict[str, Any] = {
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        "cpp_wrapper": device.type == "cpu",  # the host's part in C++ too
    }
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _capture(step: Callable[[], Tensor], device: torch.device, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of one step, and the memory in which each replay leaves its result.

    Graphs that share a pool share the memory of their intermediate results: only one may be replayed at a time.
    """
    graph, side = torch.cuda.CUDAGraph(), _side_stream(device)
    with torch.cuda.device(device):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Kernels are compiled, and cuBLAS gets its workspace of this stream, before the capture. What is written here is
            # written again.
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, pool=pool, stream=side):
            result = step()
    return graph, result


# --- The stage ------------------------------------------------------------------------------------------------------------


def compiling_pays(model: Transformer) -> bool:
    """Whether steps of a model are compiled unless told otherwise: on CUDA, and on the CPU where layers are quantized.

    The CPU spends most of a float32 or bf16 step in oneDNN's products on packed weights (`cpu.py`), which the compiler would
    exchange for slower ones.
    """
    if model.device.type == "cpu":
        return not any(isinstance(layer, nn.Linear) for layer in model.modules())
    return model.device.type == "cuda" and triton_is_here()


@lru_cache(maxsize=1)
def _launched(model: Transformer, compiled: bool, captured: bool) -> Launched:
    return Launched(model, compiled=compiled, captured=captured)


def run(model: Transformer, tokens: Tensor, max_new_tokens: int, sampler: SamplerLike, recorder: Recorder) -> None:
    """Extend B prompts of equal length, tokens (B, T), by up to `max_new_tokens` each, operator by operator.

    These are the operators that a compiled or captured step stands for: what is counted.
    """
    B, T = tokens.shape
    cache = StaticKVCache(model, capacity=T + max_new_tokens - 1, batch=B)
    prefill_and_decode(model, cache, tokens, max_new_tokens, sampler, recorder)


def generate(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    compiled: bool | None = None,
    captured: bool | None = None,
    sampler: SamplerLike = greedy,
    stop_tokens: Collection[int] = (),
    on_token: OnToken | None = None,
) -> Generation:
    """Generate up to `max_new_tokens` after the prompt. Raises `UsageError` for a prompt that cannot run.

    `compiled` and `captured` choose how decode steps run: by default captured on CUDA, and compiled where that pays. The
    first call on a model compiles; later ones on the same model do not.
    """
    launched = _launched(
        model,
        compiling_pays(model) if compiled is None else compiled,
        model.device.type == "cuda" if captured is None else captured,
    )

    def run_launched(_: Transformer, tokens: Tensor, n: int, sampler: SamplerLike, recorder: Recorder) -> None:
        B, T = tokens.shape
        stands_for_model = cast(Transformer, launched)
        prefill_and_decode(stands_for_model, launched.cache(T + n - 1, B), tokens, n, sampler, recorder)

    return generate_alone(run_launched, model, prompt, max_new_tokens, sampler, stop_tokens, on_token)


def prepare(model: Transformer) -> Transformer:
    """The model in int4, by the kernels of this chapter on CUDA: with few bytes left to read, overhead is what binds."""
    if model.device.type == "cuda" and triton_is_here():
        return with_triton_kernels(quantize(model, "int4", readable=True))
    return quantize(model, "int4")
