"""The two sections of a bank file that are not plain arrays: records and the tool replay map.

Owns their binary form and refuses everything else. Knows nothing of files; pure functions of
bytes, any thread. Keys of successive turns mostly extend one another, so each is stored as what
differs from the key before it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds4grpc.bank import Ids, Record, RecordKind, Waypoint, common_prefix_bytes
from ds4grpc.errors import BankCorrupt
from ds4grpc.layout import Span, Spans
from ds4grpc.store.format import MAX_TEXT_BYTES

# A few bytes can ask for a long key again and again (shared prefixes), and eight of them make a
# waypoint. So what all records take once decoded is bounded too, not only what is in the file.
MAX_HIDDEN = 1 << 18
MAX_RECORDS = 4096
MAX_WAYPOINTS = 1 << 16
MAX_DECODED_BYTES = 256 << 20
_POINT_BYTES = 128  # of a waypoint in memory
MAX_TOOL_CALLS = 1 << 16
MAX_CALL_ID_BYTES = 256

_COUNTS = struct.Struct("<II")  # hidden spans, records
_PAIR = struct.Struct("<II")
_RECORD = struct.Struct("<B16sIIII")  # kind, renderer, shared, own bytes, anchor, waypoints
_COUNT = struct.Struct("<I")
_CALL = struct.Struct("<II")  # bytes of the call id, of the sampled text
_KINDS = {RecordKind.RAW: 0, RecordKind.VISIBLE: 1, RecordKind.PROMPT: 2}
_KIND_OF = {code: kind for kind, code in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class ToolReplay:
    """How the model spelled a tool call, so that a later render can repeat it exactly."""

    call_id: str
    text: bytes


@dataclass(frozen=True, slots=True)
class FileContent:
    """What a file holds besides rows and tails."""

    ids: Ids  # (frontier,), all tokens, those of the parent included
    hidden: Spans = Spans()
    records: tuple[Record, ...] = ()
    tools: tuple[ToolReplay, ...] = ()


def fit_records(records: Sequence[Record]) -> tuple[Record, ...]:
    """The first records that the limits of the format allow."""
    fitting: list[Record] = []
    decoded = encoded = 0
    before = b""
    for record in records[:MAX_RECORDS]:
        num_points = len(record.waypoints)
        own = len(record.key) - common_prefix_bytes(before, record.key)
        decoded += len(record.key) + num_points * _POINT_BYTES
        encoded += _RECORD.size + own + num_points * _PAIR.size
        if decoded > MAX_DECODED_BYTES or encoded > MAX_TEXT_BYTES // 2:  # the rest is for spans
            break
        if num_points <= MAX_WAYPOINTS:
            fitting.append(record)
            before = record.key
    return tuple(fitting)


def encode_records(hidden: Spans, records: Sequence[Record]) -> bytes:
    parts = [_COUNTS.pack(len(hidden.pairs), len(records))]
    parts.extend(_PAIR.pack(start, end) for start, end in hidden.pairs)
    before = b""
    for record in records:
        shared = common_prefix_bytes(before, record.key)
        own = record.key[shared:]
        code = _KINDS[record.kind]
        lengths = (shared, len(own), record.anchor, len(record.waypoints))
        parts.append(_RECORD.pack(code, record.renderer, *lengths))
        parts.append(own)
        parts.extend(_PAIR.pack(point.offset, point.position) for point in record.waypoints)
        before = record.key
    return b"".join(parts)


def decode_records(data: bytes | bytearray, frontier: int) -> tuple[Spans, tuple[Record, ...]]:
    """Hidden spans and records of a bank with that frontier. Raises BankCorrupt."""
    read = _Bytes(data)
    num_hidden, num_records = read.take(_COUNTS)
    if num_records > MAX_RECORDS:
        raise BankCorrupt(f"{num_records} records; the limit is {MAX_RECORDS}", kind="record")
    if num_hidden > MAX_HIDDEN:
        raise BankCorrupt(f"{num_hidden} hidden spans; the limit is {MAX_HIDDEN}", kind="record")
    hidden = Spans(_decode_hidden(read, num_hidden, frontier))
    records: list[Record] = []
    left = MAX_DECODED_BYTES
    before = b""
    for _ in range(num_records):
        code, renderer, shared, own, anchor, num_waypoints = read.take(_RECORD)
        left -= shared + own + num_waypoints * _POINT_BYTES
        if code not in _KIND_OF or shared > len(before) or left < 0:
            raise BankCorrupt("a record's kind or key length is not possible", kind="record")
        before = before[:shared] + read.bytes(own)
        if anchor and anchor >= len(before):
            raise BankCorrupt("a record's anchor is beyond its key", kind="record")
        try:
            before.decode()
        except UnicodeDecodeError as error:
            raise BankCorrupt("a record's key is not UTF-8", kind="record") from error
        waypoints = _decode_waypoints(read, num_waypoints, len(before), frontier)
        records.append(Record(_KIND_OF[code], before, renderer, waypoints, anchor))
    read.done()
    return hidden, tuple(records)


def encode_tools(tools: Sequence[ToolReplay]) -> bytes:
    parts = [_COUNT.pack(len(tools))]
    for tool in tools:
        call_id = tool.call_id.encode()
        parts += (_CALL.pack(len(call_id), len(tool.text)), call_id, tool.text)
    return b"".join(parts)


def decode_tools(data: bytes | bytearray) -> tuple[ToolReplay, ...]:
    """The tool replay map. Raises BankCorrupt."""
    read = _Bytes(data)
    (count,) = read.take(_COUNT)
    if count > MAX_TOOL_CALLS:
        raise BankCorrupt(f"{count} tool calls; the limit is {MAX_TOOL_CALLS}", kind="record")
    tools: list[ToolReplay] = []
    for _ in range(count):
        id_bytes, text_bytes = read.take(_CALL)
        if not 0 < id_bytes <= MAX_CALL_ID_BYTES:
            raise BankCorrupt(f"a call id of {id_bytes} bytes is not possible", kind="record")
        try:
            tools.append(ToolReplay(read.bytes(id_bytes).decode(), read.bytes(text_bytes)))
        except UnicodeDecodeError as error:
            raise BankCorrupt("a call id is not UTF-8", kind="record") from error
    read.done()
    return tuple(tools)


class _Bytes:
    """Bytes read from the front; asking for more than there is raises BankCorrupt."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = memoryview(data)
        self._at = 0

    def bytes(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise BankCorrupt("a section ends inside an entry", kind="record")
        return bytes(self._data[start : self._at])

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.bytes(form.size))

    def done(self) -> None:
        if self._at != len(self._data):
            raise BankCorrupt("a section goes on after its last entry", kind="record")


def _decode_hidden(read: _Bytes, count: int, frontier: int) -> tuple[Span, ...]:
    pairs: list[Span] = []
    last = -1
    for _ in range(count):
        start, end = read.take(_PAIR)
        if not last < start < end <= frontier:
            raise BankCorrupt("hidden spans are not in order or pass the frontier", kind="record")
        pairs.append((start, end))
        last = end
    return tuple(pairs)


def _decode_waypoints(
    read: _Bytes, count: int, key_bytes: int, frontier: int
) -> tuple[Waypoint, ...]:
    if count > MAX_WAYPOINTS:
        raise BankCorrupt(f"{count} waypoints; the limit is {MAX_WAYPOINTS}", kind="record")
    points: list[Waypoint] = []
    offset = position = 0
    for _ in range(count):
        point = Waypoint(*read.take(_PAIR))
        if not offset <= point.offset <= key_bytes or not position <= point.position <= frontier:
            raise BankCorrupt("waypoints do not ascend or pass the bank's end", kind="record")
        offset, position = point.offset, point.position
        points.append(point)
    return tuple(points)
