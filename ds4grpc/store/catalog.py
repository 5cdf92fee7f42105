"""The catalog's statements: each method is one short transaction or one SELECT.

Owns the queries over `tables`. Knows no files and no policy. Coroutines on the event loop; writes
in aiosqlite's thread, reads in threads of their own, one hop each. Only tasks that the store owns
may await them: a task that is cancelled inside a write transaction leaves the file locked for
good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
from sqlalchemy import Row, bindparam, delete, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ds4grpc.bank import PersistReason, RecordKind, Trust
from ds4grpc.layout import Spans
from ds4grpc.store.database import (
    NUM_READERS,
    CatalogError,
    reader_engine,
    translated,
    upgrade,
    write_log_back,
    writer_engine,
)
from ds4grpc.store.format import is_bank_id
from ds4grpc.store.index import Entry
from ds4grpc.store.keys import DIGEST_BYTES, Mark
from ds4grpc.store.tables import banks, hashes

P = ParamSpec("P")
T = TypeVar("T")

MAX_HITS = 10  # rows of one lookup: each fetched row fights for the interpreter
BANKS_A_BATCH = 200  # of one transaction, so that the write lock is never held for long


@dataclass(frozen=True, slots=True)
class Hit:
    """A bank that shares a prefix of at least `position` tokens, says the catalog."""

    bank_id: str
    position: int


_ALL_FLAGS = sum(Trust)
_NEEDED_FLAGS = int(Trust.COMMITTED | Trust.DURABLE)
# One statement of one text for any number of digests, which come as one value. A digest that very
# many banks share (all replies to one prompt have its anchor) costs no more than any other.
_FIND = text(f"""
    WITH RECURSIVE wanted(digest, at) AS (
        SELECT substr(:digests, 1, {DIGEST_BYTES}), 1 + {DIGEST_BYTES}
        UNION ALL
        SELECT substr(:digests, at, {DIGEST_BYTES}), at + {DIGEST_BYTES} FROM wanted
        WHERE at < length(:digests)
    )
    SELECT banks.bank_id, max(hashes.position) AS deepest
    FROM wanted
    JOIN hashes ON hashes.digest = wanted.digest AND hashes.bank_no IN (
        SELECT bank_no FROM hashes WHERE digest = wanted.digest
        ORDER BY bank_no DESC LIMIT {MAX_HITS}
    )
    JOIN banks ON banks.bank_no = hashes.bank_no
    GROUP BY banks.bank_no
    ORDER BY deepest DESC, banks.last_used_at DESC
    LIMIT {MAX_HITS}
""")
_COLUMNS = [column for column in banks.c if column.name != "bank_no"]
_ALL = select(*_COLUMNS)
_NUMBERS = select(banks.c.bank_no).where(banks.c.bank_id.in_(bindparam("bank_ids", expanding=True)))
_DROP_HASHES = delete(hashes).where(hashes.c.bank_no.in_(bindparam("bank_nos", expanding=True)))
_DROP_BANKS = delete(banks).where(banks.c.bank_no.in_(bindparam("bank_nos", expanding=True)))
_LAST_NUMBER = select(func.max(banks.c.bank_no))
_CHANGING = ("trust", "hits", "pinned", "hidden", "last_used_at", "verified_at", "ttl_seconds")
_UPDATE = (
    update(banks)
    .where(banks.c.bank_id == bindparam("of_bank_id"))
    .values({name: bindparam(name) for name in _CHANGING})
)


class Catalog:
    """An open catalog. Every method raises CatalogError."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer: AsyncEngine = writer_engine(path)
        self._reader = reader_engine(path)
        self._threads = ThreadPoolExecutor(NUM_READERS, "store-catalog")
        self._is_closed = False

    @staticmethod
    async def open(path: str) -> Catalog:
        """Migrates the file, making it when it is not there."""
        return await asyncio.to_thread(_open, path)

    async def close(self) -> None:
        """Writes the log back into the file and removes it, unless somebody else reads."""
        self._is_closed = True
        try:
            await self.checkpoint()
        finally:
            with translated():
                await self._writer.dispose()
                await asyncio.to_thread(self._stop_reading)

    def _stop_reading(self) -> None:
        self._threads.shutdown()
        self._reader.dispose()

    async def checkpoint(self) -> None:
        """Writes the log back into the file and cuts it to nothing, unless somebody reads."""
        await asyncio.to_thread(write_log_back, self._path)

    async def probe(self) -> None:
        """Writes what changes nothing."""
        with translated():
            async with self._writer.begin() as connection:
                await connection.exec_driver_sql("PRAGMA user_version = 0")

    async def all(self) -> list[Entry]:
        """Every row. One that cannot be a bank counts as damage of the whole catalog."""
        return await self._read(self._all)

    def _all(self) -> list[Entry]:
        with translated(), self._reader.connect() as connection:
            return _entries(connection.execute(_ALL))

    async def find(self, digests: Callable[[], Sequence[bytes]]) -> list[Hit]:
        """The banks that share the longest prefixes, deepest first; at most ten. `digests` is
        called in the thread that reads."""
        return await self._read(self._find, digests)

    def _find(self, digests: Callable[[], Sequence[bytes]]) -> list[Hit]:
        wanted = b"".join(digests())
        if not wanted:
            return []
        with translated(), self._reader.connect() as connection:
            rows = connection.execute(_FIND, {"digests": wanted}).all()
        return [Hit(bank_id, position) for bank_id, position in rows]

    async def _read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._is_closed:  # another one is being made
            raise CatalogError("the catalog is closed", "other")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    async def add(self, added: Sequence[tuple[Entry, Sequence[Mark]]]) -> None:
        """Adds banks and their hashes; rows that bear their ids are replaced."""
        for start in range(0, len(added), BANKS_A_BATCH):
            batch = added[start : start + BANKS_A_BATCH]
            with translated():
                async with self._writer.begin() as connection:
                    await _drop(connection, [entry.bank_id for entry, _ in batch])
                    await _insert(connection, batch)

    async def remove(self, bank_ids: Sequence[str]) -> None:
        """Forgets banks; ids without a row are no error."""
        for start in range(0, len(bank_ids), BANKS_A_BATCH):
            with translated():
                async with self._writer.begin() as connection:
                    await _drop(connection, bank_ids[start : start + BANKS_A_BATCH])

    async def update(self, entries: Sequence[Entry]) -> None:
        """Writes what changes in a bank's life: trust, hits, pin, hiding, times."""
        for start in range(0, len(entries), BANKS_A_BATCH):
            rows = [
                {"of_bank_id": entry.bank_id, **{name: _plain(entry, name) for name in _CHANGING}}
                for entry in entries[start : start + BANKS_A_BATCH]
            ]
            with translated():
                async with self._writer.begin() as connection:
                    await connection.execute(_UPDATE, rows)


