"""The store: banks on disk, found again after a restart (`engine.banks.BankStore`).

Owns the lifetimes: folder lock, catalog, threads, upkeep; and the admin's view of banks. Knows no
engine and no gRPC. Coroutines on the event loop; nothing here computes or waits on disk in it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ds4grpc.bank import PersistReason, RecordKind, Trust
from ds4grpc.engine.banks import BankSource, MatchQuery, Persisted
from ds4grpc.errors import BankCorrupt, BankNotFound, StoreDisabled, StoreFailed, StoreFull
from ds4grpc.layout import StateLayout
from ds4grpc.store.catalog import Catalog
from ds4grpc.store.compact import Compactor
from ds4grpc.store.content import FileContent
from ds4grpc.store.database import CatalogError
from ds4grpc.store.delta import DeltaWriter
from ds4grpc.store.files import Files
from ds4grpc.store.folder import Folder
from ds4grpc.store.format import StateForm
from ds4grpc.store.garbage import Piece, collect
from ds4grpc.store.index import Entry
from ds4grpc.store.inspect import Inspected, chain_of, header_and_content
from ds4grpc.store.match import Finder, LeasedBank
from ds4grpc.store.observer import StoreObserver
from ds4grpc.store.pace import Pace
from ds4grpc.store.reader import BankFile
from ds4grpc.store.reconcile import Reconciled, copies, reconcile
from ds4grpc.store.shelf import Shelf
from ds4grpc.store.tasks import OwnedTasks, Threads
from ds4grpc.store.transfer import Transfer

T = TypeVar("T")

log = logging.getLogger(__name__)

UPKEEP_SECONDS = 2.0  # hits and times reach the catalog this late; banks expire this late
FOREIGN_SECONDS = 60.0  # how often other models' folders are measured


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """`folder` is shared by all models; `fingerprint` names the one that runs, 32 bytes."""

    folder: str
    fingerprint: bytes
    layout: StateLayout
    quota_bytes: int
    min_tokens: int = 512
    write_bytes_per_second: float | None = None  # of banks and compaction, on average
    vocabulary_size: int = 1 << 32  # of the model: other ids are in no bank


@dataclass(frozen=True, slots=True)
class BankInfo:
    """One stored bank as admin calls show it. Times are seconds since 1970."""

    bank_id: str
    namespace: bytes
    parent_id: str
    base: int
    frontier: int
    size_bytes: int
    trust: Trust
    pinned: bool
    hits: int
    created_at: float
    last_used_at: float
    verified_at: float | None
    ttl_seconds: float | None
    reason: PersistReason
    record_kinds: tuple[RecordKind, ...]
    hidden_tokens: int


@dataclass(frozen=True, slots=True)
class Deleted:
    """`hidden`: the file stays until no other bank needs its rows."""

    freed_bytes: int
    hidden: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verifying one bank found; `done` of `total` banks are through."""

    bank_id: str
    ok: bool
    detail: str
    read_bytes: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Storage:
    """The disk tier at a glance."""

    folder: str
    fingerprint: str
    disk_bytes: int
    quota_bytes: int
    free_bytes: int
    num_stored: int
    num_pinned: int
    num_quarantined: int


