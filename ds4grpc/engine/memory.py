"""The memory of one slot: its row planes, touched only as far as they are filled.

Owns allocation, copying and giving back. Knows no tokens' meaning, no states, no records. The
engine thread writes; other threads may read or fill rows that the engine has promised to them.

A slot's memory is one anonymous map with each plane at a page boundary, so that a plane's rows
[0, n) are one contiguous run of bytes: files are read straight into it and written from it.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

import numpy as np
import torch

from ds4grpc.layout import StateLayout

_PAGE = mmap.PAGESIZE


class SlotMemory(Protocol):
    """Row planes for up to `max_tokens` tokens."""

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """One a row array of the layout: uint8 (max_rows, row_bytes), where the model writes."""
        ...

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        """Host bytes of rows; on a device a copy of them."""
        ...

    def fill(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        """Writable host bytes for rows; `filled` must follow."""
        ...

    def filled(self, plane: int, start_row: int, stop_row: int) -> None: ...

    def copy_from(self, other: SlotMemory, num_tokens: int) -> None:
        """Takes the rows of the first `num_tokens` tokens of `other`. Any thread."""
        ...

    def give_back(self, num_tokens: int) -> None:
        """Returns memory that the first `num_tokens` tokens do not need."""
        ...


def allocate(layout: StateLayout, max_tokens: int, device: torch.device) -> SlotMemory:
    """Memory for one slot on `device`."""
    if device.type == "cpu":
        return HostMemory(layout, max_tokens)
    return DeviceMemory(layout, max_tokens, device)


class HostMemory:
    """A slot's planes in one anonymous, lazily touched map."""

    def __init__(self, layout: StateLayout, max_tokens: int) -> None:
        self._layout = layout
        self._starts: list[int] = []
        size = 0
        for rows in layout.rows:
            self._starts.append(size)
            plane_bytes = rows.num_rows(max_tokens + rows.tokens_per_row - 1) * rows.row_bytes
            size += -(-plane_bytes // _PAGE) * _PAGE
        self._size = max(size, _PAGE)
        self._map = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # A plane of a long context spans many huge pages; touching one row would fill 2 MiB.
            # The kernel may be built without huge pages, which is just as good.
            try:
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
            except OSError:
                pass
        self._view = memoryview(self._map)
        flat = np.frombuffer(self._map, dtype=np.uint8)
        planes = []
        for rows, start in zip(layout.rows, self._starts, strict=True):
            num_rows = rows.num_rows(max_tokens + rows.tokens_per_row - 1)
            plane = torch.from_numpy(flat[start : start + num_rows * rows.row_bytes])
            planes.append(plane.view(num_rows, rows.row_bytes))
        self.planes: tuple[torch.Tensor, ...] = tuple(planes)

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        row_bytes = self._layout.rows[plane].row_bytes
        start = self._starts[plane]
        return self._view[start + start_row * row_bytes : start + stop_row * row_bytes]

    def fill(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        return self.view(plane, start_row, stop_row)

    def filled(self, plane: int, start_row: int, stop_row: int) -> None:
        pass

    def copy_from(self, other: SlotMemory, num_tokens: int) -> None:
        for plane, rows in enumerate(self._layout.rows):
            num_rows = rows.num_rows(num_tokens)
            target = np.frombuffer(self.view(plane, 0, num_rows), dtype=np.uint8)
            source = np.frombuffer(other.view(plane, 0, num_rows), dtype=np.uint8)
            np.copyto(target, source)  # without the GIL, so streams go on

    def give_back(self, num_tokens: int) -> None:
        starts = [*self._starts[1:], self._size]
        for rows, start, end in zip(self._layout.rows, self._starts, starts, strict=True):
            used = rows.num_rows(num_tokens + rows.tokens_per_row - 1) * rows.row_bytes
            first = start + -(-used // _PAGE) * _PAGE
            if first < end:
                self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


class DeviceMemory:
    """A slot's planes on a device; files pass through host copies."""

    def __init__(self, layout: StateLayout, max_tokens: int, device: torch.device) -> None:
        self._layout = layout
        self.planes: tuple[torch.Tensor, ...] = tuple(
            torch.empty(
                (rows.num_rows(max_tokens + rows.tokens_per_row - 1), rows.row_bytes),
                dtype=torch.uint8,
                device=device,
            )
            for rows in layout.rows
        )
        self._staged: dict[tuple[int, int], torch.Tensor] = {}

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        host = self.planes[plane][start_row:stop_row].cpu()
        return host.numpy().data.cast("B")

    def fill(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        row_bytes = self._layout.rows[plane].row_bytes
        host = torch.empty((stop_row - start_row, row_bytes), dtype=torch.uint8)
        self._staged[plane, start_row] = host
        return host.numpy().data.cast("B")

    def filled(self, plane: int, start_row: int, stop_row: int) -> None:
        self.planes[plane][start_row:stop_row].copy_(self._staged.pop((plane, start_row)))

    def copy_from(self, other: SlotMemory, num_tokens: int) -> None:
        for plane, rows in enumerate(self._layout.rows):
            num_rows = rows.num_rows(num_tokens)
            self.planes[plane][:num_rows].copy_(other.planes[plane][:num_rows])

    def give_back(self, num_tokens: int) -> None:
        pass  # the allocator's blocks are whole


def trim_heap() -> None:
    """Hands freed heap pages back to the system, where the C library can (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass
