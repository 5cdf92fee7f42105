"""Reading one bank file: nothing is believed before it is checked.

Owns the checks between bytes on disk and values in memory. Knows no catalog, no chain and no
policy. Blocking: worker threads only; one thread at a time opens and closes, any may read blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ds4grpc.bank import Ids, bank_id
from ds4grpc.errors import BankCorrupt
from ds4grpc.layout import StateLayout
from ds4grpc.store.content import FileContent, decode_records, decode_tools
from ds4grpc.store.files import Files
from ds4grpc.store.format import (
    IDS,
    PREAMBLE,
    RECORDS,
    ROWS,
    TAIL,
    TOOLMAP,
    Header,
    RowPiece,
    Section,
    StateForm,
    aligned,
    block_rows,
    check_header,
    check_table,
    checksum,
    data_start,
    decode_header,
    decode_preamble,
    parse_file_name,
)

# Read at once when a file is opened: header, ids and records of most banks, which lie together.
FRONT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A block of a row section and the wanted rows in it."""

    plane: int
    section: Section
    index: int
    pieces: tuple[RowPiece, ...]

    @property
    def num_bytes(self) -> int:
        start, end = self.section.block(self.index)
        return end - start

    def is_whole(self, row_bytes: int) -> bool:
        """Whether the wanted rows are all of the block, in one run."""
        if len(self.pieces) != 1:
            return False
        piece = self.pieces[0]
        return (piece.stop_row - piece.start_row) * row_bytes == self.num_bytes


@dataclass(slots=True)
class OpenedHeader:
    """A file whose preamble and header are good by themselves, whatever model it is of."""

    header: Header
    header_bytes: int
    size_bytes: int  # of the file
    front: memoryview  # its first bytes, as many as there are up to FRONT_BYTES
    descriptor: int  # closed with the block, unless it is kept
    is_kept: bool = False

    @property
    def start(self) -> int:
        """Where the sections begin."""
        return data_start(self.header_bytes)

    def bank_file(self, files: Files, path: str, form: StateForm) -> BankFile:
        """The file as a bank's, which the caller closes from now on."""
        self.is_kept = True
        parts = (self.descriptor, self.front, self.header_bytes, self.start)
        return BankFile(path, self.header, files, form, *parts)


@contextmanager
def open_header(files: Files, path: str) -> Iterator[OpenedHeader]:
    """Opens a file and reads what it says of itself. Raises BankCorrupt."""
    try:
        descriptor = files.open_read(path)
    except OSError as error:
        raise BankCorrupt(f"the file cannot be opened: {error.strerror}", kind="io") from error
    opened: OpenedHeader | None = None
    try:
        size_bytes = _size_bytes(files, descriptor)
        front = memoryview(_read(files, descriptor, path, 0, min(size_bytes, FRONT_BYTES)))
        length, value = decode_preamble(front[: PREAMBLE.size])
        if data_start(length) > size_bytes:
            raise BankCorrupt("the file ends inside its header", kind="truncated")
        end = PREAMBLE.size + length
        data = bytearray(front[PREAMBLE.size : end])
        if end > len(front):
            data += _read(files, descriptor, path, len(front), end - len(front))
        header = decode_header(data, value)
        opened = OpenedHeader(header, length, size_bytes, front, descriptor)
        yield opened
    finally:
        if opened is None or not opened.is_kept:
            files.close(descriptor)


