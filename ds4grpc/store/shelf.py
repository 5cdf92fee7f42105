"""Keeps files, rows and the index in step: every way a bank comes, goes or changes.

Owns the order of the steps, what is evicted for room, and the leases. Knows no lookup and no rows
of state. Coroutines on the event loop, in tasks that the store owns; file work in worker threads.

    publish   temp file -> rename -> sync folder -> row -> index
    remove    index -> rename to .dead -> sync folder -> row -> unlink
    fault     flag -> index -> rename into quarantine/ -> row
    switch    temp files -> rename -> sync -> rows, all at once -> index -> old files, no more read

The index goes last when a bank comes and first when it goes, so nobody finds half a bank.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from ds4grpc.bank import Trust
from ds4grpc.errors import BankInUse, BankNotFound, BankPinned, StoreFailed, StoreFull
from ds4grpc.store.budget import Budget
from ds4grpc.store.condition import Condition
from ds4grpc.store.database import CatalogError
from ds4grpc.store.folder import Folder, FoundFile
from ds4grpc.store.index import Entry, Index, Move
from ds4grpc.store.keys import Mark
from ds4grpc.store.leases import Leases
from ds4grpc.store.observer import StoreObserver
from ds4grpc.store.rows import BankRows
from ds4grpc.store.tasks import Threads

log = logging.getLogger(__name__)

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
        self.version = 0
        self.observer = observer
        self.threads = threads
        self.condition = Condition()
        self.budget = Budget(folder, quota_bytes, self.run, lambda: self.index.num_bytes)
        self.rows = BankRows(
            folder, observer, self.changes, self.run, lambda bank_id: self.index.get(bank_id)
        )
        # (bank id, base, bytes) of files whose place others have taken, children first; they
        # count as other bytes until no lease needs them.
        self._retired: list[tuple[str, int, int]] = []

    @property
    def retired(self) -> tuple[tuple[str, int, int], ...]:
        """(bank id, base, bytes) of files that are here still and whose place others have taken."""
        return tuple(self._retired)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs short blocking work in a worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads.work, partial(work, *args, **kwargs))

    async def run_long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work that reads or writes a bank in a worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads.long, partial(work, *args, **kwargs))

    async def reserve(self, num_bytes: int) -> None:
        """Takes bytes out of the budget, evicting what is worth least; give them back with
        `unreserve` or `publish`.

        Never evicts a pinned or leased bank. Evicts nothing at all when that would
        not be enough. Raises StoreFull, OSError.
        """
        budget = self.budget
        async with self.changes, budget.locked():
            await budget.measure()
            await budget.measure_foreign()
            if budget.over(num_bytes) > 0 and budget.quarantine_bytes:
                await self.run(self.folder.trim_quarantine, 0)
                await budget.measure()
            if budget.over(num_bytes) > 0:
                await self._evict(budget.over(num_bytes))
            await budget.take(num_bytes)

    def unreserve(self, num_bytes: int) -> None:
        self.budget.give_back(num_bytes)

    async def make_room(self, num_bytes: int) -> None:
        """Evicts that many bytes, or what can be. Raises StoreFull when files cannot be removed."""
        async with self.changes:
            free = self.index.num_bytes - self.index.protected_bytes(self.leases.held())
            await self._evict(min(num_bytes, free))

    async def fit(self) -> None:
        """Comes down to the cap, or as near as can be. Raises StoreFull, OSError."""
        await self.budget.measure()
        if self.budget.over(0) > 0:
            await self.run(self.folder.trim_quarantine, 0)
            await self.budget.measure()
            await self.make_room(self.budget.over(0))
        if self.budget.disk_bytes > self.budget.quota_bytes:
            log.warning(
                "bank folder over its cap bytes=%d cap_bytes=%d",
                self.budget.disk_bytes,
                self.budget.quota_bytes,
            )

    async def _evict(self, num_bytes: int) -> None:
        """`changes` must be held. Raises StoreFull when no victims are enough."""
        kept = self.leases.held()
        free = self.index.num_bytes - self.index.protected_bytes(kept)
        if free < num_bytes:
            raise StoreFull(
                f"the disk cap of {self.budget.quota_bytes} bytes has no room: {num_bytes} more "
                f"are needed, {free} can be evicted, other models and files have "
                f"{self.budget.foreign_bytes}; raise --kv-disk-space-mb or unpin banks",
                metadata={"quota_bytes": str(self.budget.quota_bytes)},
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
                await self.rows.add(entry, marks)
            except (OSError, CatalogError):
                # Without its row nobody would find it, and its bytes would count for nothing.
                if not await self.run(self._withdraw, *key):
                    self.budget.other_bytes += entry.size_bytes
                raise
            self.rows.keep(entry.bank_id)
            self.index.add(entry)
            self.unreserve(entry.size_bytes)
            self.version += 1

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
        await self.budget.measure()
        return self.budget.over(num_bytes) <= 0

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
                if move.bank_id in self.rows.waiting:
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
                await self.rows.ask("publish", self.rows.catalog.add(rows))
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
            await self.rows.forget(gone)

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
                self.budget.other_bytes += move.size_bytes

    def _retire(self, entry: Entry) -> None:
        self._retired.append((entry.bank_id, entry.base, entry.size_bytes))
        self.budget.other_bytes += entry.size_bytes

    async def retire_found(self, spare: Iterable[FoundFile]) -> None:
        """A scan of the folder has found these second files of banks. `changes` must be held."""
        self._retired = [
            (file.bank_id, file.base, file.size_bytes)
            for file in sorted(spare, key=lambda file: file.base, reverse=True)
        ]
        self.budget.other_bytes += sum(size_bytes for _, _, size_bytes in self._retired)
        await self._bury_retired()

    async def bury_retired(self) -> None:
        """Removes the files whose place others have taken, but for those that a lease needs."""
        if self._retired:
            async with self.changes:
                await self._bury_retired()

    def _retired_ids(self) -> set[str]:
        return {bank_id for bank_id, _, _ in self._retired}

    async def _bury_retired(self, marked: Collection[str] = ()) -> None:
        """`changes` must be held. The markers of banks that have gone go too, but for those of
        `marked`, which have a file still."""
        kept: list[tuple[str, int, int]] = []
        retired, self._retired = self._retired, kept
        for bank_id, base, size_bytes in retired:  # one after the other: children before parents
            entry = self.index.get(bank_id)
            if entry is not None and entry.base == base:
                self.budget.other_bytes -= size_bytes  # written anew meanwhile
            elif self.leases.needs(self.folder.bank_path(bank_id, base)):
                kept.append((bank_id, base, size_bytes))
            else:
                try:
                    dead, failed = await self.run(self.folder.kill, [(bank_id, base)])
                    keeps_markers = entry is not None or bank_id in marked
                    await self.run(self.folder.bury, dead, () if keeps_markers else (bank_id,))
                except OSError as error:
                    failed = [bank_id]
                    log.warning("bank file not removed bank=%s error=%s", bank_id, error)
                if failed:
                    kept.append((bank_id, base, size_bytes))
                else:
                    self.budget.other_bytes -= size_bytes

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
                await self.rows.ask("update", self.rows.catalog.update([entry]))
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
        gone_ids = {entry.bank_id for entry in gone}
        if gone_ids & self._retired_ids():  # or a start after a crash would take them for the banks
            await self._bury_retired(gone_ids)
        dead, failed = await self.run(self._kill, gone, gone_ids & self._retired_ids())
        for entry in reversed(gone):  # parents first
            if entry.bank_id in failed and (
                not entry.parent_id or self.index.get(entry.parent_id) is not None
            ):
                self.index.add(entry)
        removed = [entry for entry in gone if entry.bank_id not in failed]
        await self.rows.forget([entry.bank_id for entry in removed])
        try:
            await self.run(self.folder.bury, dead, [entry.bank_id for entry in removed])
        except OSError as error:
            self.budget.other_bytes += sum(entry.size_bytes for entry in removed)
            log.warning("removed bank files stay until the next start error=%s", error)
        return bool(failed)

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
                await self.budget.measure()
            except OSError as error:
                self.budget.other_bytes += sum(each.size_bytes for each in gone)
                log.warning("bank files not moved bank=%s error=%s", entry.bank_id, error)
            await self.rows.forget(each.bank_id for each in gone)

    def _kill(self, gone: Sequence[Entry], failed: set[str]) -> tuple[list[str], set[str]]:
        """Renames files as `Folder.kill` does, children for good before their parents: a loss of
        power must not leave one without the other. What a file that is still there needs stays,
        and so do those that have `failed` already."""
        dead: list[str] = []
        for group in _generations(gone):
            needed = {entry.parent_id for entry in gone if entry.bank_id in failed}
            failed |= {entry.bank_id for entry in group} & needed
            wanted = [(each.bank_id, each.base) for each in group if each.bank_id not in failed]
            group_dead, group_failed = self.folder.kill(wanted)
            dead += group_dead
            failed.update(group_failed)
        return dead, failed

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
                await self.rows.ask("update", self.rows.catalog.update([entry]))
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
                await self.rows.ask("update", self.rows.catalog.update([entry]))
            except CatalogError as error:
                if error.kind != "locked":
                    raise
                self.rows.note(bank_id)  # markers count, rows follow
            self.version += 1


def _generations(gone: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Children before parents, cut so that no group holds both."""
    group: list[Entry] = []
    needed: set[str] = set()
    for entry in gone:
        if entry.bank_id in needed:
            yield group
            group, needed = [], set()
        group.append(entry)
        needed.add(entry.parent_id)
    yield group
