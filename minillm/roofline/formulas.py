"""What one call of an operator costs: a table of formulas, and a rule for every operator that is not in it.

A formula takes an operator's output and its arguments, and gives FLOPs and bytes (counting.py says which). The rule for the
others: each distinct input is read once, each output written once, and arithmetic counts nothing. An operator of one's own,
such as a fused kernel, registers its cost with `@formula(op)`.
"""

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

Read = tuple[Tensor, int]  # a tensor and how many bytes of it are read


class Formula(NamedTuple):
    """What one call costs: FLOPs, which tensors it reads and how much of each, and the bytes it writes."""

    flops: int
    reads: list[Read]
    written: int


FormulaFn = Callable[..., Formula]
FORMULAS: dict[Any, FormulaFn] = {}


def formula(*ops: Any) -> Callable[[FormulaFn], FormulaFn]:
    """Register the cost of operators (overloads under `torch.ops`): a function of their output and their arguments."""

    def register(fn: FormulaFn) -> FormulaFn:
        FORMULAS.update(dict.fromkeys(ops, fn))
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
    return storage(x), x.dtype, x.storage_offset(), x.numel() == 0, *strides


def storage(x: Tensor) -> int:
    """Which memory a tensor looks at: the same number for all views of it."""
    return x._cdata if x.is_mkldnn else x.untyped_storage()._cdata  # a packed tensor shows no storage, and has no views


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
ALLOCATIONS = {op for op, fn in FORMULAS.items() if fn is _allocate} | _ZEROS
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


def default_formula(func: Any, out: list[Tensor], args: list[Tensor]) -> Formula:
    """Everything without a formula: each distinct input read once, each output written once, no FLOPs."""
    inputs = args[1:] if func in _OVERWRITES or func in _ZEROS else args
    return Formula(0, whole(*inputs), sum(touched(x) for x in out))