@dataclass(frozen=True, slots=True)
class BankFile:
    """An open bank file whose header has been checked. Close it."""

    path: str
    header: Header
    _files: Files
    _form: StateForm
    _descriptor: int
    _front: memoryview  # the first bytes of the file, as many as there are up to FRONT_BYTES
    _header_bytes: int
    _start: int  # where the sections begin

    @staticmethod
    def open(files: Files, path: str, form: StateForm, *, is_named: bool = True) -> BankFile:
        """Opens the file and checks preamble, header, sizes, and the name unless it has one of
        its own choice. Raises BankCorrupt."""
        with open_header(files, path) as opened:
            if is_named:
                _check_name(opened.header, path)
            check_header(opened.header, form, opened.size_bytes - opened.start)
            return opened.bank_file(files, path, form)

    @staticmethod
    def open_any(files: Files, path: str, *, is_named: bool = True) -> BankFile:
        """Opens the file of a model that is not at hand: all can be checked but whether its rows
        are those that the model wants. Raises BankCorrupt."""
        with open_header(files, path) as opened:
            header = opened.header
            if is_named:
                _check_name(header, path)
            check_table(header, opened.size_bytes - opened.start)
            form = StateForm(header.fingerprint, StateLayout(header.layout_id, ()))
            return opened.bank_file(files, path, form)

    def close(self) -> None:
        self._files.close(self._descriptor)

    def __enter__(self) -> BankFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def read_content(self) -> FileContent:
        """Ids, records and tool map, checked, and the bank id recomputed from the ids.

        Raises BankCorrupt.
        """
        header = self.header
        ids = self.read_ids()
        if bank_id(header.namespace, header.fingerprint, ids) != header.bank_id:
            raise BankCorrupt("the token ids are not those of this bank", kind="identity")
        limit = self._form.vocabulary_size
        if ids.max(initial=0) >= limit:
            raise BankCorrupt(f"token id {ids.max()}; they end at {limit}", kind="record")
        hidden, records = decode_records(self._read_section(RECORDS), header.frontier)
        return FileContent(ids, hidden, records, decode_tools(self._read_section(TOOLMAP)))

    def read_ids(self) -> Ids:
        """All tokens. Raises BankCorrupt."""
        ids = np.frombuffer(self._read_section(IDS), dtype="<u4").astype(np.uint32, copy=False)
        ids.setflags(write=False)
        return ids

    def row_blocks(self, stop_tokens: int) -> Iterator[RowBlock]:
        """The blocks that hold rows of tokens below `stop_tokens`, in file order."""
        for plane, rows in enumerate(self._form.layout.rows):
            section = self.header.section(ROWS + rows.name)
            stop_row = rows.num_rows(stop_tokens)
            ranges = self.header.row_ranges(rows)
            for index in range(section.num_blocks):
                pieces = block_rows(section, index, ranges, rows.row_bytes)
                if pieces[0].start_row >= stop_row:  # ranges ascend: nothing further is wanted
                    break
                wanted = tuple(
                    RowPiece(piece.start_row, min(piece.stop_row, stop_row), piece.offset)
                    for piece in pieces
                    if piece.start_row < stop_row
                )
                yield RowBlock(plane, section, index, wanted)

    def read_block(self, section: Section, index: int, view: memoryview) -> None:
        """Fills `view` (exactly the block's length) with a block. Raises BankCorrupt."""
        start, end = section.block(index)
        offset = self._start + section.offset + start
        count = self._read_into(view, offset)
        if count != end - start:
            raise BankCorrupt("the file ends inside a section", kind="truncated")
        if checksum(view) != section.checksums[index]:
            raise BankCorrupt(
                f"block {index} of section {section.name} has another checksum", kind="checksum"
            )

    def read_tails(self, stop_tokens: int) -> Iterator[tuple[int, bytes, int]]:
        """(position, tail, bytes read for it) of the tails at or below `stop_tokens`.

        Raises BankCorrupt.
        """
        size = self._form.layout.tail_bytes
        index, data = 0, bytearray()
        for position in self.header.tails:
            if position > stop_tokens:
                return
            read_bytes = 0
            while len(data) < size:
                block = self._read_block_bytes(self.header.section(TAIL), index)
                read_bytes += len(block)
                data += block
                index += 1
            yield position, bytes(data[:size]), read_bytes
            del data[:size]

    def verify(self) -> int:
        """Reads every block of every section; returns the bytes read. Raises BankCorrupt."""
        self.read_content()
        buffer = memoryview(bytearray(max(section.block_bytes for section in self.header.sections)))
        total = 0
        for section in self.header.sections:
            for index in range(section.num_blocks):
                start, end = section.block(index)
                self.read_block(section, index, buffer[: end - start])
            total += section.length
        return total

    def check_padding(self) -> None:
        """That nothing but zeros lies between the parts of the file: with `verify`, every one of
        its bytes is checked. Raises BankCorrupt."""
        ends = [PREAMBLE.size + self._header_bytes]
        ends += [self._start + part.offset + part.length for part in self.header.sections]
        for end in ends:
            padding = _read(self._files, self._descriptor, self.path, end, aligned(end) - end)
            if any(padding):
                raise BankCorrupt("something lies between two sections", kind="format")

    def _read_into(self, view: memoryview, offset: int) -> int:
        """Fills `view` from what is in memory already, or from the file; returns the bytes."""
        end = offset + len(view)
        if end <= len(self._front):
            view[:] = self._front[offset:end]
            return len(view)
        try:
            return self._files.read_into(self._descriptor, view, offset, self.path)
        except OSError as error:
            raise BankCorrupt(f"reading failed: {error.strerror}", kind="io") from error

    def _read_section(self, name: str) -> bytearray:
        section = self.header.section(name)
        data = bytearray(section.length)  # ids, records, toolmap: check_header saw to their size
        view = memoryview(data)
        for index in range(section.num_blocks):
            start, end = section.block(index)
            self.read_block(section, index, view[start:end])
        return data

    def _read_block_bytes(self, section: Section, index: int) -> bytearray:
        start, end = section.block(index)
        data = bytearray(end - start)
        self.read_block(section, index, memoryview(data))
        return data


def _check_name(header: Header, path: str) -> None:
    if (header.bank_id, header.base) != parse_file_name(os.path.basename(path)):
        raise BankCorrupt("the file is not the bank that its name says", kind="identity")


def _size_bytes(files: Files, descriptor: int) -> int:
    try:
        return files.size_bytes(descriptor)
    except OSError as error:
        raise BankCorrupt(f"its size is not known: {error.strerror}", kind="io") from error


def _read(files: Files, descriptor: int, path: str, offset: int, length: int) -> bytearray:
    data = bytearray(length)
    try:
        count = files.read_into(descriptor, memoryview(data), offset, path)
    except OSError as error:
        raise BankCorrupt(f"reading failed: {error.strerror}", kind="io") from error
    del data[count:]
    return data
