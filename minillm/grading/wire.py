"""How values travel between the grader and the learner's code: as JSON and raw numbers, so that reading them runs nothing.

A pickle or an object could carry code into the grader's process. Here only None, numbers, text, lists, tuples, dicts, sets and
tensors arrive; whatever else a function returns arrives as the name of its type, with a number by which to call its methods.

    message = length of header (4 bytes) | header, JSON | bytes of the tensors, one after the other

Reading is bounded: a message has at most MAX_MESSAGE bytes and a header MAX_HEADER, whose values take at most some 50 times its
length, and each tensor takes its own bytes of the message, so that no message costs its reader more than 1 GiB.
"""

import json
import math
import numbers
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.config import ModelConfig

MAX_MESSAGE = 1 << 27  # bytes
MAX_HEADER = 1 << 23  # bytes: half a million numbers
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip

Special = Callable[[Any], dict[str, Any]]  # writes what is not plain
Resolve = Callable[[dict[str, Any]], Any]  # and reads it


class Unreadable(ValueError):
    """A message that is not one of ours."""


def pack(message: Mapping[str, Any], special: Special) -> bytes:
    """One message as bytes. `special` writes every value that is not plain."""
    blobs: list[bytes] = []
    header = json.dumps({key: _encode(value, blobs, special) for key, value in message.items()}).encode()
    return b"".join([struct.pack(">I", len(header)), header, *blobs])


def unpack(data: bytes, resolve: Resolve) -> dict[str, Any]:
    """The message again. Raises `Unreadable` for anything else, whatever it is."""
    try:
        (length,) = struct.unpack_from(">I", data)
        if length > len(data) - 4:
            raise Unreadable("a message that is cut off")
        if length > MAX_HEADER:
            raise Unreadable("a message of too many values")
        blobs = _Blobs(memoryview(data)[4 + length :])
        header = json.loads(data[4 : 4 + length])
        return {key: _decode(value, blobs, resolve) for key, value in header.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        raise Unreadable(str(error)) from None  # RuntimeError covers RecursionError and PyTorch's own


def _encode(value: Any, blobs: list[bytes], special: Special) -> Any:
    def each(values: Any) -> list[Any]:
        return [_encode(item, blobs, special) for item in values]

    if value is None or isinstance(value, (bool, np.bool_)):
        return value if value is None else bool(value)
    if isinstance(value, numbers.Integral) and int(value).bit_length() < 4096:
        return int(value)
    if isinstance(value, (numbers.Real, np.floating)) and not isinstance(value, numbers.Integral):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor) and not value.is_meta and not value.is_sparse:
        return {"tensor": _encode_tensor(value, blobs)}
    if isinstance(value, (list, range)):
        return each(value)
    if isinstance(value, tuple):
        return {"tuple": each(value)}
    if isinstance(value, dict):
        return {"dict": [each(pair) for pair in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"set": each(value)}
    if type(value) is ModelConfig:
        return {"config": [each(pair) for pair in asdict(value).items()]}
    return special(value)


def _encode_tensor(x: Tensor, blobs: list[bytes]) -> list[Any]:
    """Its dtype, shape and order of dimensions in memory, outermost first: `view` of a transposed tensor fails there, too."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    # `contiguous` would keep odd strides of size-1 dimensions
    x = x.detach().cpu().permute(order).clone(memory_format=torch.contiguous_format)
    blobs.append(x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    shape = [x.shape[order.index(dim)] for dim in range(x.dim())]
    return [str(x.dtype).removeprefix("torch."), shape, order]


class _Blobs:
    """The bytes of a message's tensors, which are taken one after the other, each once."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, size: int) -> memoryview:
        if size > len(self._data):
            raise Unreadable("a tensor without its numbers")
        taken, self._data = self._data[:size], self._data[size:]
        return taken


def _decode(value: Any, blobs: _Blobs, resolve: Resolve) -> Any:
    def each(values: Any) -> list[Any]:
        return [_decode(item, blobs, resolve) for item in values]

    if isinstance(value, list):
        return each(value)
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag == "tensor":
        return _decode_tensor(blobs, *value[tag])
    if tag == "tuple":
        return tuple(each(value[tag]))
    if tag == "dict":
        return dict(map(each, value[tag]))
    if tag == "set":
        return set(each(value[tag]))
    if tag == "config":
        return ModelConfig(**dict(map(each, value[tag])))
    return resolve(value)


def _decode_tensor(blobs: _Blobs, name: str, shape: list[int], order: list[int]) -> Tensor:
    dtype = _DTYPES[name]
    if not all(isinstance(size, int) and size >= 0 for size in shape) or sorted(order) != list(range(len(shape))):
        raise Unreadable("a shape that is none")
    data = blobs.take(math.prod(shape) * dtype.itemsize)
    if not data:
        return torch.empty(shape, dtype=dtype)
    stored = torch.frombuffer(bytearray(data), dtype=dtype).reshape([shape[dim] for dim in order])
    return stored.permute([order.index(dim) for dim in range(len(order))])


# --- the socket


def send(sock: socket.socket, message: bytes) -> None:
    sock.sendall(struct.pack(">Q", len(message)) + message)


def receive(sock: socket.socket, deadline: float | None = None) -> bytes:
    """The next message. Raises `EOFError` when the other side is gone, `TimeoutError` after the deadline, `Unreadable`."""
    (length,) = struct.unpack(">Q", receive_exactly(sock, 8, deadline))
    if length > MAX_MESSAGE:
        raise Unreadable("a message that is too long")
    return receive_exactly(sock, length, deadline)


def receive_exactly(sock: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """The next `size` bytes. Raises `EOFError` and `TimeoutError` as `receive` does."""
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
