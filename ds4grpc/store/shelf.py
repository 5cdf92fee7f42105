"""Keeps files, rows and the index in step: every way a bank comes, goes or changes.

Owns the order of the steps, the disk budget and the leases. Knows no lookup and no rows of state.
Coroutines on the event loop, in tasks that the store owns; file work in worker threads.

    publish   temp file -> rename -> sync folder -> row -> index
    remove    index -> rename to .dead -> sync folder -> row -> unlink
    fault     flag -> index -> rename into quarantine/ -> row
    switch    temp files -> rename -> sync -> rows, all at once -> index -> old files, no more read

The index goes last when a bank comes and first when it goes, so nobody finds half a bank.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from ds4grpc.bank import Trust
from ds4grpc.errors import BankInUse, BankNotFound, BankPinned, StoreFailed, StoreFull
from ds4grpc.store.catalog import Catalog, Hit
from ds4grpc.store.condition import Condition
from ds4grpc.store.database import WAL_LIMIT_BYTES, WAL_MOST_BYTES, CatalogError
from ds4grpc.store.folder import Folder, FoundFile
from ds4grpc.store.index import Entry, Index, Move
from ds4grpc.store.keys import Mark
from ds4grpc.store.leases import Leases
from ds4grpc.store.observer import StoreObserver
from ds4grpc.store.tasks import Threads
from ds4grpc.store.waiting import WaitingRows

log = logging.getLogger(__name__)

# Kept free below the cap for what grows between two looks at it: the catalog and its log. At
# most a sixteenth of the cap, so that a small one is not all slack.
SLACK_BYTES = 2 << 20

P = ParamSpec("P")
T = TypeVar("T")


class Shelf:
    """The banks of one folder, as files, rows and entries.

    `changes` is held over every change of files and rows together; it is short. Methods take it
    themselves unless they say that it must be held.
    """

    def __init__(
        self, folder: Folder, quota_bytes: int, threads: Threads, observer: StoreObserver
    ) -> None:
        self.folder = folder
        self.index = Index()
        self.leases = Leases()
        self.changes = asyncio.Lock()
        self.quota_bytes = quota_bytes
        self.version = 0
        self.num_quarantined = 0
        self.other_bytes = 0  # of everything in the folder but banks, quarantine and catalog
        self.observer = observer
        self.threads = threads
        self.condition = Condition()
        self._catalog: Catalog | None = None
        self._catalog_bytes = 0
        self._foreign_bytes = 0  # of the other models' folders, and of files nobody knows of
        self._claimed_bytes = 0  # what their owners may still write
        self._quarantine_bytes = 0
        self._reserved_bytes = 0  # of temp files
        # (bank id, base, bytes) of files whose place others have taken, children first; they
        # count as other bytes until no lease needs them.
        self._retired: list[tuple[str, int, int]] = []
        self._is_log_long = False  # so long that hits and times wait
        self.is_catalog_damaged = False  # a statement has found it so
        self._waiting = WaitingRows()
        self._rowless: set[str] = set()  # gone banks whose rows could not be removed yet
        self._changed: set[str] = set()  # banks whose hits and times are newer than their rows

    @property
    def catalog(self) -> Catalog:
        assert self._catalog is not None
        return self._catalog

    @catalog.setter
    def catalog(self, catalog: Catalog) -> None:
        self._catalog = catalog

    @property
    def disk_bytes(self) -> int:
        """What the whole folder occupies, other models' parts and temp files included."""
        return (
            self.index.num_bytes
            + self.other_bytes
            + self.folder.new_bytes
            + self._catalog_bytes
            + self._foreign_bytes
            + self._quarantine_bytes
            + self._reserved_bytes
        )

    @property
    def retired(self) -> tuple[tuple[str, int, int], ...]:
        """(bank id, base, bytes) of files that are here still and whose place others have taken."""
        return tuple(self._retired)

    @property
    def _slack_bytes(self) -> int:
        return min(SLACK_BYTES, self.quota_bytes // 16)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs short blocking work in a worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads.work, partial(work, *args, **kwargs))

    async def run_long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work that reads or writes a bank in a worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads.long, partial(work, *args, **kwargs))

    async def ask(self, op: str, statement: Awaitable[T]) -> T:
        """Awaits a catalog statement and reports its time or its failure."""
        started = time.monotonic()
        try:
            return await statement
        except CatalogError as error:
            self.observer.catalog_error(error.kind)
            self.is_catalog_damaged |= error.kind == "corrupt"
            raise
        finally:
            self.observer.catalog(op, time.monotonic() - started)

    async def find(self, digests: Callable[[], Sequence[bytes]]) -> list[Hit]:
        """The banks that share the longest prefixes: see `Catalog.find`. Raises CatalogError."""
        asked: list[bytes] = []

        def noted() -> Sequence[bytes]:
            asked.extend(digests())
            return asked

        hits = await self.ask("lookup", self.catalog.find(noted))
        return [*self._waiting.find(asked), *hits] if self._waiting else hits

    async def measure(self) -> None:
        """Looks again at what grows by itself: catalog and quarantine. Raises OSError."""
        self._catalog_bytes = await self.run(self.folder.catalog_bytes)
        quarantined = await self.run(self.folder.quarantined)
        self.num_quarantined = len(quarantined)
        self._quarantine_bytes = sum(seen.size_on_disk_bytes for seen in quarantined)

    async def trim_log(self) -> None:
        """Writes the catalog's log back when an outside reader has let it grow; while that goes
        on, hits and times are not written. Raises OSError, CatalogError."""
        await self.measure()
        log_bytes = await self.run(self.folder.log_bytes)
        if log_bytes > WAL_LIMIT_BYTES:
            await self.ask("update", self.catalog.checkpoint())
            log_bytes = await self.run(self.folder.log_bytes)
        if log_bytes > WAL_MOST_BYTES and not self._is_log_long:
            log.warning("somebody's long read of the catalog keeps its log bytes=%d", log_bytes)
        self._is_log_long = log_bytes > WAL_MOST_BYTES

    async def measure_foreign(self) -> None:
        """Looks again at the other models' folders. Raises OSError."""
        measured = await self.run(self.folder.foreign_bytes)
        self._foreign_bytes, self._claimed_bytes = measured

    async def reserve(self, num_bytes: int) -> None:
        """Takes bytes out of the budget, evicting what is worth least; give them back with
        `unreserve` or `publish`.

        Never evicts a pinned or leased bank. Evicts nothing at all when that would
        not be enough. Raises StoreFull, OSError.
        """
        async with self.changes, self._cap():
            await self.measure()
            await self.measure_foreign()
            if self._over(num_bytes) > 0 and self._quarantine_bytes:
                await self.run(self.folder.trim_quarantine, 0)
                await self.measure()
            if self._over(num_bytes) > 0:
                await self._evict(self._over(num_bytes))
            self._reserved_bytes += num_bytes
            try:
                await self.claim()
            except OSError:
                self._reserved_bytes -= num_bytes
                raise

    def _over(self, num_bytes: int) -> int:
        """By how much the cap would be passed with so much more."""
        due = self.disk_bytes + self._claimed_bytes + self._slack_bytes + num_bytes
        return due - self.quota_bytes

    @asynccontextmanager
    async def _cap(self) -> AsyncIterator[None]:
        """The room below the cap is this process's to take. Raises OSError."""
        cap = self.folder.cap_lock()
        await self.run(cap.__enter__)
        try:
            yield
        finally:
            cap.__exit__(None, None, None)

    async def claim(self) -> None:
        """Lets the other models' servers know what is still to be written. Raises OSError."""
        await self.run(self.folder.claim, self._reserved_bytes + self._slack_bytes)

    async def probe(self) -> None:
        """Writes a little where banks and rows go; a lock that somebody holds is no trouble while
        rows may wait. Raises OSError, CatalogError."""
        await self.run(self.folder.probe)
        try:
            await self.ask("update", self.catalog.probe())
            await self._write_waiting()  # or the next row would find no place to wait
        except CatalogError as error:
            if error.kind != "locked" or self._waiting.is_full:
                raise

    async def make_room(self, num_bytes: int) -> None:
        """Evicts that many bytes, or what can be. Raises StoreFull when files cannot be removed."""
        async with self.changes:
            free = self.index.num_bytes - self.index.protected_bytes(self.leases.held())
            await self._evict(min(num_bytes, free))

    async def fit(self) -> None:
        """Comes down to the cap, or as near as can be. Raises StoreFull, OSError."""
        await self.measure()
        if self._over(0) > 0:
            await self.run(self.folder.trim_quarantine, 0)
            await self.measure()
            await self.make_room(self._over(0))
        if self.disk_bytes > self.quota_bytes:
            log.warning(
                "bank folder over its cap bytes=%d cap_bytes=%d", self.disk_bytes, self.quota_bytes
            )

    async def _evict(self, num_bytes: int) -> None:
        """`changes` must be held. Raises StoreFull when no victims are enough."""
        kept = self.leases.held()
        free = self.index.num_bytes - self.index.protected_bytes(kept)
        if free < num_bytes:
            raise StoreFull(
                f"the disk cap of {self.quota_bytes} bytes has no room: {num_bytes} more are "
                f"needed, {free} can be evicted, other models and files have "
                f"{self._foreign_bytes}; raise --kv-disk-space-mb or unpin banks",
                metadata={"quota_bytes": str(self.quota_bytes)},
            )
        victims: list[Entry] = []
        freed = 0
        while freed < num_bytes and (victim := self.index.pop_victim(kept)) is not None:
            victims.append(victim)
            freed += victim.size_bytes
        for victim in victims:
            reason = "superseded" if victim.superseded or victim.hidden else "lru"
            self.observer.evicted(reason)
            log.info(
                "bank evicted bank=%s tokens=%d bytes=%d hits=%d reason=%s",
                *(victim.bank_id, victim.frontier, victim.size_bytes, victim.hits, reason),
            )
        if await self._bury(victims):
            raise StoreFull("evicted files could not be removed; nothing more is written")

    def unreserve(self, num_bytes: int) -> None:
        self._reserved_bytes -= num_bytes

    async def publish(self, entry: Entry, marks: Sequence[Mark]) -> None:
        """Makes a written temp file of `entry.size_bytes` (reserved) a bank.

        Raises OSError, CatalogError, and StoreFailed when the parent has gone; then the temp file
        is gone too.
        """
        key = (entry.bank_id, entry.base)
        async with self.changes:
            parent = self.index.get(entry.parent_id) if entry.parent_id else None
            if entry.parent_id and (parent is None or Trust.QUARANTINED in parent.trust):
                await self.run(self.folder.discard, *key)
                raise StoreFailed("the parent bank has gone")
            try:
                await self.run(self.folder.publish, *key, pinned=entry.pinned)
                await self._add_row(entry, marks)
            except (OSError, CatalogError):
                # Without its row nobody would find it, and its bytes would count for nothing.
                if not await self.run(self._withdraw, *key):
                    self.other_bytes += entry.size_bytes
                raise
            self._rowless.discard(entry.bank_id)
            self.index.add(entry)
            self.unreserve(entry.size_bytes)
            self.version += 1

    async def _add_row(self, entry: Entry, marks: Sequence[Mark]) -> None:
        """Writes a row, or keeps it for later while somebody holds the catalog's lock: only the
        first waits to learn that. Raises CatalogError."""
        if not self._waiting:
            try:
                await self.ask("publish", self.catalog.add([(entry, marks)]))
                return
            except CatalogError as error:
                if error.kind != "locked":
                    raise
                log.warning("another process holds the catalog; rows wait error=%s", error)
        if self._waiting.is_full:
            raise CatalogError(
                f"another process holds the catalog, and {len(self._waiting)} rows wait already",
                "locked",
            )
        self._waiting.put(entry, marks)

    async def _write_waiting(self) -> None:
        """Writes the rows that had to wait; `changes` is not held, as this may take long. Raises
        CatalogError: then they go on waiting."""
        rows = self._waiting.all()
        if not rows:
            return
        await self.ask("publish", self.catalog.add(rows))
        self._waiting.written(rows)
        log.info("rows written that had to wait rows=%d", len(rows))
        gone = [entry.bank_id for entry, _ in rows if self.index.get(entry.bank_id) is None]
        if gone:
            async with self.changes:
                await self._forget_rows(gone)

    def _withdraw(self, bank_id: str, base: int) -> bool:
        """Undoes a half-done publish; False when the disk does not let us, then the next start
        does."""
        try:
            self.folder.discard(bank_id, base)
            dead, failed = self.folder.kill([(bank_id, base)])
            self.folder.bury(dead, [bank_id])
        except OSError as error:
            log.warning("bank file not removed bank=%s error=%s", bank_id, error)
            return False
        return not failed

    async def has_room(self, num_bytes: int) -> bool:
        """Whether so much fits below the cap as things are. Raises OSError."""
        await self.measure()
        return self._over(num_bytes) <= 0

    async def switch(self, moves: Sequence[tuple[Move, Sequence[Mark]]], gone: list[str]) -> None:
        """Makes written temp files (their bytes reserved) the files of banks that have others.

        The first of them is the new parent of the others, which one bank each has needed until
        now; so have the hidden ones in `gone`, which nobody needs then. Both go from newest to
        oldest. All or none: one transaction. No bank may be being written.
        Raises StoreFailed when a bank has changed meanwhile, OSError, CatalogError.
        """
        async with self.changes:
            held = self.leases.held()
            entries: list[Entry] = []
            for move, _ in moves:
                entry = self.index.get(move.bank_id)
                if entry is None or entry.base != move.old_base or Trust.QUARANTINED in entry.trust:
                    raise StoreFailed(f"bank {move.bank_id} has changed meanwhile")
                if move.bank_id in self._waiting:
                    raise StoreFailed(f"the row of bank {move.bank_id} is still to be written")
                if entries and len(entry.children) != 1:
                    raise StoreFailed(f"another bank has begun to need bank {move.bank_id}")
                entries.append(entry)
            unwanted = [entry for bank_id in gone if (entry := self.index.get(bank_id)) is not None]
            for entry in unwanted:
                if not entry.hidden or len(entry.children) != 1 or entry.bank_id in held:
                    raise StoreFailed(f"bank {entry.bank_id} is wanted again")
            try:
                for move, _ in moves:
                    await self.run(self.folder.replace, move.bank_id, move.base)
                rows = [
                    (move.applied_to(entry), marks)
                    for entry, (move, marks) in zip(entries, moves, strict=True)
                ]
                await self.ask("publish", self.catalog.add(rows))
            except (OSError, CatalogError):
                await self.run(self._take_back, [move for move, _ in moves])
                raise
            self.version += 1
            for entry, (move, _) in zip(entries, moves, strict=True):
                self._retire(entry)
                self.index.move(entry, move)
                self.unreserve(move.size_bytes)
            for entry in unwanted:  # from newest to oldest, so none has a child left
                self._retire(entry)
                self.index.remove(entry)
            await self._forget_rows(gone)

    def _take_back(self, moves: Iterable[Move]) -> None:
        """Undoes a half-done switch; what the disk keeps, the next start removes."""
        for move in moves:
            try:
                self.folder.discard(move.bank_id, move.base)
                dead, failed = self.folder.kill([(move.bank_id, move.base)])
                self.folder.bury(dead, ())
            except OSError as error:
                failed = [move.bank_id]
                log.warning("bank file not removed bank=%s error=%s", move.bank_id, error)
            if failed:
                self.other_bytes += move.size_bytes

    def _retire(self, entry: Entry) -> None:
        self._retired.append((entry.bank_id, entry.base, entry.size_bytes))
        self.other_bytes += entry.size_bytes

    async def retire_found(self, spare: Iterable[FoundFile]) -> None:
        """A scan of the folder has found these second files of banks. `changes` must be held."""
        self._retired = [
            (file.bank_id, file.base, file.size_bytes)
            for file in sorted(spare, key=lambda file: file.base, reverse=True)
        ]
        self.other_bytes += sum(size_bytes for _, _, size_bytes in self._retired)
        await self._bury_retired()

    async def bury_retired(self) -> None:
        """Removes the files whose place others have taken, but for those that a lease needs."""
        if self._retired:
            async with self.changes:
                await self._bury_retired()

    async def _bury_retired(self) -> None:
        """`changes` must be held."""
        kept: list[tuple[str, int, int]] = []
        retired, self._retired = self._retired, kept
        for bank_id, base, size_bytes in retired:  # one after the other: children before parents
            entry = self.index.get(bank_id)
            if entry is not None and entry.base == base:
                self.other_bytes -= size_bytes  # written anew meanwhile
            elif self.leases.needs(self.folder.bank_path(bank_id, base)):
                kept.append((bank_id, base, size_bytes))
            else:
                try:
                    dead, failed = await self.run(self.folder.kill, [(bank_id, base)])
                    await self.run(self.folder.bury, dead, () if entry is not None else (bank_id,))
                except OSError as error:
                    failed = [bank_id]
                    log.warning("bank file not removed bank=%s error=%s", bank_id, error)
                if failed:
                    kept.append((bank_id, base, size_bytes))
                else:
                    self.other_bytes -= size_bytes

    async def delete(self, bank_id: str) -> int:
        """Removes a bank, or hides it while children need its rows; returns the bytes freed.

        Raises BankNotFound, BankPinned, BankInUse, StoreFailed.
        """
        async with self.changes:
            current = self.index.get(bank_id)
            if current is None or current.hidden:
                raise BankNotFound(f"bank {bank_id} has just been deleted")
            if current.pinned:
                raise BankPinned(f"bank {bank_id} is pinned; `ds4grpc banks unpin` it first")
            if bank_id in self.leases.held():
                raise BankInUse(
                    f"bank {bank_id} is in use by a generation or an export; cancel that, or retry"
                    " later"
                )
            return await self._drop(current)

    async def expire(self, now: float) -> None:
        """Removes the banks whose time to live is over, and those hidden ones that nobody needs."""
        async with self.changes:
            held = self.leases.held()
            for bank_id in list(self.index.mortal):
                entry = self.index.get(bank_id)
                if entry is None or entry.hidden or bank_id in held:
                    continue
                if entry.is_expired(now):
                    self.observer.evicted("expired")
                    await self._drop(entry)
            if self.index.num_hidden:
                await self._bury(self._unneeded(self.index.hidden()))

    async def _drop(self, entry: Entry) -> int:
        """Removes or hides; returns the bytes freed. `changes` must be held."""
        self.version += 1
        if entry.children:
            self.index.set_hidden(entry, hidden=True)
            try:
                await self.run(self.folder.hide, entry.bank_id)
                await self.ask("update", self.catalog.update([entry]))
            except (OSError, CatalogError) as error:
                raise StoreFailed(f"bank {entry.bank_id} could not be deleted: {error}") from error
            return 0
        parent = self.index.get(entry.parent_id)
        self.index.remove(entry)
        gone = [entry, *self._unneeded([parent] if parent is not None else [])]
        if await self._bury(gone):
            raise StoreFailed(f"the files of bank {entry.bank_id} could not be removed")
        return sum(each.size_bytes for each in gone)

    def _unneeded(self, candidates: Iterable[Entry]) -> list[Entry]:
        """Takes hidden banks without children out of the index, and then their parents too."""
        held = self.leases.held()
        gone: list[Entry] = []
        for candidate in candidates:
            at: Entry | None = candidate
            while at is not None and at.hidden and not at.children and at.bank_id not in held:
                parent = self.index.get(at.parent_id)
                if self.index.get(at.bank_id) is at:
                    self.index.remove(at)
                    gone.append(at)
                at = parent
        return gone

    async def _bury(self, gone: Sequence[Entry]) -> bool:
        """Removes files and rows of entries that are out of the index, children before parents.

        `changes` must be held. Whose file cannot be renamed comes back into the index; returns
        whether any did.
        """
        if not gone:
            return False
        self.version += 1
        dead, failed = await self.run(
            self.folder.kill, [(entry.bank_id, entry.base) for entry in gone]
        )
        for entry in reversed(gone):  # parents first
            if entry.bank_id in failed and (
                not entry.parent_id or self.index.get(entry.parent_id) is not None
            ):
                self.index.add(entry)
        removed = [entry for entry in gone if entry.bank_id not in failed]
        await self._forget_rows([entry.bank_id for entry in removed])
        try:
            await self.run(self.folder.bury, dead, [entry.bank_id for entry in removed])
        except OSError as error:
            self.other_bytes += sum(entry.size_bytes for entry in removed)
            log.warning("removed bank files stay until the next start error=%s", error)
        return bool(failed)

    async def _forget_rows(self, bank_ids: Iterable[str]) -> None:
        """Removes rows, also those that could not be removed before. Rows alone do no harm."""
        self._rowless.update(bank_ids)
        self._waiting.forget(self._rowless)
        self._changed -= self._rowless
        if not self._rowless:
            return
        try:
            await self.ask("delete", self.catalog.remove(sorted(self._rowless)))
        except CatalogError as error:
            log.warning("rows of removed banks stay for now error=%s", error)
        else:
            self._rowless.clear()

    async def quarantine(self, bank_id: str, detail: str) -> None:
        """Takes a bank that failed a check out of service, with all that need its rows; one that
        is not there any more is no error."""
        entry = self.index.get(bank_id)
        for each in self.index.descendants(entry) if entry is not None else ():
            each.trust |= Trust.QUARANTINED  # from now on no lookup offers them
        self.version += 1
        async with self.changes:
            entry = self.index.get(bank_id)
            if entry is None:
                return
            gone = self.index.descendants(entry)
            for each in reversed(gone):
                self.index.remove(each)
            log.warning(
                "bank quarantined bank=%s tokens=%d dependents=%d detail=%s",
                *(entry.bank_id, entry.frontier, len(gone) - 1, detail),
            )
            try:
                paths = [self.folder.bank_path(each.bank_id, each.base) for each in gone]
                await self.run(self.folder.quarantine, paths)
                await self.run(self.folder.bury, [], [each.bank_id for each in gone])
                await self.measure()
            except OSError as error:
                self.other_bytes += sum(each.size_bytes for each in gone)
                log.warning("bank files not moved bank=%s error=%s", entry.bank_id, error)
            await self._forget_rows(each.bank_id for each in gone)

    async def set_pinned(self, bank_id: str, *, pinned: bool) -> Entry:
        """Pins or unpins; doing it twice is no error. Raises BankNotFound, StoreFailed."""
        async with self.changes:
            entry = self.index.get(bank_id)
            if entry is None or entry.hidden:
                raise BankNotFound(f"bank {bank_id} has just been deleted")
            if entry.pinned == pinned:
                return entry
            self.index.set_pinned(entry, pinned=pinned)
            try:
                await self.run(self.folder.pin if pinned else self.folder.unpin, entry.bank_id)
                await self.ask("update", self.catalog.update([entry]))
            except (OSError, CatalogError) as error:
                self.index.set_pinned(entry, pinned=not pinned)
                raise StoreFailed(f"the pin could not be changed: {error}") from error
            return entry

    async def revive(self, bank_id: str, now: float) -> None:
        """A bank that was deleted or has expired is wanted again.

        Raises StoreFailed when it has gone, OSError, CatalogError.
        """
        async with self.changes:
            entry = self.index.get(bank_id)
            if entry is None:
                raise StoreFailed(f"bank {bank_id} has just been removed")
            entry.last_used_at = now
            if entry.hidden:
                await self.run(self.folder.unhide, entry.bank_id)
                self.index.set_hidden(entry, hidden=False)
            try:
                await self.ask("update", self.catalog.update([entry]))
            except CatalogError as error:
                if error.kind != "locked":
                    raise
                self.note(bank_id)  # markers count, rows follow
            self.version += 1

    def note(self, bank_id: str) -> None:
        """Its row is to be written again, some time soon."""
        self._changed.add(bank_id)

    async def flush(self) -> None:
        """Writes the rows of noted entries. What fails is tried again at the next flush."""
        try:
            await self._write_waiting()
        except CatalogError as error:
            log.warning("rows go on waiting rows=%d error=%s", len(self._waiting), error)
            return
        if self._rowless:
            async with self.changes:
                await self._forget_rows(())
        if self._is_log_long:
            return
        noted, self._changed = self._changed, set()
        entries = [entry for bank_id in noted if (entry := self.index.get(bank_id)) is not None]
        if not entries:
            return
        try:
            await self.ask("update", self.catalog.update(entries))
        except CatalogError as error:
            self._changed |= noted
            log.warning("hits and times not written banks=%d error=%s", len(entries), error)
