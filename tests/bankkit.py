"""Banks for the store's tests: layouts, rows that depend on all tokens before them, and sinks.

Rows are made from a running hash of the ids, as real KV rows depend on every earlier token: a row
taken from another branch, or from another place, never compares equal.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from ds4grpc.bank import BankContent, Ids, PersistReason, Record, RecordKind, Waypoint, namespace
from ds4grpc.bank import bank_id as bank_id_of
from ds4grpc.engine.banks import BankSource, MatchQuery, SourceMoved
from ds4grpc.layout import Rows, Spans, StateLayout
from ds4grpc.store.files import Files
from ds4grpc.store.store import StoreConfig

SPACE = namespace("tenant", b"")
OTHER_SPACE = namespace("other tenant", b"")
FINGERPRINT = bytes(range(32))
RENDERER = b"r" * 16

PLAIN = StateLayout("plain/1", (Rows("k.0", 96), Rows("v.0", 32)))
RATIO = StateLayout("ratio/1", (Rows("kv", 40), Rows("packed", 56, tokens_per_row=4)))
WINDOWED = StateLayout("windowed/1", (Rows("kv", 48), Rows("near", 24, window=16)))
TAILED = StateLayout(
    "tailed/1",
    (Rows("packed", 1600, tokens_per_row=4), Rows("near", 24, window=16)),
    tail_bytes=300,
)
WIDE = StateLayout("wide/1", (Rows("kv", 7000), Rows("packed", 200_000, tokens_per_row=8)))
LAYOUTS = (PLAIN, RATIO, WINDOWED, TAILED, WIDE)


def ids_of(seed: int, count: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.uint32)


def states_of(ids: Ids) -> list[bytes]:
    """32 bytes for each frontier 0 .. len(ids), which depend on all tokens before it."""
    return _states_of(ids.astype("<u4", copy=False).tobytes())


@lru_cache(maxsize=64)  # what is put is soon compared with
def _states_of(data: bytes) -> list[bytes]:
    running = hashlib.blake2b(digest_size=32)
    states = [running.copy().digest()]
    for at in range(0, len(data), 4):
        running.update(data[at : at + 4])
        states.append(running.copy().digest())
    return states


def stretched(state: bytes, salt: int, size: int) -> bytes:
    return (bytes(byte ^ salt for byte in state) * (size // 32 + 1))[:size]


def names(folder: Path, pattern: str) -> list[str]:
    """The names of all files below a folder that match, sorted."""
    return sorted(path.name for path in folder.rglob(pattern))


def stored_names(folder: Path) -> set[str]:
    """The names of all bank files in service."""
    return {path.name for path in folder.glob("*/??/*.bank")}


async def eventually(is_so: Callable[[], bool]) -> None:
    """Waits up to five seconds for what happens by itself."""
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


# Reading changes nothing, so dying there is dying before the next change.
READS = ("read", "open_read", "scan")


class DyingFiles(Files):
    """Ends the process before its `deadline`-th change, once armed; counts them anyway."""

    def __init__(self, deadline: int = 0) -> None:
        self.operations: list[str] = []
        self.deadline = deadline

    def arm(self, deadline: int) -> None:
        self.deadline = len(self.operations) + deadline

    def before(self, operation: str, path: str) -> None:
        if operation not in READS:
            self.operations.append(operation)
            if len(self.operations) == self.deadline:
                os._exit(9)


class MemorySource:
    """Rows of a bank in memory (`engine.banks.RowSource`). `moves_after` checks it has moved."""

    def __init__(self, layout: StateLayout, ids: Ids, moves_after: int | None = None) -> None:
        self.layout = layout
        self.states = states_of(ids)
        self.checks_left = moves_after
        self.closed = False
        self.planes = [
            b"".join(
                stretched(self.states[(row + 1) * rows.tokens_per_row], plane, rows.row_bytes)
                for row in range(rows.num_rows(len(ids)))
            )
            for plane, rows in enumerate(layout.rows)
        ]

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        size = self.layout.rows[plane].row_bytes
        assert not self.closed
        assert 0 < (stop_row - start_row) * size <= 1 << 20
        view = memoryview(self.planes[plane])[start_row * size : stop_row * size]
        assert len(view) == (stop_row - start_row) * size
        return view

    def tail(self, position: int) -> bytes:
        return stretched(self.states[position], 255, self.layout.tail_bytes)

    def check(self) -> None:
        if self.checks_left is not None:
            self.checks_left -= 1
            if self.checks_left < 0:
                raise SourceMoved

    def close(self) -> None:
        self.closed = True


class MemorySink:
    """A slot being filled (`engine.banks.RowSink`)."""

    def __init__(self, layout: StateLayout, num_tokens: int) -> None:
        self.layout = layout
        self.planes = [
            bytearray(rows.num_rows(num_tokens) * rows.row_bytes) for rows in layout.rows
        ]
        self.filled: list[list[tuple[int, int]]] = [[] for _ in layout.rows]
        self.tails: dict[int, bytes] = {}

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        size = self.layout.rows[plane].row_bytes
        view = memoryview(self.planes[plane])[start_row * size : stop_row * size]
        assert len(view) == (stop_row - start_row) * size
        return view

    def done(self, plane: int, start_row: int, stop_row: int) -> None:
        self.filled[plane].append((start_row, stop_row))

    def put_tail(self, position: int, data: bytes) -> None:
        self.tails[position] = data

    def assert_holds(self, source: MemorySource, position: int, held: Spans) -> None:
        """That exactly what a bank at `position` needs is here, bit for bit."""
        for plane, rows in enumerate(self.layout.rows):
            spans = held.clip(0, position).pairs if rows.window else ((0, position),)
            wanted = Spans.of((rows.num_rows(start), rows.num_rows(end)) for start, end in spans)
            assert Spans.of(self.filled[plane]) == wanted, rows.name
            assert sum(b - a for a, b in self.filled[plane]) == wanted.num_tokens  # each once
            for start, stop in wanted.pairs:
                at, end = start * rows.row_bytes, stop * rows.row_bytes
                assert self.planes[plane][at:end] == source.planes[plane][at:end], rows.name
        for at, tail in self.tails.items():
            assert tail == source.tail(at)


@dataclass
class Observed:
    """What the store reported."""

    events: list[tuple[str, str]] = field(default_factory=list)
    written_bytes: int = 0
    compacted_bytes: int = 0
    read_bytes: int = 0

    def persisted(self, reason: PersistReason, seconds: float, written_bytes: int) -> None:
        self.events.append(("persisted", reason))
        self.written_bytes += written_bytes

    def persist_failed(self, kind: str) -> None:
        self.events.append(("persist_failed", kind))

    def restored(self, result: str, seconds: float, read_bytes: int) -> None:
        self.events.append(("restored", result))
        self.read_bytes += read_bytes

    def compacted(self, seconds: float, written_bytes: int) -> None:
        self.events.append(("compacted", ""))
        self.compacted_bytes += written_bytes

    def evicted(self, reason: str) -> None:
        self.events.append(("evicted", reason))

    def catalog(self, op: str, seconds: float) -> None:
        pass

    def catalog_error(self, kind: str) -> None:
        self.events.append(("catalog_error", kind))

    def count(self, event: str, detail: str) -> int:
        return self.events.count((event, detail))


def config_of(
    folder: object, layout: StateLayout = PLAIN, quota_bytes: int = 1 << 30, min_tokens: int = 16
) -> StoreConfig:
    return StoreConfig(str(folder), FINGERPRINT, layout, quota_bytes, min_tokens)


@dataclass
class Turns:
    """A conversation that grows: ids, key text and waypoints at the end of each reply."""

    layout: StateLayout = PLAIN
    space: bytes = SPACE
    head: int = 0
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.uint32))
    text: bytes = b""
    waypoints: tuple[Waypoint, ...] = ()
    records: tuple[Record, ...] = ()

    def grow(self, seed: int, count: int) -> Turns:
        """One turn more, of `count` tokens and 4 bytes of text for each."""
        ids = np.concatenate([self.ids, ids_of(seed, count)])
        text = self.text + "".join(f"{token % 10000:04d}" for token in ids[-count:]).encode()
        waypoints = (*self.waypoints, Waypoint(len(text), len(ids)))
        record = Record(RecordKind.VISIBLE, text, RENDERER, waypoints)
        records = (record, *self.records)
        return Turns(self.layout, self.space, self.head, ids, text, waypoints, records)

    @property
    def frontier(self) -> int:
        return len(self.ids)

    def cut(self, position: int) -> Ids:
        return self.ids[:position]

    @property
    def bank_id(self) -> str:
        return bank_id_of(self.space, FINGERPRINT, self.ids)

    @property
    def resumes_at(self) -> int:
        """Where a whole restore goes on."""
        content = self.content
        return self.layout.replay_base(self.frontier, content.held, content.tails)

    def branch_at(self, position: int) -> Turns:
        """The same conversation as it was at one of its waypoints."""
        waypoints = tuple(point for point in self.waypoints if point.position <= position)
        text = self.text[: waypoints[-1].offset]
        records = tuple(record for record in self.records if len(record.key) <= len(text))
        return replace(
            self, ids=self.ids[:position], text=text, waypoints=waypoints, records=records
        )

    def head_only(self) -> Turns:
        """What the head alone is as a bank: ids, no records."""
        return replace(self, ids=self.ids[: self.head], text=b"", waypoints=(), records=())

    @property
    def content(self) -> BankContent:
        points = [0, *(point.position for point in self.waypoints)]
        if 0 < self.head <= self.frontier:
            points.append(self.head)
        return BankContent(
            namespace=self.space,
            ids=self.ids,
            records=self.records,
            hidden=Spans.of((p - 5, p - 2) for p in points if p > 8),
            held=self.layout.windows_at(points),
            tails=tuple(sorted(set(points) - {0})) if self.layout.tail_bytes else (),
            head=self.head,
        )

    def source(
        self,
        reason: PersistReason = PersistReason.TURN,
        *,
        pin: bool = False,
        ttl_seconds: float | None = None,
    ) -> BankSource:
        return BankSource(
            self.content, MemorySource(self.layout, self.ids), reason, pin, ttl_seconds
        )

    def query(self, extra: Sequence[int] = (), *, exact: bool = False) -> MatchQuery:
        """What a prompt that continues this conversation looks up."""
        return MatchQuery(
            namespace=self.space,
            text=self.text + b" and then",
            marks=tuple(point.offset for point in self.waypoints),
            ids=np.concatenate([self.ids, np.array(extra, np.uint32)]),
            exact=exact,
            head=self.head,
        )
