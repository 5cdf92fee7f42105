"""The rows of the banks of one folder: asked for, written, and put off while that cannot be.

Owns what is still to be written to the catalog. Decides nothing: files come and go on the shelf,
and rows follow. Event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from ds4grpc.store.catalog import Catalog, Hit
from ds4grpc.store.database import WAL_LIMIT_BYTES, WAL_MOST_BYTES, CatalogError
from ds4grpc.store.folder import Folder
from ds4grpc.store.index import Entry
from ds4grpc.store.keys import Mark
from ds4grpc.store.observer import StoreObserver
from ds4grpc.store.tasks import Run
from ds4grpc.store.waiting import WaitingRows

log = logging.getLogger(__name__)

T = TypeVar("T")


class BankRows:
    """The catalog, and what it does not hold yet. `changes` is the shelf's lock, `entry_of` tells
    which banks are in service."""

    def __init__(
        self,
        folder: Folder,
        observer: StoreObserver,
        changes: asyncio.Lock,
        run: Run,
        entry_of: Callable[[str], Entry | None],
    ) -> None:
        self.is_damaged = False  # a statement has found the catalog so
        self.waiting = WaitingRows()
        self._folder = folder
        self._observer = observer
        self._changes = changes
        self._run = run
        self._entry_of = entry_of
        self._catalog: Catalog | None = None
        self._is_log_long = False  # so long that hits and times wait
        self._rowless: set[str] = set()  # gone banks whose rows could not be removed yet
        self._changed: set[str] = set()  # banks whose hits and times are newer than their rows

    @property
    def catalog(self) -> Catalog:
        assert self._catalog is not None
        return self._catalog

    @catalog.setter
    def catalog(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def ask(self, op: str, statement: Awaitable[T]) -> T:
        """Awaits a catalog statement and reports its time or its failure."""
        started = time.monotonic()
        try:
            return await statement
        except CatalogError as error:
            self._observer.catalog_error(error.kind)
            self.is_damaged |= error.kind == "corrupt"
            raise
        finally:
            self._observer.catalog(op, time.monotonic() - started)

    async def find(self, digests: Callable[[], Sequence[bytes]]) -> list[Hit]:
        """The banks that share the longest prefixes: see `Catalog.find`. Raises CatalogError."""
        asked: list[bytes] = []

        def noted() -> Sequence[bytes]:
            asked.extend(digests())
            return asked

        hits = await self.ask("lookup", self.catalog.find(noted))
        return [*self.waiting.find(asked), *hits] if self.waiting else hits

    async def add(self, entry: Entry, marks: Sequence[Mark]) -> None:
        """Writes a row, or keeps it for later while somebody holds the catalog's lock: only the
        first waits to learn that. Raises CatalogError."""
        if not self.waiting:
            try:
                await self.ask("publish", self.catalog.add([(entry, marks)]))
                return
            except CatalogError as error:
                if error.kind != "locked":
                    raise
                log.warning("another process holds the catalog; rows wait error=%s", error)
        if self.waiting.is_full:
            raise CatalogError(
                f"another process holds the catalog, and {len(self.waiting)} rows wait already",
                "locked",
            )
        self.waiting.put(entry, marks)

    def keep(self, bank_id: str) -> None:
        """It is in service again: its row stays."""
        self._rowless.discard(bank_id)

    async def forget(self, bank_ids: Iterable[str]) -> None:
        """Removes rows, also those that could not be removed before. Rows alone do no harm."""
        self._rowless.update(bank_ids)
        self.waiting.forget(self._rowless)
        self._changed -= self._rowless
        if not self._rowless:
            return
        try:
            await self.ask("delete", self.catalog.remove(sorted(self._rowless)))
        except CatalogError as error:
            log.warning("rows of removed banks stay for now error=%s", error)
        else:
            self._rowless.clear()

    def note(self, bank_id: str) -> None:
        """Its row is to be written again, some time soon."""
        self._changed.add(bank_id)

    async def probe(self) -> None:
        """Writes what changes nothing, and what waits; a lock that somebody holds is no trouble
        while rows may wait. Raises CatalogError."""
        try:
            await self.ask("update", self.catalog.probe())
            await self._write_waiting()  # or the next row would find no place to wait
        except CatalogError as error:
            if error.kind != "locked" or self.waiting.is_full:
                raise

    async def trim_log(self) -> None:
        """Writes the catalog's log back when an outside reader has let it grow; while that goes
        on, hits and times are not written. Raises OSError, CatalogError."""
        log_bytes = await self._run(self._folder.log_bytes)
        if log_bytes > WAL_LIMIT_BYTES:
            await self.ask("update", self.catalog.checkpoint())
            log_bytes = await self._run(self._folder.log_bytes)
        if log_bytes > WAL_MOST_BYTES and not self._is_log_long:
            log.warning("somebody's long read of the catalog keeps its log bytes=%d", log_bytes)
        self._is_log_long = log_bytes > WAL_MOST_BYTES

    async def flush(self) -> None:
        """Writes the rows of noted entries. What fails is tried again at the next flush."""
        try:
            await self._write_waiting()
        except CatalogError as error:
            log.warning("rows go on waiting rows=%d error=%s", len(self.waiting), error)
            return
        if self._rowless:
            async with self._changes:
                await self.forget(())
        if self._is_log_long:
            return
        noted, self._changed = self._changed, set()
        entries = [entry for bank_id in noted if (entry := self._entry_of(bank_id)) is not None]
        if not entries:
            return
        try:
            await self.ask("update", self.catalog.update(entries))
        except CatalogError as error:
            self._changed |= noted
            log.warning("hits and times not written banks=%d error=%s", len(entries), error)

    async def _write_waiting(self) -> None:
        """Writes the rows that had to wait; the lock is not held, as this may take long. Raises
        CatalogError: then they go on waiting."""
        rows = self.waiting.all()
        if not rows:
            return
        await self.ask("publish", self.catalog.add(rows))
        self.waiting.written(rows)
        log.info("rows written that had to wait rows=%d", len(rows))
        gone = [entry.bank_id for entry, _ in rows if self._entry_of(entry.bank_id) is None]
        if gone:
            async with self._changes:
                await self.forget(gone)
