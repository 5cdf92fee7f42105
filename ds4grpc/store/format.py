"""The bank file: preamble, header, section table, and the rules each must keep.

Owns what the bytes mean and refuses everything else, before anything is allocated for it. Knows
no folder, no catalog and no asyncio; pure functions of bytes, any thread.

    0          32                     data start (4 KiB aligned)                        file end
    | preamble | JSON header | zeros  | ids | records | toolmap | rows/a | rows/b | tail |
                                      each section starts at a multiple of 4 KiB and is cut into
                                      blocks of at most 1 MiB, each with its checksum in the header

Section offsets count from the data start, so the header's length does not depend on itself.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import xxhash

from ds4grpc.bank import PersistReason
from ds4grpc.errors import BankCorrupt
from ds4grpc.layout import Rows, Span, Spans, StateLayout

MAGIC = b"ds4gbank"
VERSION = 1
PREAMBLE = struct.Struct("<8sIIQQ")  # magic, version, zero, header bytes, header checksum
SECTION_ALIGN_BYTES = 4096  # a page: sections can be mapped, or read with O_DIRECT
MAX_BLOCK_BYTES = 1 << 20  # what is copied or checked in one piece, beside running streams
MAX_HEADER_BYTES = 16 << 20  # the checksums of about 1 TiB; bounds what a damaged length allocates
# A sparse file costs its writer nothing, so its size bounds nothing: these do.
MAX_TOKENS = 1 << 24  # 64 MiB of ids; positions are u32 in the sections
MAX_TEXT_BYTES = 64 << 20  # of the records, and of the tool replay map
# Windows, tails and fields; a JSON value of two bytes becomes fifty in memory.
MAX_HEADER_VALUES = 1 << 18
MAX_TIME_MS = 253_402_300_799_000  # the year 9999, the last that protobuf has
MAX_TTL_SECONDS = 315_576_000_000.0  # ten thousand years, the longest that protobuf has
CHECKSUM_DIGITS = 16  # fixed width: the header's length is known before the checksums are
IDS, RECORDS, TOOLMAP, TAIL, ROWS = "ids", "records", "toolmap", "tail", "rows/"
RAW = "raw"  # the only encoding so far: the bytes as they are
TOKEN_BYTES = 4

_BANK_ID = re.compile(r"[0-9a-f]{32}")
_HEX_32_BYTES = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"([0-9a-f]{32})\.(0|[1-9][0-9]{0,9})\.bank")
_CHECKSUMS = re.compile(r"(?:[0-9a-f]{16})*")
_SECTION_FIELDS = {"name", "encoding", "offset", "length", "block_bytes", "checksums"}
_REASONS = frozenset(PersistReason)


@dataclass(frozen=True, slots=True)
class StateForm:
    """What the rows of a file must be to be usable here: the running model's."""

    fingerprint: bytes  # 32 bytes
    layout: StateLayout
    vocabulary_size: int = 1 << 32  # token ids are below it; any fits into a file's u32

    def __post_init__(self) -> None:
        # A block holds whole rows, so that it can be read straight into a slot.
        assert all(rows.row_bytes <= MAX_BLOCK_BYTES for rows in self.layout.rows)


