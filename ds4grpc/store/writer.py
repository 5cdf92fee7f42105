"""Writing one bank file: the header's arithmetic first, then the bytes in pieces.

Owns the order of writes inside a temp file. Knows no catalog, no final name and no policy.
Blocking: one worker thread a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4grpc.engine.banks import RowSource
from ds4grpc.store.content import (
    FileContent,
    decode_records,
    decode_tools,
    encode_records,
    encode_tools,
)
from ds4grpc.store.files import Files
from ds4grpc.store.format import (
    IDS,
    RECORDS,
    ROWS,
    TAIL,
    TOOLMAP,
    Header,
    Section,
    StateForm,
    aligned,
    block_rows,
    check_header,
    checksum,
    data_start,
    decode_header,
    encode_header,
    encode_preamble,
    with_checksums,
    with_sections,
)
from ds4grpc.store.pace import Pace

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Draft:
    """A file about to be written: everything but rows, tails and checksums."""

    form: StateForm
    header: Header
    header_bytes: int
    parts: dict[str, bytes]  # ids, records, toolmap

    @property
    def size_bytes(self) -> int:
        """Length of the file; a multiple of 4 KiB, so also what it occupies."""
        return data_start(self.header_bytes) + self.header.data_bytes

    def check(self) -> None:
        """That the reader will take the file: better no file than one that is quarantined.

        Raises BankCorrupt.
        """
        header_json = encode_header(self.header)
        header = decode_header(header_json, checksum(header_json))
        check_header(header, self.form, self.header.data_bytes)
        decode_records(self.parts[RECORDS], header.frontier)
        decode_tools(self.parts[TOOLMAP])


def draft_file(header: Header, content: FileContent, form: StateForm) -> Draft:
    """Lays a file out; `header` has no section table yet."""
    parts = {
        IDS: content.ids.astype("<u4", copy=False).tobytes(),
        RECORDS: encode_records(content.hidden, content.records),
        TOOLMAP: encode_tools(content.tools),
    }
    full = with_sections(header, form.layout, len(parts[RECORDS]), len(parts[TOOLMAP]))
    return Draft(form, full, len(encode_header(full)), parts)


def write_file(files: Files, path: str, draft: Draft, source: RowSource, pace: Pace) -> None:
    """Writes the file and syncs its bytes; on any failure there is no file.

    Every piece is at most 1 MiB and is checked with `source.check()` once its bytes are out of
    the source. Raises OSError, SourceMoved, and what the source raises.
    """
    descriptor = files.create(path)
    try:
        files.allocate(descriptor, draft.size_bytes, path)
        start = data_start(draft.header_bytes)
        checksums: list[list[int]] = []
        for section in draft.header.sections:
            values: list[int] = []
            for index in range(section.num_blocks):
                first, last = section.block(index)
                pace.wait(aligned(last - first))  # the disk takes whole pages
                block = block_of(section, index, draft, source)
                values.append(checksum(block))
                files.write(descriptor, block, start + section.offset + first, path)
                source.check()
            checksums.append(values)
        header_json = encode_header(with_checksums(draft.header, checksums))
        pace.wait(start)
        # The header goes last: a file that lacks any block has no valid start.
        files.write(descriptor, encode_preamble(header_json) + header_json, 0, path)
        files.sync_data(descriptor, path)
    except BaseException:
        files.close(descriptor)
        files.unlink(path)
        raise
    files.close(descriptor)


def block_of(section: Section, index: int, draft: Draft, source: RowSource) -> Buffer:
    """The bytes of one block. Raises what the source raises."""
    start, end = section.block(index)
    if section.name in draft.parts:
        return memoryview(draft.parts[section.name])[start:end]
    layout = draft.form.layout
    if section.name == TAIL:
        size = layout.tail_bytes
        first, stop = start // size, -(-end // size)
        tails = b"".join(source.tail(position) for position in draft.header.tails[first:stop])
        return memoryview(tails)[start - first * size : end - first * size]
    plane, rows = next(
        (plane, rows) for plane, rows in enumerate(layout.rows) if ROWS + rows.name == section.name
    )
    pieces = block_rows(section, index, draft.header.row_ranges(rows), rows.row_bytes)
    views = [source.view(plane, piece.start_row, piece.stop_row) for piece in pieces]
    block = views[0] if len(views) == 1 else b"".join(views)
    assert len(block) == end - start
    return block
