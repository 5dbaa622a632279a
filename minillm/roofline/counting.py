"""Counting the FLOPs and the bytes of any callable, from the tensors that its operators really touch.

`count(fn)` runs `fn` under a dispatch mode that sees every operator PyTorch is asked for, on any device. On the `meta` device
nothing is computed or allocated, so a 70B model is counted on a laptop. For each operator:

    FLOPs   of matrix products and attention, by formula: 2 M N K, and 4 B Hq T S D without a discount for the causal half, as
            PyTorch's own counter has it. Other operators count 0: their arithmetic never binds.
    bytes   each input element touched, read once, and each output element, written once. Views are free; of a slice or a
            gather, what is taken counts. Eager PyTorch moves these bytes: an intermediate result is written and read again.
    ideal   the part of the bytes that no kernel can avoid: weights and cached keys and values, read once by an operator. It is
            told by origin: what existed before, or was allocated empty and filled in place, is weight or cache (a sampler's
            noise passes for one); what an operator returned is an intermediate result.

Counts are exact integers. An operator with its own cost registers a formula with `@formula(op)`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class Operator(NamedTuple):
    """The cost of one call of one operator. `ideal` is the part of `read` that is weights and cache."""

    name: str
    shape: str
    flops: int
    read: int
    written: int
    ideal: int

    @property
    def bytes(self) -> int:
        return self.read + self.written


@dataclass
class Cost:
    """Operators and how often each was called. Costs add, and a longer run minus a shorter one leaves the difference."""

    calls: Counter[Operator] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        return sum(n * op.flops for op, n in self.calls.items())

    @property
    def bytes(self) -> int:
        """Bytes moved: reads plus writes."""
        return sum(n * op.bytes for op, n in self.calls.items())

    @property
    def ideal_bytes(self) -> int:
        """Bytes of weights and cache, each read once by the operator that needs it."""
        return sum(n * op.ideal for op, n in self.calls.items())

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP per byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def n_operators(self) -> int:
        return sum(self.calls.values())

    def copy(self) -> "Cost":
        return Cost(self.calls.copy())

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.calls + other.calls)

    def __sub__(self, other: "Cost") -> "Cost":
        """What this cost has beyond `other`. Raises `ValueError` unless it contains every operator of `other`."""
        if not other.calls <= self.calls:
            raise ValueError("A cost can only be subtracted from one that contains all its operators.")
        return Cost(self.calls - other.calls)

    def __iter__(self) -> Iterator[tuple[Operator, int]]:
        return iter(self.calls.items())


def count(fn: Callable[[], object]) -> Cost:
    """Run `fn()` once and return what its operators cost. Runs in inference mode, on whatever device `fn` uses."""
    counter = CountingMode()
    with torch.inference_mode(), counter:
        fn()
    return counter.cost


# --- formulas ---------------------------------------------------------------------------------------------------------

Read = tuple[Tensor, int]  # a tensor and how many bytes of it are read


class Formula(NamedTuple):
    """What one call costs: FLOPs, which tensors it reads and how much of each, and the bytes it writes."""

    flops: int
    reads: list[Read]
    written: int


FormulaFn = Callable[..., Formula]
_FORMULAS: dict[Any, FormulaFn] = {}


def formula(*ops: Any) -> Callable[[FormulaFn], FormulaFn]:
    """Register the cost of operators (overloads under `torch.ops`): a function of their output and their arguments."""

    def register(fn: FormulaFn) -> FormulaFn:
        _FORMULAS.update(dict.fromkeys(ops, fn))
        return fn

    return register


def touched(x: Tensor) -> int:
    """Bytes behind a tensor. Elements that a broadcast repeats (stride 0) are one element."""
    if x.numel() == 0:
        return 0
    if x.is_mkldnn:  # packed for oneDNN (cpu.py): its strides say nothing, and what pads it is not counted
        return x.nbytes
    return x.element_size() * math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0)


def written(x: Tensor, like: Tensor) -> int:
    """Bytes of as many elements of `x` as `like` has, broadcast ones included: each is written."""
    return x.element_size() * like.numel()


def whole(*tensors: Tensor | None) -> list[Read]:
    """Each tensor, read once from end to end; None is skipped, and the same elements seen twice (x + x, x @ x.T) are one."""
    return [(x, touched(x)) for x in {_elements(x): x for x in tensors if x is not None}.values()]


def _elements(x: Tensor) -> tuple[object, ...]:
    """What tells two tensors with the same elements: where they start and how they are strided, in any order."""
    strides = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if stride and size > 1)
    return _storage(x), x.dtype, x.storage_offset(), x.numel() == 0, *strides


def _onednn(name: str) -> list[Any]:
    """An operator of oneDNN (cpu.py), where this PyTorch has it."""
    return [getattr(torch.ops.mkldnn, name).default] if hasattr(torch.ops.mkldnn, name) else []


@formula(aten.linear.default, *_onednn("_linear_pointwise"))
def _linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any) -> Formula:
    return Formula(2 * out.numel() * weight.shape[1], whole(x, weight, bias), touched(out))


@formula(
    aten.mm.default, aten.mm.out, aten.bmm.default, aten.bmm.out, aten.mv.default, aten.mv.out, aten.dot.default
)  # fmt: skip
def _matrix_product(out: Tensor, a: Tensor, b: Tensor, **_: Any) -> Formula:
    return Formula(2 * out.numel() * a.shape[-1], whole(a, b), touched(out))


@formula(
    aten.addmm.default, aten.addmm.out, aten.addmm_.default, aten.addmv.default, aten.addmv_.default,
    aten.baddbmm.default, aten.baddbmm.out, aten.baddbmm_.default,
)  # fmt: skip
def _matrix_product_plus(out: Tensor, c: Tensor, a: Tensor, b: Tensor, **_: Any) -> Formula:
    return Formula(2 * out.numel() * a.shape[-1], whole(c, a, b), touched(out))


@formula(aten.scaled_dot_product_attention.default)
def _attention(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> Formula:
    B, Hq, T, D = q.shape
    S = k.shape[2]
    flops = 2 * B * Hq * T * S * D + 2 * B * Hq * T * S * v.shape[3]  # q k^T, then its softmax times v
    return Formula(flops, whole(q, k, v, mask), touched(out))


@formula(aten.rms_norm.default)
def _rms_norm(
    out: Tensor, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Formula:
    return Formula(0, whole(x, weight), touched(out))


@formula(aten.embedding.default)
def _embedding(out: Tensor, weight: Tensor, ids: Tensor, *_: Any, **__: Any) -> Formula:
    return Formula(0, [(weight, touched(out)), *whole(ids)], touched(out))


@formula(aten.index_select.default, aten.gather.default)
def _gather(out: Tensor, source: Tensor, dim: int, index: Tensor, **_: Any) -> Formula:
    return Formula(0, [(source, touched(out)), *whole(index)], touched(out))


@formula(aten.index.Tensor)
def _index(out: Tensor, source: Tensor, indices: list[Tensor | None]) -> Formula:
    return Formula(0, [(source, touched(out)), *whole(*indices)], touched(out))


@formula(aten.index_copy_.default)
def _index_copy(out: Tensor, target: Tensor, dim: int, index: Tensor, source: Tensor) -> Formula:
    return Formula(0, whole(index, source), written(target, source))


@formula(aten.scatter_.src)
def _scatter(out: Tensor, target: Tensor, dim: int, index: Tensor, source: Tensor) -> Formula:
    source = source[tuple(slice(size) for size in index.shape)]  # the part that has an index
    return Formula(0, whole(index, source), written(target, index))


@formula(aten.index_put_.default)
def _index_put(
    out: Tensor, target: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False
) -> Formula:
    """Writes the chosen elements, however few values are broadcast to them; to accumulate, it reads them first.

    How many a mask chooses is known from its data only: it counts as if it chose all.
    """
    given = [index for index in indices if index is not None]
    if any(index.dtype is torch.bool for index in given):
        size = touched(target)
    else:
        kept = (n for n, index in zip_longest(target.shape, indices) if index is None)
        size = target.element_size() * torch.broadcast_tensors(*given)[0].numel() * math.prod(kept)
    return Formula(0, whole(*indices, values) + ([(target, size)] if accumulate else []), size)


@formula(
    aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default,
    *_onednn("_reorder_linear_weight"),
)  # fmt: skip
def _allocate(out: Tensor, *_: Any, **__: Any) -> Formula:
    """Nothing: memory that others fill, and the packed copy of a weight, which is made once and in no run but the first."""
    return Formula(0, [], 0)


_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}  # allocated too, and written once
_ALLOCATIONS = {op for op, fn in _FORMULAS.items() if fn is _allocate} | _ZEROS
# In-place operators that write their first argument without reading it.
_OVERWRITES = {
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.uniform_.default,
    aten.exponential_.default,
    aten.normal_.default,
}


def _elementwise(func: Any, out: list[Tensor], args: list[Tensor]) -> Formula:
    """Everything without a formula: each distinct input read once, each output written once, no FLOPs."""
    inputs = args[1:] if func in _OVERWRITES or func in _ZEROS else args
    return Formula(0, whole(*inputs), sum(touched(x) for x in out))


# --- the mode ---------------------------------------------------------------------------------------------------------


def _storage(x: Tensor) -> int:
    return x._cdata if x.is_mkldnn else x.untyped_storage()._cdata  # a packed tensor shows no storage, and has no views


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_view(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether an operator only looks at the memory of its inputs in another way."""
    if func._schema.is_mutable:
        return torch.Tag.inplace_view in func.tags  # such as t_ and detach_
    return bool(outputs) and all(_storage(x) in map(_storage, inputs) for x in outputs)


