"""The catalog's statements: each method is one short transaction or one SELECT.

Owns the queries over `tables`. Knows no files and no policy. Coroutines on the event loop, the
statements in aiosqlite's threads. Only tasks that the store owns may await them: a task that is
cancelled inside a write transaction leaves the file locked for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import RowMapping, bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ds4grpc.bank import PersistReason, RecordKind, Trust
from ds4grpc.layout import Spans
from ds4grpc.store.database import reader_engine, translated, upgrade, writer_engine
from ds4grpc.store.format import is_bank_id
from ds4grpc.store.index import Entry
from ds4grpc.store.keys import Mark
from ds4grpc.store.tables import banks, hashes

MAX_HITS = 10  # rows of one lookup: each fetched row fights for the interpreter
BANKS_A_BATCH = 200  # of one transaction, so that the write lock is never held for long


@dataclass(frozen=True, slots=True)
class Hit:
    """A bank that shares a prefix of at least `position` tokens, says the catalog."""

    bank_id: str
    position: int


_ALL_FLAGS = sum(Trust)
_DEEPEST = func.max(hashes.c.position)
_FIND = (
    select(banks.c.bank_id, _DEEPEST.label("position"))
    .join(banks, banks.c.bank_no == hashes.c.bank_no)
    .where(hashes.c.digest.in_(bindparam("digests", expanding=True)))
    .group_by(banks.c.bank_no)
    .order_by(_DEEPEST.desc(), banks.c.last_used_at.desc())
    .limit(MAX_HITS)
)
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
        self._writer: AsyncEngine = writer_engine(path)
        self._reader: AsyncEngine = reader_engine(path)

    @staticmethod
    async def open(path: str) -> Catalog:
        """Migrates the file, making it when it is not there."""
        return await asyncio.to_thread(_open, path)

    async def close(self) -> None:
        """Writes the log back into the file and removes it."""
        try:
            await self.checkpoint()
        finally:
            with translated():
                await self._writer.dispose()
                await self._reader.dispose()

    async def checkpoint(self) -> None:
        """Writes the log back into the file and cuts it to nothing, unless somebody reads."""
        with translated():
            async with self._reader.connect() as connection:
                await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    async def all(self) -> list[Entry]:
        """Every row. One that cannot be a bank counts as damage of the whole catalog."""
        with translated():
            async with self._reader.connect() as connection:
                rows = (await connection.execute(select(banks))).mappings().all()
            return [_entry(row) for row in rows]

    async def find(self, digests: Sequence[bytes]) -> list[Hit]:
        """The banks that share the longest prefixes, deepest first; at most ten."""
        if not digests:
            return []
        with translated():
            async with self._reader.connect() as connection:
                rows = (await connection.execute(_FIND, {"digests": digests})).all()
        return [Hit(row.bank_id, row.position) for row in rows]

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
    columns = [column.name for column in banks.c if column.name != "bank_no"]
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


def _positions(data: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(data, dtype="<u4")]


def _entry(row: RowMapping) -> Entry:
    """The entry of a row. Raises ValueError or TypeError for one that nothing here wrote."""
    edges = _positions(row["windows"])
    entry = Entry(
        bank_id=row["bank_id"],
        namespace=row["namespace"],
        parent_id=row["parent_id"],
        base=int(row["base"]),
        frontier=int(row["frontier"]),
        head=int(row["head"]),
        windows=Spans(tuple(zip(edges[::2], edges[1::2], strict=True))),
        tails=tuple(_positions(row["tails"])),
        size_bytes=int(row["size_bytes"]),
        reason=PersistReason(row["reason"]),
        record_kinds=tuple(RecordKind(kind) for kind in str(row["record_kinds"]).split()),
        hidden_tokens=int(row["hidden_tokens"]),
        trust=Trust(int(row["trust"])),
        created_at=float(row["created_at"]),
        last_used_at=float(row["last_used_at"]),
        hits=int(row["hits"]),
        pinned=bool(row["pinned"]),
        hidden=bool(row["hidden"]),
        verified_at=None if row["verified_at"] is None else float(row["verified_at"]),
        ttl_seconds=None if row["ttl_seconds"] is None else float(row["ttl_seconds"]),
    )
    well_formed = (
        is_bank_id(entry.bank_id)
        and (entry.parent_id == "" or is_bank_id(entry.parent_id))
        and isinstance(entry.namespace, bytes)
        and len(entry.namespace) == 32
        and 0 <= entry.base <= entry.frontier
        and (entry.base == 0) == (entry.parent_id == "")
        and entry.parent_id != entry.bank_id
        and entry.size_bytes > 0
        and entry.hits >= 0
        and 0 <= row["trust"] <= _ALL_FLAGS
        and Trust.COMMITTED | Trust.DURABLE in entry.trust
    )
    if not well_formed:
        raise ValueError(f"the row of bank {entry.bank_id!r} is not possible")
    return entry
