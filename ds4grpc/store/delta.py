"""Writing a bank as what no file holds yet.

Owns the choice of the parent, the plan of the file and the order head, then delta. Knows no
lookup for prompts and no admin. Coroutines on the event loop, in tasks that the store owns; rows
are read and written in worker threads.

    tokens     0 ......... base ......... lcp ....... parent's frontier
    parent     [=======================================]
    source     [===============================xxxxxxxxxxxxxxxxxxxx]  frontier
    new file             [============================================]  base = lcp, aligned down
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from ds4grpc.bank import (
    BankContent,
    PersistReason,
    Record,
    RecordKind,
    Trust,
    bank_id,
    common_prefix,
)
from ds4grpc.engine.banks import BankSource, Persisted, SourceMoved
from ds4grpc.errors import BankCorrupt, BankNotFound, StoreFailed, StoreFull
from ds4grpc.layout import Spans, StateLayout
from ds4grpc.store.content import FileContent, fit_records
from ds4grpc.store.database import CatalogError
from ds4grpc.store.format import Header, StateForm
from ds4grpc.store.index import Entry
from ds4grpc.store.keys import Mark, bank_marks, parent_digests
from ds4grpc.store.load import held_by
from ds4grpc.store.match import Finder, LeasedBank
from ds4grpc.store.pace import Pace
from ds4grpc.store.shelf import Shelf
from ds4grpc.store.writer import Draft, draft_file, write_file

log = logging.getLogger(__name__)

# Compaction keeps chains far shorter. Where it cannot (a branch at every turn), a file that starts
# anew costs a conversation's bytes once in that many turns, and bounds what a load opens.
MAX_CHAIN_FILES = 128
MAX_DESCENTS = 8  # steps from a hit to children that share still more
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FAILURES = (
    *(SourceMoved, StoreFull, StoreFailed, BankNotFound, BankCorrupt),
    *(CatalogError, OSError),
)


@dataclass(frozen=True, slots=True)
class Nearest:
    """The stored bank that shares the longest token prefix, leased; None when none shares any."""

    lease: LeasedBank | None = None
    shared: int = 0  # tokens

    @property
    def bank_id(self) -> str:
        return self.lease.bank_id if self.lease is not None else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A file that is about to be written, and what it becomes."""

    draft: Draft
    entry: Entry
    marks: list[Mark]


