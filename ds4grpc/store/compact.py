"""Compaction: a long run of small files becomes one file, while nothing else is written.

Owns what is worth merging and the files that take the place of others. Knows no lookup and no
admin; `shelf.switch` puts the new files into service. Coroutines on the event loop, in a task that
the store owns; rows are copied in a worker thread.

    before   p <- c1 <- c2 <- ... <- c9              each file one turn
    after    p <- c9, with the rows of all nine      c1 ... c8 lean on c9 and hold no rows

Every bank keeps its id, records, pin and place in the catalog; hidden ones, whose rows were all
that was wanted of them, go. A run ends where other banks branch off, and one that has been merged
has banks that lean on it: so no row is ever merged twice.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ds4grpc.bank import common_prefix
from ds4grpc.engine.banks import SourceMoved
from ds4grpc.errors import BankCorrupt, StoreFailed, StoreFull
from ds4grpc.layout import StateLayout
from ds4grpc.store.content import FileContent
from ds4grpc.store.database import CatalogError
from ds4grpc.store.format import Header, StateForm
from ds4grpc.store.index import Entry, Index, Move
from ds4grpc.store.keys import Mark, bank_marks
from ds4grpc.store.load import BrokenLink, Link, held_by
from ds4grpc.store.match import Finder
from ds4grpc.store.pace import Pace
from ds4grpc.store.reader import BankFile, RowBlock
from ds4grpc.store.shelf import Shelf
from ds4grpc.store.writer import Draft, draft_file, write_file

log = logging.getLogger(__name__)

# A run is merged when it has that many tokens or files, whichever comes first: large enough for
# loads to read in large pieces, small enough to be written beside a running server.
RUN_TOKENS = 2048
RUN_FILES = 32
MAX_RUN_FILES = 128  # open at once, and switched in one transaction
# What is idle: nothing has been written for so long. A chain of so many files does not wait.
IDLE_SECONDS = 5.0
LONG_CHAIN_FILES = 64
ROUND_SECONDS = 1.0
_FAILURES = (SourceMoved, StoreFull, StoreFailed, CatalogError, OSError)


class NotNested(Exception):
    """A bank of the run is not a prefix of its last one after all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The files that take the place of a run's, and where their rows come from."""

    moves: list[tuple[Move, list[Mark]]]  # the merged bank first, then from newest to oldest
    drafts: list[Draft]  # of the same
    rows: list[ChainRows]
    gone: list[str]  # hidden banks that nobody needs then

    @property
    def num_bytes(self) -> int:
        return sum(draft.size_bytes for draft in self.drafts)