class Store:
    """Use as `async with Store(config, observer) as store`.

    Entering raises StoreDisabled with the reason when the folder cannot be used or another
    process owns it.
    """

    def __init__(
        self, config: StoreConfig, observer: StoreObserver, files: Files | None = None
    ) -> None:
        self._config = config
        self._form = StateForm(config.fingerprint, config.layout, config.vocabulary_size)
        self._folder = Folder(files or Files(), config.folder, config.fingerprint)
        self._observer = observer
        self._tasks = OwnedTasks()
        self._closing = asyncio.Event()
        self._lifetime = AsyncExitStack()

    async def __aenter__(self) -> Store:
        async with AsyncExitStack() as opening:
            threads = Threads()
            opening.push_async_callback(threads.stop)
            self._shelf = Shelf(self._folder, self._config.quota_bytes, threads, self._observer)
            opening.push_async_callback(asyncio.to_thread, self._folder.close)
            await self._shelf.run(self._folder.open)
            with _nothing_collected():
                await self._tasks.finish(self._open_catalog())
            opening.push_async_callback(self._close_catalog)
            try:
                await self._shelf.budget.claim()
            except OSError as error:
                raise self._unusable(error) from error
            self._finder = Finder(self._shelf, self._form, self._tasks)
            self._pace = Pace(self._config.write_bytes_per_second)
            self._writer = DeltaWriter(
                self._shelf, self._finder, self._form, self._config.min_tokens, self._pace
            )
            self._compactor = Compactor(
                self._shelf, self._finder, self._form, self._pace, self._writer.turn
            )
            self.transfer = Transfer(self._finder, self._tasks, self._writer.turn)
            self._tasks.start(self._upkeep())
            self._tasks.start(self._compactor.run(self._closing))
            opening.push_async_callback(self._finish_tasks)
            self._lifetime = opening.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._lifetime.aclose()

    async def _open_catalog(self) -> None:
        """Opens the catalog and reconciles; one that cannot be used is set aside and rebuilt."""
        try:
            try:
                if await self._read_catalog():
                    log.warning("catalog was missing and is rebuilt from the files")
            except CatalogError as error:
                self._observer.catalog_error(error.kind)
                if error.kind not in ("corrupt", "other"):
                    raise
                await self._set_aside(str(error))
                await self._read_catalog()
                self._shelf.rows.is_damaged = False
        except (OSError, CatalogError) as error:
            raise self._unusable(error) from error

    async def _set_aside(self, detail: str) -> None:
        """The catalog must be closed. Raises OSError."""
        aside = await self._shelf.run(self._folder.set_catalog_aside, str(int(time.time())))
        log.warning("catalog set aside and rebuilt file=%s error=%s", aside, detail)

    async def _rebuild(self) -> None:
        """A statement has found the catalog damaged: makes it anew from the files. Lookups miss
        meanwhile, and what is known of uses is kept. Raises OSError, CatalogError."""
        shelf = self._shelf
        async with self._compactor.turn, self._writer.turn:
            before = await shelf.run(copies, list(shelf.index))
            async with shelf.changes:
                # SQLite removes a log by its name when it closes: that of the next one, if late.
                await self._close_catalog()
                await self._set_aside("a statement has found it damaged")
                await shelf.run(self._folder.prepare_catalog)
                shelf.rows.catalog = await Catalog.open(self._folder.catalog_path)
            await self._reconcile(())
            for old in before:
                if (entry := shelf.index.get(old.bank_id)) is not None:
                    shelf.index.take_over(entry, old)
                    shelf.rows.note(entry.bank_id)
            shelf.rows.is_damaged = False

    def _unusable(self, error: Exception) -> StoreDisabled:
        return StoreDisabled(
            f"the bank folder {self._folder.path} cannot be used: {error}",
            reason="STORE_FOLDER_UNUSABLE",
        )

    async def _read_catalog(self) -> bool:
        """Returns whether there was none, but banks. Raises OSError, CatalogError; then the
        catalog is closed again."""
        if fault := await self._shelf.run(self._folder.catalog_fault):
            raise CatalogError(fault, "corrupt")
        was_missing = await self._shelf.run(self._folder.prepare_catalog)
        self._shelf.rows.catalog = await Catalog.open(self._folder.catalog_path)
        try:
            known = await self._shelf.rows.ask("list", self._shelf.rows.catalog.all())
            result = await self._reconcile(known)
            return was_missing and result.num_adopted > 0
        except BaseException:
            await self._close_catalog()
            raise

    async def _reconcile(self, known: Sequence[Entry]) -> Reconciled:
        started = time.monotonic()
        async with self._shelf.changes:
            result = await reconcile(self._shelf, self._form, known)
        try:
            await self._shelf.fit()  # the cap may be lower than at the last run
        except StoreFull as error:
            log.warning("bank folder over its cap detail=%s", error)
        log.info(
            "banks reconciled banks=%d adopted=%d dropped=%d quarantined=%d seconds=%.3f",
            *(result.num_banks, result.num_adopted, result.num_dropped, result.num_quarantined),
            time.monotonic() - started,
        )
        return result

    async def _finish_tasks(self) -> None:
        self._closing.set()
        self._compactor.stop()
        self._pace.end()
        await self._tasks.drain()

    async def _close_catalog(self) -> None:
        try:
            await self._tasks.finish(self._shelf.rows.catalog.close())
        except CatalogError as error:
            log.warning("catalog not closed cleanly error=%s", error)

    async def _upkeep(self) -> None:
        """Runs until the store closes, and a last time then."""
        foreign_at = time.monotonic() + FOREIGN_SECONDS
        while not self._closing.is_set():
            try:
                await asyncio.wait_for(self._closing.wait(), UPKEEP_SECONDS)
            except TimeoutError:
                pass
            try:
                if self._shelf.rows.is_damaged:
                    await self._rebuild()
                await self._shelf.expire(time.time())
                await self._shelf.budget.measure()
                await self._shelf.rows.trim_log()
                await self._shelf.rows.flush()
                await self._shelf.bury_retired()
                await self._shelf.budget.claim()
                if time.monotonic() >= foreign_at:
                    foreign_at = time.monotonic() + FOREIGN_SECONDS
                    await self._shelf.budget.measure_foreign()
                if self._shelf.condition.detail:
                    await self._shelf.run(self._folder.probe)
                    await self._shelf.rows.probe()
                    self._shelf.condition.worked()
            except (OSError, CatalogError) as error:
                self._shelf.condition.failed(str(error))
            except StoreFailed as error:
                log.warning("store upkeep failed error=%s", error)
            except Exception:  # a bug; the next round may still be of use
                log.exception("store upkeep failed")

    # What the engine uses.

    @property
    def version(self) -> int:
        return self._shelf.version

    async def match(self, query: MatchQuery) -> Sequence[LeasedBank]:
        if self._closing.is_set():
            return []
        return await self._finder.match(query)

    async def persist(self, source: BankSource) -> Persisted:
        if self._closing.is_set():
            await asyncio.to_thread(source.rows.close)
            return Persisted("", 0, 0, "the store is closing")
        return await self._tasks.finish(self._persist(source))

    async def _persist(self, source: BankSource) -> Persisted:
        persisted = await self._writer.persist(source)
        if persisted.written_bytes:
            self._compactor.wrote(persisted.bank_id)
        return persisted

    async def compact(self) -> int:
        """Merges small files of long chains now, as otherwise happens when nothing is written;
        returns how many banks got one file for several."""
        return await self._tasks.finish(self._compactor.compact())

    async def note_use(self, bank_id: str, *, proven: bool) -> None:
        entry = self._shelf.index.get(bank_id)
        if entry is not None:
            if proven:
                entry.trust |= Trust.PROVEN
            else:
                self._shelf.index.used(entry, time.time())
            self._shelf.rows.note(bank_id)

    async def quarantine(self, bank_id: str, detail: str) -> None:
        if not self._closing.is_set():
            await self._tasks.finish(self._shelf.quarantine(bank_id, detail))

    # What the admin sees: the banks of all tenants; who may see which is for the caller to say.

    @property
    def disk_bytes(self) -> int:
        """What the whole folder occupies; cheap, for gauges."""
        return self._shelf.budget.disk_bytes

    @property
    def min_tokens(self) -> int:
        """Shorter banks are not stored."""
        return self._config.min_tokens

    @property
    def quota_bytes(self) -> int:
        return self._shelf.budget.quota_bytes

    @property
    def trouble(self) -> str:
        """Why banks cannot be written at the moment; "" while they can be."""
        return self._shelf.condition.detail

    @property
    def banks_by_trust(self) -> dict[str, int]:
        """Counts for gauges; deleted banks that others need are `untrusted`."""
        index = self._shelf.index
        return {
            "reusable": len(index) - index.num_hidden,
            "untrusted": index.num_hidden,
            "quarantined": self._shelf.budget.num_quarantined,
        }

    @property
    def num_leased(self) -> int:
        """Banks that somebody has matched and not released yet."""
        return len(self._shelf.leases.held())

    async def list_banks(self) -> list[BankInfo]:
        """All stored banks, in no order."""
        entries = list(self._shelf.index)
        return await self._shelf.run(_infos, entries)

    async def get(self, bank_id: str) -> BankInfo:
        """Raises BankNotFound."""
        return _info(self._visible(bank_id))

    async def read(self, bank_id: str) -> FileContent:
        """Ids, records and hidden spans, from its file. Raises BankNotFound, BankCorrupt."""
        entry = self._visible(bank_id)
        return await self._tasks.finish(self._checked(entry, BankFile.read_content))

    async def inspect(self, bank_id: str) -> Inspected:
        """Header, ids and records of its own file, and its chain. Raises BankNotFound,
        BankCorrupt."""
        entry = self._visible(bank_id)
        chain = chain_of(self._shelf.index, entry)
        return Inspected(*await self._tasks.finish(self._checked(entry, header_and_content)), chain)

    async def delete(self, bank_id: str) -> Deleted:
        """Raises BankNotFound, BankPinned, BankInUse, StoreFailed."""
        self._visible(bank_id)
        freed_bytes = await self._tasks.finish(self._shelf.delete(bank_id))
        return Deleted(freed_bytes, hidden=freed_bytes == 0)

    async def pin(self, bank_id: str) -> BankInfo:
        """Pinning twice is no error. Raises BankNotFound, StoreFailed."""
        return await self._set_pinned(bank_id, pinned=True)

    async def unpin(self, bank_id: str) -> BankInfo:
        """Unpinning twice is no error. Raises BankNotFound, StoreFailed."""
        return await self._set_pinned(bank_id, pinned=False)

    async def _set_pinned(self, bank_id: str, *, pinned: bool) -> BankInfo:
        self._visible(bank_id)
        return _info(await self._tasks.finish(self._shelf.set_pinned(bank_id, pinned=pinned)))

    async def verify(self, bank_ids: Iterable[str] = ()) -> AsyncIterator[Verdict]:
        """Reads banks whole (none named: all) and checks every block; quarantines what fails.

        Raises BankNotFound before the first verdict.
        """
        chosen = [self._visible(bank_id).bank_id for bank_id in bank_ids]
        chosen = chosen or [entry.bank_id for entry in self._shelf.index]
        for done, bank_id in enumerate(chosen, start=1):
            read_bytes, detail = await self._tasks.finish(self._verify(bank_id))
            yield Verdict(bank_id, not detail, detail, read_bytes, done, len(chosen))

    async def _verify(self, bank_id: str) -> tuple[int, str]:
        """(bytes read, what failed)."""
        entry = self._shelf.index.get(bank_id)
        if entry is None:
            return 0, "the bank has gone meanwhile"
        try:
            read_bytes = await self._checked(entry, BankFile.verify)
        except BankCorrupt as error:
            return 0, error.message
        if (entry := self._shelf.index.get(bank_id)) is not None:
            entry.verified_at = time.time()
            self._shelf.rows.note(bank_id)
        return read_bytes, ""

    async def _checked(self, entry: Entry, read: Callable[[BankFile], T]) -> T:
        """Reads from a bank's own file, leased meanwhile; quarantines it on BankCorrupt."""
        lease = self._finder.lease(entry)

        def work() -> T:
            with BankFile.open(self._folder.files, lease.links[-1].path, self._form) as file:
                return read(file)

        try:
            return await self._shelf.run_long(work)
        except BankCorrupt as error:
            await self._shelf.quarantine(entry.bank_id, error.message)
            raise
        finally:
            lease.release()

    async def rescan(self) -> Reconciled:
        """Reads the folder again, as at a start. Raises StoreFailed."""
        return await self._tasks.finish(self._at_rest(self._rescan))

    async def collect_garbage(self, *, quarantined: bool, dry_run: bool) -> list[Piece]:
        """Removes what nobody can use: see `garbage.collect`. Raises StoreFailed."""
        work = partial(collect, self._shelf, self._rescan, quarantined=quarantined, dry_run=dry_run)
        return await self._tasks.finish(self._at_rest(work))

    async def _rescan(self) -> Reconciled:
        return await self._reconcile(await self._shelf.run(copies, list(self._shelf.index)))

    async def _at_rest(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs what looks at the whole folder, while nothing is written or merged."""
        async with self._compactor.turn, self._writer.turn:
            try:
                return await work()
            except (OSError, CatalogError) as error:
                raise StoreFailed(f"the folder could not be read again: {error}") from error

    async def storage(self) -> Storage:
        """Raises StoreFailed."""
        shelf = self._shelf
        try:
            free_bytes = await shelf.run(self._folder.files.free_bytes, self._folder.path)
        except OSError as error:
            raise StoreFailed(f"the folder cannot be read: {error}") from error
        return Storage(
            folder=self._folder.path,
            fingerprint=self._config.fingerprint.hex(),
            disk_bytes=shelf.budget.disk_bytes,
            quota_bytes=shelf.budget.quota_bytes,
            free_bytes=free_bytes,
            num_stored=len(shelf.index) - shelf.index.num_hidden,
            num_pinned=shelf.index.num_pinned,
            num_quarantined=shelf.budget.num_quarantined,
        )

    def _visible(self, bank_id: str) -> Entry:
        entry = self._shelf.index.get(bank_id)
        if entry is None or entry.hidden:
            raise BankNotFound(f"no bank {bank_id!r} is stored; `ds4grpc banks ls` shows which are")
        return entry


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without looks for cyclic garbage: a hundred thousand entries are made, which have none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _infos(entries: Iterable[Entry]) -> list[BankInfo]:
    return [_info(entry) for entry in entries if not entry.hidden]


def _info(entry: Entry) -> BankInfo:
    return BankInfo(
        bank_id=entry.bank_id,
        namespace=entry.namespace,
        parent_id=entry.parent_id,
        base=entry.base,
        frontier=entry.frontier,
        size_bytes=entry.size_bytes,
        trust=entry.trust,
        pinned=entry.pinned,
        hits=entry.hits,
        created_at=entry.created_at,
        last_used_at=entry.last_used_at,
        verified_at=entry.verified_at,
        ttl_seconds=entry.ttl_seconds,
        reason=entry.reason,
        record_kinds=entry.record_kinds,
        hidden_tokens=entry.hidden_tokens,
    )