class DeltaWriter:
    """Writes one bank at a time: two writers would choose parents that neither has written."""

    def __init__(
        self, shelf: Shelf, finder: Finder, form: StateForm, min_tokens: int, pace: Pace
    ) -> None:
        self.turn = asyncio.Lock()  # held while a bank is written
        self._shelf = shelf
        self._finder = finder
        self._form = form
        self._min_tokens = min_tokens
        self._pace = pace

    async def persist(self, source: BankSource) -> Persisted:
        """See `engine.banks.BankStore.persist`."""
        if source.reason is PersistReason.STOP:
            self._pace.end()  # a stop waits for nothing, nor for a write that waits already
        try:
            if source.content.frontier < self._min_tokens:
                return Persisted("", 0, 0, f"fewer than {self._min_tokens} tokens")
            async with self.turn:
                with ExitStack() as leases:
                    return await self._persist(source, leases)
        finally:
            await self._shelf.run(source.rows.close)

    async def _persist(self, source: BankSource, leases: ExitStack) -> Persisted:
        content, nearest, written = source.content, Nearest(), 0
        try:
            stored = self._shelf.index.get(await self._shelf.run(self._id_of, content))
            if stored is not None:
                return await self._again(stored, source)
            nearest = await self._nearest(content, leases)
            if self._covers(nearest, content):
                covering = self._shelf.index.get(nearest.bank_id)
                if covering is not None:
                    return await self._again(covering, source)
            head = content.head
            if nearest.shared < head and self._min_tokens <= head < content.frontier:
                part = replace(source, content=_head_of(content), pin=False)
                nearest, written = await self._put_head(part, nearest, leases)
            entry = await self._write(source, nearest)
        except _FAILURES as error:
            detail = await self._failed(error, content)
            return Persisted(nearest.bank_id, nearest.shared, written, detail)
        return Persisted(entry.bank_id, content.frontier, written + entry.size_bytes)

    async def _put_head(
        self, part: BankSource, nearest: Nearest, leases: ExitStack
    ) -> tuple[Nearest, int]:
        """The head as a bank of its own, leased, and the bytes written for it: none when it is
        there, but was deleted or has expired, so that no lookup offers it.

        Raises what `_FAILURES` names.
        """
        stored = self._shelf.index.get(await self._shelf.run(self._id_of, part.content))
        entry = stored or await self._write(part, nearest)
        lease = self._finder.lease(entry)
        leases.callback(lease.release)
        if stored is not None:
            await self._again(stored, part)
        return Nearest(lease, part.content.frontier), 0 if stored is not None else entry.size_bytes

    def _id_of(self, content: BankContent) -> str:
        return bank_id(content.namespace, self._form.fingerprint, content.ids)

    async def _again(self, stored: Entry, source: BankSource) -> Persisted:
        """Nothing is new: what is stored already gets the request's wishes.

        Raises StoreFailed, CatalogError, OSError.
        """
        now = time.time()
        if Trust.QUARANTINED in stored.trust:
            raise StoreFailed("the stored bank is being quarantined")
        if not stored.is_usable(now):
            await self._shelf.revive(stored.bank_id, now)
        lives = (stored.ttl_seconds, source.ttl_seconds)
        longer = None if None in lives else max(life for life in lives if life is not None)
        self._shelf.index.set_ttl(stored, longer)
        if source.pin:
            await self._shelf.set_pinned(stored.bank_id, pinned=True)
        self._shelf.rows.note(stored.bank_id)
        return Persisted(stored.bank_id, source.content.frontier, 0)

    async def _nearest(self, content: BankContent, leases: ExitStack) -> Nearest:
        """Raises CatalogError: a bank that might be there is not written a second time."""
        hits = await self._shelf.rows.find(partial(parent_digests, content))
        entries = self._finder.candidates(content.namespace, hits)
        nearest = Nearest()
        for _ in range(MAX_DESCENTS):
            before = nearest.shared
            for lease in await self._finder.open(entries):
                leases.callback(lease.release)
                shared = common_prefix(lease.content.ids, content.ids)
                if shared > nearest.shared:
                    nearest = Nearest(lease, shared)
            entry = self._shelf.index.get(nearest.bank_id)
            if nearest.shared == before or entry is None:
                break
            # Between two hashed positions only the banks themselves tell who shares more.
            entries = self._finder.heirs(entry)
        return nearest

    def _covers(self, nearest: Nearest, content: BankContent) -> bool:
        """Whether the stored bank resumes wherever the source does."""
        if nearest.lease is None or nearest.shared < content.frontier:
            return False
        layout, stored = self._form.layout, nearest.lease.content
        theirs = layout.replay_base(content.frontier, stored.held, stored.tails)
        return theirs >= layout.replay_base(content.frontier, content.held, content.tails)

    async def _write(self, source: BankSource, nearest: Nearest) -> Entry:
        """Writes and publishes one file. Raises what `_FAILURES` names."""
        started = time.monotonic()
        plan = await self._shelf.run(self._plan, source, nearest)
        entry = plan.entry
        await self._shelf.reserve(entry.size_bytes)
        try:
            await self._shelf.run_long(self._write_temp, plan, source)
            await self._shelf.publish(entry, plan.marks)
        except BaseException:
            self._shelf.unreserve(entry.size_bytes)
            raise
        self._shelf.condition.worked()
        self._supersede(nearest, entry)
        seconds = time.monotonic() - started
        self._shelf.observer.persisted(entry.reason, seconds, entry.size_bytes)
        log.info(
            "bank persisted bank=%s tokens=%d base=%d bytes=%d reason=%s seconds=%.3f",
            *(entry.bank_id, entry.frontier, entry.base, entry.size_bytes, entry.reason, seconds),
        )
        return entry

    def _supersede(self, nearest: Nearest, entry: Entry) -> None:
        """Marks a bank that the new one holds whole without needing its file."""
        old = self._shelf.index.get(nearest.bank_id)
        if old is not None and nearest.shared == old.frontier and entry.parent_id != old.bank_id:
            self._shelf.index.set_superseded(old)

    def _write_temp(self, plan: Plan, source: BankSource) -> None:
        folder = self._shelf.folder
        path = folder.temp_path(plan.entry.bank_id, plan.entry.base)
        write_file(folder.files, path, plan.draft, source.rows, self._pace)

    def _plan(self, source: BankSource, nearest: Nearest) -> Plan:
        """What goes into the file. Blocking: hashes and encodes."""
        content, layout = source.content, self._form.layout
        links = nearest.lease.links if nearest.lease is not None else ()
        base = nearest.shared - nearest.shared % layout.alignment
        # Ancestors that begin at or past the base hold no row below it.
        links = tuple(link for link in links if link.base < base)
        if not links or len(links) >= MAX_CHAIN_FILES:
            links, base = (), 0
        held, tails = held_by(links)
        records = fit_records(content.records)
        points = _points_kept(content, records, layout, base)
        header = Header(
            bank_id=self._id_of(content),
            parent_id=links[-1].bank_id if links else "",
            base=base,
            frontier=content.frontier,
            # A prefill that ended early may not have come to the end of the head.
            head=content.head if content.head <= content.frontier else 0,
            fingerprint=self._form.fingerprint,
            namespace=content.namespace,
            reason=source.reason,
            created_at_ms=int(time.time() * 1000),
            ttl_seconds=source.ttl_seconds,
            layout_id=layout.layout_id,
            windows=(layout.windows_at(points) & content.held) - held.clip(0, base),
            tails=tuple(sorted(points & set(content.tails) - {at for at in tails if at <= base})),
        )
        draft = draft_file(header, FileContent(content.ids, content.hidden, records), self._form)
        draft.check()
        entry = entry_of(draft.header, draft.size_bytes, content.hidden, records)
        entry.pinned = source.pin
        marks = bank_marks(content.namespace, content.ids, records, base, content.head)
        return Plan(draft, entry, marks)

    async def _failed(self, error: Exception, content: BankContent) -> str:
        """Counts and logs a lost write; returns why it was lost."""
        no_space = isinstance(error, OSError) and error.errno in _NO_SPACE
        if no_space or (isinstance(error, CatalogError) and error.kind == "full"):
            kind = "no_space"
            await self._make_room(content)
        elif isinstance(error, SourceMoved):
            kind = "moved"
        elif isinstance(error, StoreFull):
            kind = "quota"
        elif isinstance(error, CatalogError):
            kind = "catalog"
        else:
            kind = "io" if isinstance(error, OSError) else "other"
        self._shelf.observer.persist_failed(kind)
        detail = f"{kind}: {error}" if str(error) else kind
        if kind in ("no_space", "catalog", "io"):
            self._shelf.condition.failed(detail)
        log.warning("bank not persisted tokens=%d detail=%s", content.frontier, detail)
        return detail

    async def _make_room(self, content: BankContent) -> None:
        """The disk is full below the cap: this write is lost, the next one shall not be."""
        try:
            await self._shelf.make_room(int(content.frontier * self._form.layout.bytes_per_token))
        except (StoreFull, OSError) as error:
            log.warning("no room could be made error=%s", error)