def _meta_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """What a fused attention kernel returns on a real device: (B, Hq, T, D), laid out in memory as the queries are.

    PyTorch's own meta function has the layout of the unfused path, (B, Hq, T, D), after which the model always copies.
    """
    B, Hq, T, D = q.shape
    return torch.empty_like(q) if v.shape[3] == D else q.new_empty(B, Hq, T, v.shape[3])


def _is_unfused_attention(func: Any, args: Any) -> bool:
    """Fused kernels take four dimensions; with any other number PyTorch computes attention by its parts, copies included."""
    return func is aten.scaled_dot_product_attention.default and args[0].dim() != 4


class CountingMode(TorchDispatchMode):
    """Sees every operator while it is active and adds its cost to `cost`. Use it through `count`."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()
        self._intermediate: set[int] = set()  # storages that operators returned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FORMULAS or _is_unfused_attention(func, args):
            with self:  # an operator made of others, such as matmul, is counted by its parts
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = self.call(func, args, kwargs)
        targets = {argument.name for argument in func._schema.arguments if argument.is_out}
        read_kwargs = {name: x for name, x in kwargs.items() if name not in targets}  # out= is only written
        inputs, outputs = _tensors((args, read_kwargs)), _tensors(result)
        op = self._operator(func, result, inputs, outputs, args, read_kwargs)
        if op is not None:
            self.record(op)
        given = set() if func is aten.lift_fresh.default else set(map(_storage, inputs + _tensors(kwargs)))
        for x in outputs:  # lift_fresh: the end of torch.tensor(...), a constant and no weight
            if func in _ALLOCATIONS:
                self._intermediate.discard(_storage(x))
            elif _storage(x) not in given:
                self._intermediate.add(_storage(x))
        return result

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten.scaled_dot_product_attention.default and args[0].is_meta:
            return _meta_attention(*args)
        return func(*args, **kwargs)

    def record(self, op: Operator) -> None:
        self.cost.calls[op] += 1

    def _operator(
        self, func: Any, result: Any, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any
    ) -> Operator | None:
        """The cost of this call, or None for a view or an allocation."""
        if _is_view(func, inputs, outputs):
            return None
        if func in _FORMULAS:
            cost = _FORMULAS[func](result, *args, **kwargs)
        else:
            cost = _elementwise(func, outputs, inputs)
        read = sum(n for _, n in cost.reads)
        if not (cost.flops or read or cost.written):
            return None
        ideal = sum(n for x, n in cost.reads if self._is_weight_or_cache(x))
        shape = ", ".join("x".join(map(str, x.shape)) for x in inputs if x.dim())
        name = func._schema.name.rpartition("::")[2]  # without its library, such as aten or mkldnn
        name = name.strip("_").removesuffix("_pointwise")
        return Operator(name, shape, cost.flops, read, cost.written, ideal)

    def _is_weight_or_cache(self, x: Tensor) -> bool:
        return x.dtype is not torch.int64 and _storage(x) not in self._intermediate  # int64: token ids and positions