class Section(NamedTuple):
    """A run of bytes in blocks of `block_bytes` (the last may be shorter).

    A tuple, as a model has two row arrays a layer and each lookup reads a few headers.
    """

    name: str
    offset: int  # from the data start
    length: int
    block_bytes: int
    checksums: tuple[int, ...]

    def block(self, index: int) -> tuple[int, int]:
        """[start, end) of a block, in bytes of the section."""
        start = index * self.block_bytes
        return start, min(start + self.block_bytes, self.length)

    @property
    def num_blocks(self) -> int:
        return -(-self.length // self.block_bytes)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Plain rows cover the tokens [base, frontier). `windows` are the tokens whose window rows are
    here, `tails` the positions whose tail is; both may lie below `base`.
    """

    bank_id: str
    parent_id: str  # "" when base is 0
    base: int
    frontier: int
    head: int
    fingerprint: bytes
    namespace: bytes
    reason: PersistReason
    created_at_ms: int
    ttl_seconds: float | None
    layout_id: str
    windows: Spans = Spans()
    tails: tuple[int, ...] = ()
    sections: tuple[Section, ...] = ()

    def section(self, name: str) -> Section:
        return next(section for section in self.sections if section.name == name)

    def row_ranges(self, rows: Rows) -> tuple[Span, ...]:
        """The [start, stop) rows of one array in this file, in file order."""
        return row_ranges(rows, self.base, self.frontier, self.windows)

    @property
    def data_bytes(self) -> int:
        """Bytes from the data start to the end of the file."""
        last = self.sections[-1]
        return aligned(last.offset + last.length)


def checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3, 64 bits: found by error, not by an enemy; 27 GB/s on a slow core."""
    return xxhash.xxh3_64_intdigest(data)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // SECTION_ALIGN_BYTES) * SECTION_ALIGN_BYTES


def data_start(header_bytes: int) -> int:
    """Where the sections begin, in bytes of a file with a header of that length."""
    return aligned(PREAMBLE.size + header_bytes)


def block_bytes(unit_bytes: int) -> int:
    """The block size of a section made of units: whole units, so that a block of rows can be
    read straight into a slot. A unit over 1 MiB (a large tail) is cut."""
    if unit_bytes >= MAX_BLOCK_BYTES:
        return MAX_BLOCK_BYTES
    return MAX_BLOCK_BYTES // unit_bytes * unit_bytes


def row_ranges(rows: Rows, base: int, frontier: int, windows: Spans) -> tuple[Span, ...]:
    """The [start, stop) rows of one array that a file holds, in file order."""
    spans = windows.pairs if rows.window else ((base, frontier),)
    starts_stops = ((rows.num_rows(start), rows.num_rows(end)) for start, end in spans)
    return tuple((start, stop) for start, stop in starts_stops if start < stop)


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Consecutive rows inside one block: [start_row, stop_row), the first at byte `offset`."""

    start_row: int
    stop_row: int
    offset: int


def block_rows(
    section: Section, index: int, ranges: Sequence[Span], row_bytes: int
) -> tuple[RowPiece, ...]:
    """The rows in a block of a row section that holds `ranges` one after the other.

    ranges    [100 .. 116)[300 .. 316)
    blocks    |   0    |   1    |   2 |      block 1: rows [110, 116) and [300, 304)
    """
    start, end = section.block(index)
    at, stop = start // row_bytes, end // row_bytes
    pieces: list[RowPiece] = []
    before = 0  # rows of the section ahead of the range
    for first, last in ranges:
        low, high = max(at, before), min(stop, before + last - first)
        if low < high:
            row = first + low - before
            pieces.append(RowPiece(row, row + high - low, low * row_bytes - start))
        before += last - first
    return tuple(pieces)


def file_name(bank_id: str, base: int) -> str:
    return f"{bank_id}.{base}.bank"


def parse_file_name(name: str) -> tuple[str, int] | None:
    """(bank id, base) of a bank file's name; None when it is not one."""
    match = _FILE_NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def is_bank_id(text: str) -> bool:
    return _BANK_ID.fullmatch(text) is not None


def with_sections(header: Header, layout: StateLayout, records: int, toolmap: int) -> Header:
    """The header with its section table; `records` and `toolmap` are lengths in bytes.

    The checksums are zeros until `with_checksums`: the table has its final size.
    """
    sections: list[Section] = []
    offset = 0
    for name, length, unit in _expected(header, layout, records, toolmap):
        size = block_bytes(unit)
        section = Section(name, offset, length, size, (0,) * -(-length // size))
        sections.append(section)
        offset = aligned(offset + length)
    return replace(header, sections=tuple(sections))


def with_checksums(header: Header, checksums: Sequence[Sequence[int]]) -> Header:
    """The header with the checksums of each section's blocks."""
    return replace(
        header,
        sections=tuple(
            section._replace(checksums=tuple(values))
            for section, values in zip(header.sections, checksums, strict=True)
        ),
    )


def _expected(
    header: Header, layout: StateLayout, records: int, toolmap: int
) -> list[tuple[str, int, int]]:
    """(name, length, unit) of each section that a file with this header has, in order."""
    table = [
        (IDS, header.frontier * TOKEN_BYTES, TOKEN_BYTES),
        (RECORDS, records, 1),
        (TOOLMAP, toolmap, 1),
    ]
    known: dict[tuple[int, bool], int] = {}  # most arrays of a model have as many rows
    for rows in layout.rows:
        shape = (rows.tokens_per_row, rows.window > 0)
        num_rows = known.get(shape, -1)
        if num_rows < 0:
            num_rows = sum(stop - start for start, stop in header.row_ranges(rows))
            known[shape] = num_rows
        table.append((ROWS + rows.name, num_rows * rows.row_bytes, rows.row_bytes))
    if layout.tail_bytes:
        table.append((TAIL, len(header.tails) * layout.tail_bytes, layout.tail_bytes))
    return table


def encode_header(header: Header) -> bytes:
    document = {
        "bank_id": header.bank_id,
        "parent_id": header.parent_id,
        "base": header.base,
        "frontier": header.frontier,
        "head": header.head,
        "fingerprint": header.fingerprint.hex(),
        "namespace": header.namespace.hex(),
        "reason": header.reason.value,
        "created_at_ms": header.created_at_ms,
        "ttl_seconds": header.ttl_seconds,
        "layout_id": header.layout_id,
        "windows": [list(pair) for pair in header.windows.pairs],
        "tails": list(header.tails),
        "sections": [
            {
                "name": section.name,
                "encoding": RAW,
                "offset": section.offset,
                "length": section.length,
                "block_bytes": section.block_bytes,
                "checksums": "".join(f"{value:016x}" for value in section.checksums),
            }
            for section in header.sections
        ],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def encode_preamble(header_json: bytes) -> bytes:
    return PREAMBLE.pack(MAGIC, VERSION, 0, len(header_json), checksum(header_json))


def decode_preamble(data: bytes | memoryview) -> tuple[int, int]:
    """(header bytes, header checksum). Raises BankCorrupt."""
    if len(data) < PREAMBLE.size:
        raise BankCorrupt(f"the file has {len(data)} bytes; a preamble needs 32", kind="truncated")
    magic, version, zero, length, value = PREAMBLE.unpack(data[: PREAMBLE.size])
    if magic != MAGIC:
        raise BankCorrupt("the file does not start like a bank file", kind="format")
    if version != VERSION:
        raise BankCorrupt(f"format version {version} is not {VERSION}", kind="format")
    if zero or not 0 < length <= MAX_HEADER_BYTES:
        raise BankCorrupt(f"a header of {length} bytes is not possible", kind="format")
    return length, value


def decode_header(data: bytes | bytearray, expected_checksum: int) -> Header:
    """The header of `data`, each field checked by itself. Raises BankCorrupt."""
    if checksum(data) != expected_checksum:
        raise BankCorrupt("the header's checksum differs", kind="checksum")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_HEADER_VALUES:
        raise BankCorrupt(f"the header has over {MAX_HEADER_VALUES} values", kind="format")
    try:
        document = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BankCorrupt("the header is not JSON", kind="format") from error
    read = _Fields(document, "header")
    header = Header(
        bank_id=read.text("bank_id", _BANK_ID.fullmatch),
        parent_id=read.text("parent_id", lambda text: not text or is_bank_id(text)),
        base=read.whole("base", MAX_TOKENS),
        frontier=read.whole("frontier", MAX_TOKENS),
        head=read.whole("head", MAX_TOKENS),
        fingerprint=bytes.fromhex(read.text("fingerprint", _HEX_32_BYTES.fullmatch)),
        namespace=bytes.fromhex(read.text("namespace", _HEX_32_BYTES.fullmatch)),
        reason=PersistReason(read.text("reason", lambda text: text in _REASONS)),
        created_at_ms=read.whole("created_at_ms", MAX_TIME_MS),
        ttl_seconds=read.seconds("ttl_seconds"),
        layout_id=read.text("layout_id", lambda text: 0 < len(text) <= 1024),
        windows=_decode_windows(read.items("windows")),
        tails=_decode_tails(read.items("tails")),
        sections=tuple(_decode_section(item) for item in read.items("sections")),
    )
    read.done()
    if (header.base == 0) != (header.parent_id == ""):
        raise BankCorrupt("base 0 goes with no parent, and no other base does", kind="format")
    if not header.base <= header.frontier or header.frontier == 0:
        raise BankCorrupt(f"base {header.base} of frontier {header.frontier}", kind="format")
    if header.head > header.frontier or header.parent_id == header.bank_id:
        raise BankCorrupt("head or parent contradicts the bank itself", kind="format")
    last_window = header.windows.pairs[-1][1] if header.windows.pairs else 0
    last_tail = header.tails[-1] if header.tails else 0
    if max(last_window, last_tail) > header.frontier:
        raise BankCorrupt("a window or tail lies past the frontier", kind="format")
    return header


def check_header(header: Header, form: StateForm, sections_bytes: int) -> None:
    """That the file is of this model and has exactly the sections its header implies.

    `sections_bytes` is the file's length less its data start. Raises BankCorrupt: `foreign` for
    another model's file, `truncated` or `format` otherwise.
    """
    layout = form.layout
    if header.fingerprint != form.fingerprint or header.layout_id != layout.layout_id:
        raise BankCorrupt("the file belongs to another model", kind="foreign")
    if header.base % layout.alignment:
        raise BankCorrupt(f"base {header.base} is not aligned", kind="format")
    if (header.windows.pairs and not layout.window) or (header.tails and not layout.tail_bytes):
        raise BankCorrupt("windows or tails that the layout does not have", kind="format")
    lengths = {section.name: section.length for section in header.sections}
    records, toolmap = lengths.get(RECORDS, -1), lengths.get(TOOLMAP, -1)
    if max(records, toolmap) > MAX_TEXT_BYTES:
        raise BankCorrupt(
            f"{max(records, toolmap)} bytes of records or tools; the limit is {MAX_TEXT_BYTES}",
            kind="format",
        )
    table = _expected(header, layout, records, toolmap)
    offset = 0
    for section, (name, length, unit) in zip(header.sections, table, strict=False):
        size = block_bytes(unit)
        actual = (section.name, section.offset, section.length, section.block_bytes)
        if actual != (name, offset, length, size) or length < 0:
            raise BankCorrupt(f"section {name} is not where and what it must be", kind="format")
        if len(section.checksums) != section.num_blocks:
            raise BankCorrupt(f"section {name} lacks checksums", kind="format")
        offset = aligned(offset + length)
    if len(header.sections) != len(table):
        raise BankCorrupt(f"{len(header.sections)} sections, not {len(table)}", kind="format")
    if sections_bytes != header.data_bytes:
        raise BankCorrupt(
            f"the sections take {header.data_bytes} bytes, the file has {sections_bytes} for them",
            kind="truncated",
        )


def check_table(header: Header, sections_bytes: int) -> None:
    """What `check_header` sees to, as far as it can be told without the model: that the sections
    follow one another, have a checksum for each block and fill the file.

    Raises BankCorrupt.
    """
    names = [section.name for section in header.sections]
    rows = [name for name in names[3:] if name.startswith(ROWS)]
    if names[:3] != [IDS, RECORDS, TOOLMAP] or names[3:] not in (rows, [*rows, TAIL]):
        raise BankCorrupt("the sections are not those of a bank", kind="format")
    if len(set(names)) != len(names):
        raise BankCorrupt("a section is there twice", kind="format")
    ids, records, toolmap = header.sections[:3]
    if ids.length != header.frontier * TOKEN_BYTES:
        raise BankCorrupt("there is not one id for each token", kind="format")
    if max(records.length, toolmap.length) > MAX_TEXT_BYTES:
        raise BankCorrupt(f"records or tools are over {MAX_TEXT_BYTES} bytes", kind="format")
    offset = 0
    for section in header.sections:
        if section.offset != offset or not section.block_bytes:
            raise BankCorrupt(f"section {section.name} is not where it must be", kind="format")
        if len(section.checksums) != section.num_blocks:
            raise BankCorrupt(f"section {section.name} lacks checksums", kind="format")
        offset = aligned(offset + section.length)
    if sections_bytes != header.data_bytes:
        raise BankCorrupt(
            f"the sections take {header.data_bytes} bytes, the file has {sections_bytes} for them",
            kind="truncated",
        )


class _Fields:
    """A JSON object read field by field: each must be there, of its type, and no other may."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise BankCorrupt(f"the {what} is not an object", kind="format")
        self._left = dict(value)
        self._what = what

    def _take(self, name: str) -> Any:
        try:
            return self._left.pop(name)
        except KeyError:
            raise BankCorrupt(f"the {self._what} lacks {name}", kind="format") from None

    def _wrong(self, name: str) -> BankCorrupt:
        return BankCorrupt(f"{name} of the {self._what} is not possible", kind="format")

    def text(self, name: str, allowed: Callable[[str], object]) -> str:
        value = self._take(name)
        if not isinstance(value, str) or not allowed(value):
            raise self._wrong(name)
        return value

    def whole(self, name: str, most: int) -> int:
        value = self._take(name)
        if type(value) is not int or not 0 <= value <= most:  # bool is an int in Python
            raise self._wrong(name)
        return value

    def seconds(self, name: str) -> float | None:
        value = self._take(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 < value <= MAX_TTL_SECONDS:
            raise self._wrong(name)
        return float(value)

    def items(self, name: str) -> list[Any]:
        value = self._take(name)
        if not isinstance(value, list):
            raise self._wrong(name)
        return value

    def done(self) -> None:
        if self._left:
            raise BankCorrupt(f"the {self._what} has unknown fields", kind="format")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number here")


def _is_position(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKENS


def _decode_windows(items: list[Any]) -> Spans:
    pairs: list[Span] = []
    last = -1
    for item in items:
        if not isinstance(item, list) or len(item) != 2 or not all(map(_is_position, item)):
            raise BankCorrupt("a window is not a pair of positions", kind="format")
        start, end = item
        if not last < start < end:  # sorted, disjoint, not even touching
            raise BankCorrupt("windows are not in order", kind="format")
        pairs.append((start, end))
        last = end
    return Spans(tuple(pairs))


def _decode_tails(items: list[Any]) -> tuple[int, ...]:
    last = 0
    for item in items:
        if not _is_position(item) or item <= last:
            raise BankCorrupt("tails are not ascending positions", kind="format")
        last = item
    return tuple(items)


def _decode_section(item: Any) -> Section:
    if type(item) is not dict or item.keys() != _SECTION_FIELDS:
        raise BankCorrupt("a section does not have the fields of one", kind="format")
    name, offset, length = item["name"], item["offset"], item["length"]
    size, digits = item["block_bytes"], item["checksums"]
    well_formed = (
        item["encoding"] == RAW
        and type(name) is str
        and len(name) <= 256
        and type(offset) is type(length) is type(size) is int
        and 0 <= offset <= 1 << 62
        and 0 <= length <= 1 << 62
        and 0 <= size <= MAX_BLOCK_BYTES
        and type(digits) is str
        and _CHECKSUMS.fullmatch(digits) is not None
    )
    if not well_formed:
        raise BankCorrupt(f"section {str(name)[:64]!r} is not possible", kind="format")
    checksums = struct.unpack(f">{len(digits) // CHECKSUM_DIGITS}Q", bytes.fromhex(digits))
    return Section(name, offset, length, size, checksums)