def _open(path: str) -> Catalog:
    upgrade(path)
    return Catalog(path)


async def _drop(connection: AsyncConnection, bank_ids: Sequence[str]) -> None:
    found = (await connection.execute(_NUMBERS, {"bank_ids": bank_ids})).scalars().all()
    if found:
        await connection.execute(_DROP_HASHES, {"bank_nos": found})
        await connection.execute(_DROP_BANKS, {"bank_nos": found})


async def _insert(
    connection: AsyncConnection, added: Sequence[tuple[Entry, Sequence[Mark]]]
) -> None:
    last = (await connection.execute(_LAST_NUMBER)).scalar_one() or 0
    numbered = list(enumerate(added, start=last + 1))
    columns = [column.name for column in _COLUMNS]
    await connection.execute(
        insert(banks),
        [
            {"bank_no": bank_no, **{name: _plain(entry, name) for name in columns}}
            for bank_no, (entry, _) in numbered
        ],
    )
    found = [
        {"digest": mark.digest, "bank_no": bank_no, "position": mark.position}
        for bank_no, (_, marks) in numbered
        for mark in marks
    ]
    if found:
        await connection.execute(insert(hashes), found)


def _plain(entry: Entry, name: str) -> Any:
    """One field of an entry as its column holds it."""
    if name == "record_kinds":
        return " ".join(entry.record_kinds)
    if name == "windows":
        return _numbers(position for pair in entry.windows.pairs for position in pair)
    if name == "tails":
        return _numbers(entry.tails)
    value = getattr(entry, name)
    return int(value) if isinstance(value, bool | Trust) else value


def _numbers(values: Iterable[int]) -> bytes:
    return np.fromiter(values, dtype="<u4").tobytes()


def _positions(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype="<u4").tolist()) if data else ()


@lru_cache(maxsize=64)
def _kinds(words: str) -> tuple[RecordKind, ...]:
    return tuple(RecordKind(kind) for kind in words.split())


@lru_cache(maxsize=1 << 12)
def _windows(data: bytes) -> Spans:
    edges = _positions(data)
    return Spans(tuple(zip(edges[::2], edges[1::2], strict=True)))


def _entries(rows: Iterable[Row[Any]]) -> list[Entry]:
    """The entries of rows. Raises ValueError or TypeError for one that nothing here wrote.

    A hundred thousand of them are read at a start, so equal ids and namespaces are kept once.
    """
    ids: dict[str, str] = {"": ""}
    spaces: dict[bytes, bytes] = {}
    return [_entry(row, ids, spaces) for row in rows]


def _entry(row: Row[Any], ids: dict[str, str], spaces: dict[bytes, bytes]) -> Entry:
    bank_id, space, parent_id, base, frontier, head, windows, tails, size_bytes, *rest = tuple(row)
    reason, kinds, hidden_tokens, trust, hits, pinned, hidden, *times = rest
    created_at, last_used_at, verified_at, ttl_seconds = times
    well_formed = (
        is_bank_id(bank_id)
        and (parent_id == "" or is_bank_id(parent_id))
        and isinstance(space, bytes)
        and len(space) == 32
        and 0 <= base <= frontier
        and (base == 0) == (parent_id == "")
        and parent_id != bank_id
        and size_bytes > 0
        and hits >= 0
        and 0 <= trust <= _ALL_FLAGS
        and trust & _NEEDED_FLAGS == _NEEDED_FLAGS
    )
    if not well_formed:
        raise ValueError(f"the row of bank {bank_id!r} is not possible")
    return Entry(
        bank_id=ids.setdefault(bank_id, bank_id),
        namespace=spaces.setdefault(space, space),
        parent_id=ids.setdefault(parent_id, parent_id),
        base=int(base),
        frontier=int(frontier),
        head=int(head),
        windows=_windows(windows),
        tails=_positions(tails),
        size_bytes=int(size_bytes),
        reason=PersistReason(reason),
        record_kinds=_kinds(kinds),
        hidden_tokens=int(hidden_tokens),
        trust=Trust(trust),
        created_at=float(created_at),
        last_used_at=float(last_used_at),
        hits=int(hits),
        pinned=bool(pinned),
        hidden=bool(hidden),
        verified_at=None if verified_at is None else float(verified_at),
        ttl_seconds=None if ttl_seconds is None else float(ttl_seconds),
    )