def entry_of(header: Header, size_bytes: int, hidden: Spans, records: tuple[Record, ...]) -> Entry:
    """The entry of a file that is whole and durable."""
    kinds = {record.kind for record in records}
    created_at = header.created_at_ms / 1000
    return Entry(
        bank_id=header.bank_id,
        namespace=header.namespace,
        parent_id=header.parent_id,
        base=header.base,
        frontier=header.frontier,
        head=header.head,
        size_bytes=size_bytes,
        reason=header.reason,
        record_kinds=tuple(kind for kind in RecordKind if kind in kinds),
        hidden_tokens=hidden.num_tokens,
        trust=Trust.COMMITTED | Trust.DURABLE | (Trust.KEYED if kinds else Trust(0)),
        created_at=created_at,
        last_used_at=created_at,
        windows=header.windows,
        tails=header.tails,
        ttl_seconds=header.ttl_seconds,
    )


def _points_kept(
    content: BankContent, records: Sequence[Record], layout: StateLayout, base: int
) -> set[int]:
    """The positions past `base` at which the file keeps windows and tails: its frontier, and the
    newest of the earlier ones as far as their bytes stay small beside the rows.

    A cut at one that is not kept replays from the one before it. Keeping all would write windows
    for nearly every token of a conversation of short turns.
    """
    row_bytes = (content.frontier - base) * layout.plain_bytes_per_token
    left = min(row_bytes - layout.point_bytes, row_bytes / 4)
    token_bytes = layout.bytes_per_token - layout.plain_bytes_per_token
    points = {point.position for record in records for point in record.waypoints}
    kept = {content.frontier}
    windows = layout.windows_at(kept)
    for point in sorted(points.union(content.tails) - kept, reverse=True):
        wider = layout.windows_at((point,)) | windows
        left -= (wider.num_tokens - windows.num_tokens) * token_bytes + layout.tail_bytes
        if left < 0 or point <= base:
            break
        windows = wider
        kept.add(point)
    return kept


def _head_of(content: BankContent) -> BankContent:
    """The stable head of a conversation, as a bank of its own."""
    return BankContent(
        namespace=content.namespace,
        ids=content.ids[: content.head],
        hidden=content.hidden.clip(0, content.head),
        held=content.held.clip(0, content.head),
        tails=tuple(position for position in content.tails if position <= content.head),
        head=content.head,
    )
