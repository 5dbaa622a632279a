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

Counts are exact integers. The formulas are in formulas.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.roofline.formulas import ALLOCATIONS, FORMULAS, default_formula, storage

aten = torch.ops.aten


class Operator(NamedTuple):
    """The cost of one call of one operator, in FLOPs and bytes. `ideal` is the part of `read` that is weights and cache."""

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


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_view(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether an operator only looks at the memory of its inputs in another way."""
    if func._schema.is_mutable:
        return torch.Tag.inplace_view in func.tags  # such as t_ and detach_
    return bool(outputs) and all(storage(x) in map(storage, inputs) for x in outputs)


def _meta_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """What a fused attention kernel returns on a real device: (B, Hq, T, D of the values), laid out as the queries are.

    PyTorch's own meta function has the unfused path's layout, heads first: after that, merging the heads would always copy.
    """
    B, Hq, T, D = q.shape
    return torch.empty_like(q) if v.shape[3] == D else q.new_empty(B, Hq, T, v.shape[3])


def _is_unfused_attention(func: Any, args: Any) -> bool:
    """Fused kernels take four dimensions; with any other number PyTorch computes attention by its parts, copies included."""
    return func is aten.scaled_dot_product_attention.default and args[0].dim() != 4


class CountingMode(TorchDispatchMode):
    """Sees every operator while it is active and adds its cost to `cost`: what `count` is made of.

    A subclass that also times operators does so in `call`, and learns in `record` which of them it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()
        self._intermediate: set[int] = set()  # storages that operators returned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in FORMULAS or _is_unfused_attention(func, args):
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
        # lift_fresh is the end of torch.tensor(...): what it gives is a constant and no weight.
        given = set() if func is aten.lift_fresh.default else set(map(storage, inputs + _tensors(kwargs)))
        for x in outputs:
            if func in ALLOCATIONS:
                self._intermediate.discard(storage(x))
            elif storage(x) not in given:
                self._intermediate.add(storage(x))
        return result

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator."""
        if func is aten.scaled_dot_product_attention.default and args[0].is_meta:
            return _meta_attention(*args)
        return func(*args, **kwargs)

    def record(self, op: Operator) -> None:
        """Called after each operator that costs anything."""
        self.cost.calls[op] += 1

    def _operator(
        self, func: Any, result: Any, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any
    ) -> Operator | None:
        """The cost of this call, or None for a view or an allocation."""
        if _is_view(func, inputs, outputs):
            return None
        if func in FORMULAS:
            cost = FORMULAS[func](result, *args, **kwargs)
        else:
            cost = default_formula(func, outputs, inputs)
        read = sum(n for _, n in cost.reads)
        if not (cost.flops or read or cost.written):
            return None
        ideal = sum(n for x, n in cost.reads if self._is_weight_or_cache(x))
        shape = ", ".join("x".join(map(str, x.shape)) for x in inputs if x.dim())
        name = func._schema.name.rpartition("::")[2]  # without its library, such as aten or mkldnn
        name = name.strip("_").removesuffix("_pointwise")
        return Operator(name, shape, cost.flops, read, cost.written, ideal)

    def _is_weight_or_cache(self, x: Tensor) -> bool:
        return x.dtype is not torch.int64 and storage(x) not in self._intermediate  # int64: token ids and positions
