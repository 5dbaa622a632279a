"""Reading GGUF, llama.cpp's file format: one file with the configuration, the vocabulary and (mostly quantized) tensors.

    magic, version, counts | metadata: key, type, value | tensors: name, dims, type, offset | padding | tensor data

All little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The `gguf` package turns the quantized blocks
into numbers; its own reader is not used, because it believes every count in the file (a hostile one makes it hang) and takes
seconds for a vocabulary. Here every count is held against the bytes that are left, so a damaged file ends in one sentence.

Memory is bounded, too, whatever the file says and however long it is: its header takes less than 1 GiB (MAX_HEADER_BYTES and
MAX_ITEMS see to that), and as `check_overlap` lets no byte belong to two tensors, the weights take no more than eight times the
file, as 4-bit ones in float32 do.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from minillm.errors import MinillmError

Value: TypeAlias = int | float | bool | str | list[Any]

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

# Codes of metadata types. Numbers have a struct letter, which is also their numpy type.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Far above any real file, and low enough that a hostile one is refused before it costs time or memory.
MAX_ENTRIES = 100_000
MAX_ITEMS = 4_000_000  # of all arrays together
MAX_HEADER_BYTES = 64 << 20
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

CHUNK_ELEMENTS = 1 << 18  # dequantized at once: 1 MiB in float32, so that the work stays in the processor's cache


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in the file. `shape` is in PyTorch's order, (rows, columns)."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GGUFFile:
    """The metadata and the tensors of a GGUF file. Raises `MinillmError` if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():  # to open a pipe would wait for its writer
            raise MinillmError(f"Cannot read {path}: it is not a file.")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise MinillmError(f"Cannot read {path}: {error}.") from None
        try:
            self.metadata, self.tensors = _read_header(self._data)
        except _Damaged as damage:
            raise MinillmError(f"{path} is not a GGUF file that can be read: {damage}. Fetch it again.") from None

    def check_overlap(self) -> None:
        """Raise `MinillmError` for tensors that share bytes: a small file would become a model of any size."""
        if sum(tensor.n_bytes for tensor in self.tensors.values()) > len(self._data):
            raise MinillmError(f"{self.path} has tensors that overlap: it is damaged, so fetch it again.")

    def read_into(self, name: str, out: Tensor, row_order: NDArray[np.int64] | None = None) -> None:
        """Dequantize a tensor into `out`, which has its shape, taking its rows in the order given.

        Raises `MinillmError` for a quantization that is not supported.
        """
        tensor = self.tensors[name]
        if tensor.type.name not in SUPPORTED_TYPES:
            raise MinillmError(
                f"{self.path} stores {name} as {tensor.type.name}; supported are {', '.join(SUPPORTED_TYPES)}."
            )
        rows = math.prod(tensor.shape[:-1])
        data = np.frombuffer(self._data, np.uint8, tensor.n_bytes, tensor.offset).reshape(rows, -1)
        if row_order is not None:
            data = data[row_order]
        out = out.view(rows, -1)
        step = max(1, CHUNK_ELEMENTS // tensor.shape[-1])
        for start in range(0, rows, step):
            values = dequantize(data[start : start + step], tensor.type)
            # An F32 tensor is not converted but seen in place, and the file is read-only: PyTorch asks for a copy.
            out[start : start + step].copy_(torch.from_numpy(np.require(values, requirements="W")))


class _Damaged(Exception):
    """What is wrong with the file."""


class _Cursor:
    """Reads values one after another and never past the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0
        self.items = 0  # of all arrays so far

    def advance(self, size: int) -> int:
        """Step over `size` bytes and return where they begin."""
        start = self.position
        if size > len(self.data) - start:
            raise _Damaged(f"it ends at byte {len(self.data)}, in the middle of its header")
        if start + size > MAX_HEADER_BYTES:
            raise _Damaged(f"its header has more than {MAX_HEADER_BYTES >> 20} MiB")
        self.position += size
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.advance(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        size = self.number("Q")
        start = self.advance(size)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            raise _Damaged(f"the text at byte {start} is not UTF-8") from None

    def count(self, what: str, limit: int) -> int:
        count: int = self.number("Q")
        if count > limit:
            raise _Damaged(f"it claims {count:,} {what}")
        return count

    def value(self) -> Value:
        """A metadata value: its type code, then itself."""
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _NUMBERS:
            raise _Damaged(f"metadata type {kind} does not exist")
        value: int | float | bool = self.number(_NUMBERS[kind])
        # A float32 is read as the shortest decimal that it stands for: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if _NUMBERS[kind] == "f" else value

    def array(self) -> list[Any]:
        kind = self.number("I")
        count = self.count("items in an array", MAX_ITEMS - self.items)
        self.items += count
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise _Damaged("an array holds arrays" if kind == _ARRAY else f"metadata type {kind} does not exist")
        dtype = np.dtype("<" + _NUMBERS[kind])
        return np.frombuffer(self.data, dtype, count, self.advance(count * dtype.itemsize)).tolist()


def _read_header(data: mmap.mmap) -> tuple[dict[str, Value], dict[str, TensorEntry]]:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise _Damaged("it does not begin with GGUF")
    cursor.advance(4)
    version = cursor.number("I")
    if version not in (2, 3):
        raise _Damaged(f"its version is {version}, and 2 and 3 are known")
    n_tensors = cursor.count("tensors", MAX_ENTRIES)
    n_metadata = cursor.count("metadata entries", MAX_ENTRIES)

    metadata: dict[str, Value] = {}
    for _ in range(n_metadata):
        key = cursor.string()
        if key in metadata:
            raise _Damaged(f"it names {key[:80]!r} twice")
        metadata[key] = cursor.value()

    headers: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(n_tensors):
        name = cursor.string()
        if name in headers:
            raise _Damaged(f"it names the tensor {name[:80]!r} twice")
        n_dims = cursor.number("I")
        if not 1 <= n_dims <= MAX_DIMS:
            raise _Damaged(f"tensor {name[:80]!r} has {n_dims} dimensions")
        dims = tuple(cursor.number("Q") for _ in range(n_dims))
        headers[name] = (dims[::-1], cursor.number("I"), cursor.number("Q"))  # the file names columns first

    data_start = _aligned(cursor.position, metadata)
    return metadata, {name: _locate(name, *header, data_start, len(data)) for name, header in headers.items()}


def _aligned(position: int, metadata: Mapping[str, Value]) -> int:
    """Where tensor data begins: the end of the header, rounded up."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise _Damaged("its alignment is not a power of two")
    return math.ceil(position / alignment) * alignment


def _locate(name: str, shape: tuple[int, ...], code: int, offset: int, data_start: int, file_size: int) -> TensorEntry:
    """Check that a tensor lies within the file. Sizes are Python integers: no product can overflow."""
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise _Damaged(f"tensor {name[:80]!r} has the unknown type {code}") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block_elements:
        raise _Damaged(
            f"tensor {name[:80]!r} has shape {list(shape)}, and {kind.name} comes in rows of {block_elements}"
        )
    n_bytes = math.prod(shape) // block_elements * block_bytes
    if data_start + offset + n_bytes > file_size:
        raise _Damaged(f"tensor {name[:80]!r} reaches past its end: it was cut short, or its offsets are wrong")
    return TensorEntry(kind, shape, data_start + offset, n_bytes)
