"""Finding stored banks for a prompt, and the lease that a caller holds on each.

Owns lookup, lease and load. Knows no writing. Coroutines on the event loop; statements in tasks
that the store owns, files in worker threads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial

from ds4grpc.bank import BankContent
from ds4grpc.engine.banks import MatchQuery, RowSink
from ds4grpc.errors import BankCorrupt
from ds4grpc.store.catalog import Hit
from ds4grpc.store.content import FileContent
from ds4grpc.store.database import CatalogError
from ds4grpc.store.format import StateForm
from ds4grpc.store.index import Entry
from ds4grpc.store.keys import query_digests
from ds4grpc.store.load import (
    BrokenLink,
    Link,
    Load,
    LoadStopped,
    held_by,
    links_of,
    load_bytes,
)
from ds4grpc.store.reader import BankFile
from ds4grpc.store.shelf import Shelf
from ds4grpc.store.tasks import OwnedTasks

log = logging.getLogger(__name__)

MAX_CANDIDATES = 4  # that a caller has to compare
MAX_ATTEMPTS = 8  # files opened for one lookup, bad ones included
MAX_CHILDREN = 3  # tried for each hit, most recently used first
LOOKUP_SECONDS = 3.0  # then it is a miss: no request waits for a disk or a lock that hangs
MAX_LATE = 4  # such lookups that still run; while there are so many, no more are started
MAX_CHILDREN_SEEN = 32  # looked at for that: most of a popular head's may have been deleted


class LeasedBank:
    """A lease on a stored bank (`engine.banks.StoredBank`)."""

    def __init__(self, finder: Finder, entry: Entry, links: tuple[Link, ...]) -> None:
        self._finder = finder
        self._links = links
        self._content: BankContent | None = None
        self._bank_id = entry.bank_id
        self._namespace = entry.namespace
        self._head = entry.head
        self._released = False
        self._paths = tuple(link.path for link in links)
        finder.shelf.leases.take(entry.bank_id, self._paths)

    @property
    def bank_id(self) -> str:
        return self._bank_id

    @property
    def links(self) -> tuple[Link, ...]:
        """The files that hold its rows, root first."""
        return self._links

    @property
    def content(self) -> BankContent:
        assert self._content is not None
        return self._content

    def fill_in(self, read: FileContent) -> None:
        """Completes the lease with what its own file says; before anybody else sees it."""
        held, tails = held_by(self._links)
        self._content = BankContent(
            namespace=self._namespace,
            ids=read.ids,
            records=read.records,
            hidden=read.hidden,
            held=held,
            tails=tails,
            head=self._head,
        )

    def load_bytes(self, position: int) -> int:
        return load_bytes(self._links, position, self._finder.form.layout)

    async def load(self, position: int, sink: RowSink) -> int:
        """See `engine.banks.StoredBank`. Cancelling waits until the sink is left alone."""
        return await self._finder.load(self, position, sink)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._finder.shelf.leases.release(self._bank_id, self._paths)


class Finder:
    """Lookups and loads over one shelf."""

    def __init__(self, shelf: Shelf, form: StateForm, tasks: OwnedTasks) -> None:
        self.shelf = shelf
        self.form = form
        self._tasks = tasks
        self._num_late = 0  # lookups that nobody waits for any more

    async def match(self, query: MatchQuery) -> list[LeasedBank]:
        """See `engine.banks.BankStore.match`."""
        if self._num_late >= MAX_LATE:
            return []
        task = self._tasks.start(self._match(query))
        try:
            done, _ = await asyncio.wait([task], timeout=LOOKUP_SECONDS)
        except asyncio.CancelledError:
            task.add_done_callback(_release_all)
            raise
        if done:
            return task.result()
        self.shelf.observer.catalog_error("slow")
        log.warning("lookup takes too long, counted as a miss seconds=%.1f", LOOKUP_SECONDS)
        self._num_late += 1
        task.add_done_callback(self._came_late)
        return []

    def _came_late(self, task: asyncio.Task[list[LeasedBank]]) -> None:
        self._num_late -= 1
        _release_all(task)

    async def _match(self, query: MatchQuery) -> list[LeasedBank]:
        try:
            hits = await self.shelf.rows.find(partial(query_digests, query))
        except CatalogError as error:
            log.warning("lookup failed error=%s", error)
            return []
        return await self.open(self.candidates(query.namespace, hits))

    def candidates(self, namespace: bytes, hits: Iterable[Hit]) -> list[Entry]:
        """Usable banks for hits, likely best first: each hit, then its recent children, which
        hold all of it and may go on as the prompt does."""
        now = time.time()
        found: dict[str, Entry] = {}
        for hit in hits:
            entry = self.shelf.index.get(hit.bank_id)
            if entry is None or entry.namespace != namespace:
                continue
            for each in (entry, *self.heirs(entry)):
                if each.is_usable(now):
                    found.setdefault(each.bank_id, each)
        return list(found.values())[:MAX_ATTEMPTS]

    def heirs(self, entry: Entry) -> list[Entry]:
        """Its most recent usable children; those of a deleted child in its place.

        A child without rows was merged into the bank (see compact) and holds less than it does.
        When the bank is deleted, the longest such child stands for it.
        """
        now = time.time()
        heirs: list[Entry] = []
        longest: Entry | None = None
        family = self.shelf.index.children(entry)
        for _ in range(MAX_CHILDREN_SEEN):
            child = next(family, None)
            if child is None or len(heirs) == MAX_CHILDREN:
                break
            if child.frontier - child.base < self.form.layout.alignment:
                is_needed = child.parent_id != entry.bank_id or not entry.is_usable(now)
                if is_needed and child.is_usable(now):
                    longest = max(longest or child, child, key=lambda each: each.frontier)
                continue
            if child.is_usable(now):
                heirs.append(child)
            else:
                family = itertools.chain(self.shelf.index.children(child), family)
        return heirs if longest is None else [*heirs, longest]

    async def open(self, entries: Sequence[Entry]) -> list[LeasedBank]:
        """Leases on the first few of the banks whose files are good; bad ones are quarantined."""
        leases = [self.lease(entry) for entry in entries]
        try:
            opened = await self.shelf.run(self._read_first, [lease.links[-1] for lease in leases])
        except BaseException:
            _release(leases)
            raise
        good: list[LeasedBank] = []
        for number, (entry, lease) in enumerate(zip(entries, leases, strict=True)):
            outcome = opened[number] if number < len(opened) else None
            if isinstance(outcome, FileContent):
                lease.fill_in(outcome)
                good.append(lease)
                continue
            lease.release()
            if outcome is not None:
                self.shelf.observer.restored(outcome.kind, 0.0, 0)
                await self.shelf.quarantine(entry.bank_id, outcome.message)
        return good

    def lease(self, entry: Entry) -> LeasedBank:
        """A lease whose content is not filled in yet."""
        chain = self.shelf.index.chain(entry)
        folder = self.shelf.folder
        paths = [folder.bank_path(each.bank_id, each.base) for each in chain]
        return LeasedBank(self, entry, links_of(list(zip(chain, paths, strict=True))))

    def _read_first(self, links: Sequence[Link]) -> list[FileContent | BankCorrupt]:
        """What each file holds or why it is bad, up to the last that is wanted. Blocking."""
        outcomes: list[FileContent | BankCorrupt] = []
        num_good = 0
        for link in links:
            if num_good == MAX_CANDIDATES:
                break
            try:
                with BankFile.open(self.shelf.folder.files, link.path, self.form) as file:
                    outcomes.append(file.read_content())
                num_good += 1
            except BankCorrupt as error:
                outcomes.append(error)
        return outcomes

    async def load(self, lease: LeasedBank, position: int, sink: RowSink) -> int:
        """Fills the sink; see `LeasedBank.load`."""
        assert 0 <= position <= lease.content.frontier
        load = Load(self.shelf.folder.files, self.form, self.shelf.threads.read)
        task = self._tasks.start(self._load(load, lease, position, sink))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            load.stop.set()
            while not task.done():
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError:
                    continue  # the sink's memory is about to be reused: wait all the same
            if not task.cancelled():
                task.exception()  # looked at, so that asyncio does not report it as forgotten
            raise

    async def _load(self, load: Load, lease: LeasedBank, position: int, sink: RowSink) -> int:
        started = time.monotonic()
        try:
            read_bytes = await self.shelf.run_long(load.fill, lease.links, position, sink)
        except LoadStopped:
            return 0
        except BrokenLink as broken:
            seconds = time.monotonic() - started
            self.shelf.observer.restored(broken.error.kind, seconds, 0)
            await self.shelf.quarantine(broken.bank_id, broken.error.message)
            raise broken.error from broken
        seconds = time.monotonic() - started
        self.shelf.observer.restored("ok", seconds, read_bytes)
        log.info(
            "bank restored bank=%s tokens=%d bytes=%d seconds=%.3f",
            *(lease.bank_id, position, read_bytes, seconds),
        )
        return read_bytes


def _release(leases: Iterable[LeasedBank]) -> None:
    for lease in leases:
        lease.release()


def _release_all(task: asyncio.Task[list[LeasedBank]]) -> None:
    """Ends the leases that a cancelled caller will never see."""
    if not task.cancelled() and task.exception() is None:
        _release(task.result())
