"""GGUF files: metadata as plain values, tensors as float rows.

Owns the file format. Knows no architecture and no tokenizer. The header is parsed here: the
`gguf` package makes an array object of each of 100,000 strings, which takes seconds and hundreds
of megabytes; its constants and dequantizers are used. Tensors are read in pieces, never mapped,
so that a file cut short under our hands is an error and not a SIGBUS. Blocks on disk; any thread.
Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from ds4grpc.errors import ModelError

_SUPPORTED: Final = frozenset(
    {
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q6_K,
    }
)
_PLAIN: Final = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
_SCALARS: Final = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_PIECE_VALUES = 4 << 20  # dequantized at a time: 16 MiB of float32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` in row-major order: the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one state of a file from another without reading it."""

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(file: BinaryIO) -> FileStamp:
        status = os.fstat(file.fileno())
        return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class Gguf:
    """The header of a GGUF file, checked against the file's size."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    stamp: FileStamp

    @contextmanager
    def open(self) -> Iterator[TensorReader]:
        """Opens the file for its tensors. Raises ModelError when it is gone or has changed."""
        try:
            file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror}") from error
        with file:
            if FileStamp.of(file) != self.stamp:
                raise ModelError(f"{self.path} was changed while it was being read; start again")
            yield TensorReader(self, file)


class TensorReader:
    """Reads tensors of one open file in bounded pieces. One thread at a time."""

    def __init__(self, gguf: Gguf, file: FileIO) -> None:
        self._gguf = gguf
        self._file = file

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out` (contiguous, float32 or bfloat16) with the tensor, dequantized.

        Raises ModelError: no such tensor, another shape than `out`'s, or a short file.
        """
        info = self._gguf.tensors.get(name)
        if info is None:
            raise ModelError(f"{self._gguf.path} has no tensor {name}")
        if info.shape != tuple(out.shape):
            raise ModelError(
                f"{self._gguf.path}: tensor {name} has shape {list(info.shape)}; "
                f"the model needs {list(out.shape)}"
            )
        num_columns = info.shape[-1]
        num_rows = info.num_values // num_columns
        row_bytes = info.num_bytes // num_rows
        rows = out.view(num_rows, num_columns)
        step = max(1, _PIECE_VALUES // num_columns)
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            data = self._read_at(info.offset + start * row_bytes, (stop - start) * row_bytes)
            rows[start:stop].copy_(_to_float(data, info, stop - start))

    def blocks(self, num_bytes: int) -> Iterator[memoryview]:
        """The whole file from its start in blocks; a block is only good until the next one."""
        buffer = memoryview(bytearray(num_bytes))
        self._file.seek(0)
        try:
            while count := self._file.readinto(buffer):
                yield buffer[:count]
        except OSError as error:
            raise ModelError(f"cannot read {self._gguf.path}: {error.strerror}") from error

    def _read_at(self, offset: int, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        data = np.empty(num_bytes, dtype=np.uint8)
        view = data.data
        self._file.seek(offset)
        while view:
            try:
                count = self._file.readinto(view)
            except OSError as error:
                raise ModelError(f"cannot read {self._gguf.path}: {error.strerror}") from error
            if not count:
                raise ModelError(f"{self._gguf.path} is truncated")
            view = view[count:]
        return data


def read_gguf(path: Path) -> Gguf:
    """Reads and checks the header of the file at `path`.

    Raises ModelError: not readable, not GGUF, another version or byte order, truncated, or a
    tensor of a type that is not supported.
    """
    try:
        with path.open("rb") as file:
            return _HeaderReader(path, file).read()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


class _HeaderReader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._stamp = FileStamp.of(file)

    def read(self) -> Gguf:
        if self._file.read(4) != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file")
        version = self._unsigned(4)
        if version not in (2, 3):
            hint = " (big-endian files are not supported)" if not version & 0xFFFF else ""
            raise ModelError(f"{self._path} is GGUF version {version}; 2 and 3 are known{hint}")
        num_tensors = self._unsigned(8)
        num_fields = self._unsigned(8)
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            metadata[key] = self._value(self._unsigned(4))
        infos = [self._tensor_info() for _ in range(num_tensors)]

        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self._path}: general.alignment is {alignment!r}, no power of two")
        data_start = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in infos:
            info = self._place(name, shape, kind, data_start + offset)
            if name in tensors:
                raise ModelError(f"{self._path} has two tensors named {name}")
            tensors[name] = info
        return Gguf(self._path, metadata, tensors, self._stamp)

    def _place(
        self, name: str, shape: tuple[int, ...], kind_number: int, offset: int
    ) -> TensorInfo:
        try:
            kind = GGMLQuantizationType(kind_number)
        except ValueError:
            kind_name = str(kind_number)
        else:
            kind_name = kind.name
            if kind in _SUPPORTED:
                return self._checked(name, shape, kind, offset)
        known = ", ".join(sorted(kind.name for kind in _SUPPORTED))
        raise ModelError(
            f"{self._path}: tensor {name} has type {kind_name}, which is not supported; "
            f"these are: {known}"
        )

    def _checked(
        self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int
    ) -> TensorInfo:
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block_values:
            raise ModelError(
                f"{self._path}: tensor {name} has shape {list(shape)}; its rows are no multiple "
                f"of the {block_values} values of a {kind.name} block"
            )
        num_bytes = math.prod(shape) // block_values * block_bytes
        if offset + num_bytes > self._stamp.size:
            raise ModelError(
                f"{self._path} is truncated: tensor {name} ends at byte {offset + num_bytes}, "
                f"the file at {self._stamp.size}"
            )
        return TensorInfo(name, shape, kind, offset, num_bytes)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._unsigned(4)
        if num_dimensions > _MAX_DIMENSIONS:
            raise ModelError(
                f"{self._path}: tensor {name} has {num_dimensions} dimensions; "
                f"{_MAX_DIMENSIONS} is the most"
            )
        shape = tuple(self._unsigned(8) for _ in range(num_dimensions))[::-1]
        kind_number = self._unsigned(4)
        return name, shape, kind_number, self._unsigned(8)

    def _value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            item_kind = self._unsigned(4)
            length = self._unsigned(8)
            if item_kind == GGUFValueType.STRING:
                return [self._string() for _ in range(length)]
            return self._numbers(item_kind, length)
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, length: int) -> list[Any]:
        dtype = _SCALARS.get(kind)  # type: ignore[call-overload]
        if dtype is None:
            raise ModelError(f"{self._path} has a metadata value of unknown type {kind}")
        item = np.dtype(dtype)
        values: list[Any] = np.frombuffer(self._take(length * item.itemsize), item).tolist()
        return values

    def _unsigned(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _string(self) -> str:
        data = self._take(self._unsigned(8))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._path} has a text that is not UTF-8") from error

    def _take(self, num_bytes: int) -> bytes:
        # A damaged length must not become an allocation.
        data = self._file.read(num_bytes) if num_bytes <= self._stamp.size else b""
        if len(data) < num_bytes:
            raise ModelError(f"{self._path} is truncated or damaged: its header does not end")
        return data


def _to_float(
    data: np.ndarray[Any, np.dtype[np.uint8]], info: TensorInfo, num_rows: int
) -> torch.Tensor:
    plain = _PLAIN.get(info.kind)
    if plain is not None:
        values = data.view(plain).reshape(num_rows, -1)
    else:
        values = dequantize(data.reshape(num_rows, -1), info.kind)
    return torch.from_numpy(values)
