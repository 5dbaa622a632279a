"""A call recorded as a CUDA graph records it, on any device, to see whether the learner's step can be captured.

Recorded are the operators, the tensors that they read and write, and every number that was a number of Python's. A replay runs
the same operators on the same memory: new arguments are copied into the tensors of the recording first. What the host decided
while it recorded, such as a length or a slice, is decided for all replays.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# What these give, or how large it is, depends on numbers that only the device knows.
_WAITING = (
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim,
)  # fmt: skip


class HostReads(Exception):
    """The host waits for a number that is in a tensor, which ends the capture of a CUDA graph."""


class Captured:
    """`function(*args)` as it was recorded. Calling it, with tensors of the same shapes, repeats the recording."""

    def __init__(self, function: Callable[..., Any], args: list[Any]) -> None:
        self._args = [x.clone() if isinstance(x, Tensor) else x for x in args]
        recorder = _Recorder()
        with torch.no_grad(), recorder:
            self._result = function(*self._args)
        self._calls = recorder.calls

    def __call__(self, *args: Any) -> Any:
        for own, new in zip(self._args, args, strict=True):
            if isinstance(own, Tensor):
                own.copy_(new)
        with torch.no_grad():
            for call in self._calls:
                _repeat(*call)
        return self._result.clone() if isinstance(self._result, Tensor) else self._result


def _repeat(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Run an operator again, and leave what it gives where the first run left it."""
    for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # equal: a view, or written in place
            old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in _WAITING or _picks_by_mask(packet, args):
            raise HostReads(
                f"the host waits for a number that is in a tensor (aten.{packet.__name__}), which ends a capture"
            )
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def _picks_by_mask(packet: Any, args: Any) -> bool:
    """Whether places are read or written that a mask selects: how many, and which, is found by `nonzero` first.

    One number for all of them is written by `masked_fill`, which needs no places.
    """
    if packet not in (aten.index, aten.index_put, aten.index_put_):
        return False
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return masked and (packet is aten.index or args[2].numel() > 1)