class Compactor:
    """Merges the runs that end in banks it has been told of."""

    def __init__(
        self, shelf: Shelf, finder: Finder, form: StateForm, pace: Pace, writing: asyncio.Lock
    ) -> None:
        """`writing` is held while a bank is written."""
        self.turn = asyncio.Lock()  # held while files are merged
        self._shelf = shelf
        self._finder = finder
        self._form = form
        self._pace = pace
        self._writing = writing
        self._stop = threading.Event()
        self._due: dict[str, None] = {}  # ids of banks just written, newest last
        self._wrote_at = 0.0

    def wrote(self, bank_id: str) -> None:
        """A file has been added at the end of a chain."""
        self._due.pop(bank_id, None)
        self._due[bank_id] = None
        self._wrote_at = time.monotonic()

    def stop(self) -> None:
        """Gives up what is being merged; nothing is begun any more."""
        self._stop.set()

    async def run(self, closing: asyncio.Event) -> None:
        """Merges what is due, until the store closes."""
        while not closing.is_set():
            try:
                await asyncio.wait_for(closing.wait(), ROUND_SECONDS)
            except TimeoutError:
                pass
            if not closing.is_set() and self._due:
                idle = time.monotonic() - self._wrote_at >= IDLE_SECONDS
                try:
                    await self.compact(idle=idle and not self._writing.locked())
                except Exception:  # a bug; later banks may still be merged
                    log.exception("compaction failed")

    async def compact(self, *, idle: bool = True) -> int:
        """Merges the runs that are due, unless `idle` is False only those of long chains.

        Returns how many were merged.
        """
        num_merged = 0
        for bank_id in reversed(list(self._due)):
            entry = self._shelf.index.get(bank_id)
            if entry is not None and not idle:
                if len(self._shelf.index.chain(entry)) < LONG_CHAIN_FILES:
                    continue
            self._due.pop(bank_id, None)
            async with self.turn:
                if entry is not None and not self._stop.is_set():
                    num_merged += await self._merge_at(bank_id)
        return num_merged

    async def _merge_at(self, bank_id: str) -> bool:
        entry = self._shelf.index.get(bank_id)
        run = run_of(self._shelf.index, entry, self._form.layout) if entry is not None else []
        if not is_due(run):
            return False
        started = time.monotonic()
        lease = self._finder.lease(run[-1])  # keeps the whole run from being evicted
        opened = ExitStack()
        try:
            links = lease.links[-len(run) :]
            plan = await self._shelf.run_long(self._plan, run, links, opened)
            await self._put(plan)
        except NotNested:
            return False
        except BrokenLink as broken:
            self._shelf.observer.restored(broken.error.kind, 0.0, 0)
            await self._shelf.quarantine(broken.bank_id, broken.error.message)
            return False
        except _FAILURES as error:
            log.warning("banks not merged bank=%s error=%s", bank_id, str(error) or "stopped")
            return False
        finally:
            await self._shelf.run(opened.close)
            lease.release()
        await self._shelf.bury_retired()
        seconds = time.monotonic() - started
        self._shelf.observer.compacted(seconds, plan.num_bytes)
        log.info(
            "banks merged bank=%s files=%d tokens=%d bytes=%d seconds=%.3f",
            *(bank_id, len(run), run[-1].frontier - run[-1].base, plan.num_bytes, seconds),
        )
        return True

    async def _put(self, plan: Plan) -> None:
        """Writes the files and puts them into service. Raises what `_FAILURES` names."""
        if not await self._shelf.has_room(plan.num_bytes):
            raise StoreFull("no room for a second copy; nothing is evicted for one")
        await self._shelf.reserve(plan.num_bytes)
        try:
            await self._shelf.run_long(self._write, plan)
            async with self._writing:  # so that no new file leans on what is about to change
                await self._shelf.switch(plan.moves, plan.gone)
        except BaseException:
            self._shelf.unreserve(plan.num_bytes)
            await self._shelf.run(self._discard, plan)
            raise

    def _write(self, plan: Plan) -> None:
        folder = self._shelf.folder
        for (move, _), draft, rows in zip(plan.moves, plan.drafts, plan.rows, strict=True):
            path = folder.temp_path(move.bank_id, move.base)
            write_file(folder.files, path, draft, rows, self._pace)

    def _discard(self, plan: Plan) -> None:
        for move, _ in plan.moves:
            try:
                self._shelf.folder.discard(move.bank_id, move.base)
            except OSError as error:
                log.warning("temp file not removed bank=%s error=%s", move.bank_id, error)

    def _plan(self, run: Sequence[Entry], links: Sequence[Link], opened: ExitStack) -> Plan:
        """Reads what the files say of themselves and lays out the new ones. Blocking.

        Raises NotNested, BrokenLink.
        """
        files: list[BankFile] = []
        contents: list[FileContent] = []
        for link in links:
            try:
                file = BankFile.open(self._shelf.folder.files, link.path, self._form)
                files.append(opened.enter_context(file))
                contents.append(file.read_content())
            except BankCorrupt as error:
                raise BrokenLink(link.bank_id, error) from error
        windows, tails = held_by(links)
        merged = replace(
            files[-1].header,
            parent_id=files[0].header.parent_id,
            base=files[0].header.base,
            windows=windows,
            tails=tails,
        )
        limits = [(file, link.limit) for file, link in zip(files, links, strict=True)]
        plan = Plan([], [], [], [])
        self._add(plan, run[-1], merged, contents[-1], ChainRows(limits, self._form, self._stop))
        for entry, file, content in reversed(list(zip(run, files, contents, strict=True))[:-1]):
            if entry.hidden:
                plan.gone.append(entry.bank_id)
                continue
            if common_prefix(content.ids, contents[-1].ids) < entry.frontier:
                raise NotNested(entry.bank_id)
            base = entry.frontier - entry.frontier % self._form.layout.alignment
            leaning = replace(
                file.header,
                parent_id=run[-1].bank_id,
                base=base,
                windows=file.header.windows - windows.clip(0, base),
                tails=tuple(position for position in file.header.tails if position > base),
            )
            rows = ChainRows([(file, entry.frontier)], self._form, self._stop)
            self._add(plan, entry, leaning, content, rows)
        return plan

    def _add(
        self, plan: Plan, entry: Entry, header: Header, content: FileContent, rows: ChainRows
    ) -> None:
        header = replace(header, ttl_seconds=entry.ttl_seconds, sections=())
        draft = draft_file(header, content, self._form)
        draft.check()
        move = Move(
            bank_id=entry.bank_id,
            old_base=entry.base,
            parent_id=header.parent_id,
            base=header.base,
            size_bytes=draft.size_bytes,
            windows=header.windows,
            tails=header.tails,
        )
        marks = bank_marks(header.namespace, content.ids, content.records, header.base, header.head)
        plan.moves.append((move, marks))
        plan.drafts.append(draft)
        plan.rows.append(rows)


def run_of(index: Index, tip: Entry, layout: StateLayout) -> list[Entry]:
    """The longest run of small files that ends in `tip`, oldest first; each of them but the last
    is needed by the next one only, and wholly a prefix of it unless it is hidden."""
    if not _is_small(tip, layout):
        return []
    run = [tip]
    while len(run) < MAX_RUN_FILES:
        child = run[-1]
        entry = index.get(child.parent_id)
        if entry is None or not _is_small(entry, layout) or len(entry.children) != 1:
            break
        if entry.head == entry.frontier:  # later conversations will lean on it
            break
        if not entry.hidden and child.base < entry.frontier - entry.frontier % layout.alignment:
            break
        run.append(entry)
    run.reverse()
    return run


def is_due(run: Sequence[Entry]) -> bool:
    """Whether a run is worth merging."""
    if len(run) < 2:
        return False
    return len(run) >= RUN_FILES or run[-1].frontier - run[0].base >= RUN_TOKENS


def _is_small(entry: Entry, layout: StateLayout) -> bool:
    return layout.alignment <= entry.frontier - entry.base < RUN_TOKENS


class ChainRows:
    """The rows of several files as one source (`engine.banks.RowSource`). One thread."""

    def __init__(
        self, files: Sequence[tuple[BankFile, int]], form: StateForm, stop: threading.Event
    ) -> None:
        """`files` are of one chain, each with the tokens below which its rows count."""
        self._layout = form.layout
        self._stop = stop
        self._tails = {
            position: file
            for file, limit in files
            for position in file.header.tails
            if position <= limit
        }
        # By plane: (first row, row past the last, file, block, byte in it), ascending.
        self._pieces: list[list[tuple[int, int, BankFile, RowBlock, int]]] = [
            [] for _ in form.layout.rows
        ]
        for file, limit in files:
            for block in file.row_blocks(limit):
                self._pieces[block.plane].extend(
                    (piece.start_row, piece.stop_row, file, block, piece.offset)
                    for piece in block.pieces
                )
        for pieces in self._pieces:
            pieces.sort(key=lambda piece: piece[0])
        self._block: RowBlock | None = None  # the last one read
        self._data = memoryview(b"")

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        """Raises BrokenLink: every block is checked as it is read."""
        size = self._layout.rows[plane].row_bytes
        pieces = self._pieces[plane]
        data = bytearray()
        at = start_row
        number = bisect_right(pieces, at, key=lambda piece: piece[0]) - 1
        while at < stop_row:
            first, last, file, block, offset = pieces[number]
            assert first <= at < last, "a row of the run is in none of its files"
            end = min(last, stop_row)
            held = self._read(file, block)
            data += held[offset + (at - first) * size : offset + (end - first) * size]
            at, number = end, number + 1
        return memoryview(data)

    def tail(self, position: int) -> bytes:
        file = self._tails[position]
        try:
            return next(data for at, data, _ in file.read_tails(position) if at == position)
        except BankCorrupt as error:
            raise BrokenLink(file.header.bank_id, error) from error

    def check(self) -> None:
        """The rows never change; this is where a merge is given up."""
        if self._stop.is_set():
            raise SourceMoved

    def close(self) -> None:
        """The files are closed by who opened them."""

    def _read(self, file: BankFile, block: RowBlock) -> memoryview:
        if self._block is not block:
            start, end = block.section.block(block.index)
            self._data = memoryview(bytearray(end - start))
            try:
                file.read_block(block.section, block.index, self._data)
            except BankCorrupt as error:
                raise BrokenLink(file.header.bank_id, error) from error
            self._block = block
        return self._data
