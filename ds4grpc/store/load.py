"""Filling a slot from the files of a chain.

Owns the order of reads and what is read from which file. Knows no catalog and no policy. One
worker thread a load talks to the sink; a few readers, that wait for nobody, fill its buffers.

    tokens    0 ............ base1 ............ base2 ....... position
    file 0    [rows taken =======](what the parent has past base1 is another branch)
    file 1                  [rows taken ============]
    file 2                                    [rows taken ====]
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from ds4grpc.engine.banks import RowSink
from ds4grpc.errors import BankCorrupt
from ds4grpc.layout import Spans, StateLayout
from ds4grpc.store.files import Files
from ds4grpc.store.format import MAX_BLOCK_BYTES, StateForm, block_bytes, row_ranges
from ds4grpc.store.index import Entry
from ds4grpc.store.reader import BankFile, RowBlock

MAX_READS_IN_FLIGHT = 8  # jobs of at most 1 MiB: what a load takes of memory besides the slot


@dataclass(frozen=True, slots=True)
class Link:
    """One file of a chain, as the catalog has it; rows at and past `limit` are not taken."""

    bank_id: str
    parent_id: str
    base: int
    frontier: int
    limit: int
    windows: Spans
    tails: tuple[int, ...]
    path: str


class BrokenLink(Exception):
    """A file of the chain failed a check. Carries the bank whose file it is."""

    def __init__(self, bank_id: str, error: BankCorrupt) -> None:
        super().__init__(str(error))
        self.bank_id = bank_id
        self.error = error


class LoadStopped(Exception):
    """Nobody waits for this load any more."""


def links_of(chain: Sequence[tuple[Entry, str]]) -> tuple[Link, ...]:
    """The links of a chain of entries and their paths, root first."""
    limits = [entry.base for entry, _ in chain[1:]] + [chain[-1][0].frontier]
    return tuple(
        Link(
            bank_id=entry.bank_id,
            parent_id=entry.parent_id,
            base=entry.base,
            frontier=entry.frontier,
            limit=limit,
            windows=entry.windows,
            tails=entry.tails,
            path=path,
        )
        for (entry, path), limit in zip(chain, limits, strict=True)
    )


def held_by(links: Iterable[Link]) -> tuple[Spans, tuple[int, ...]]:
    """The window tokens and tail positions that a chain holds for its last bank."""
    windows = Spans()
    tails: set[int] = set()
    for link in links:
        windows |= link.windows.clip(0, link.limit)
        tails.update(position for position in link.tails if position <= link.limit)
    return windows, tuple(sorted(tails))


def load_bytes(links: Iterable[Link], position: int, layout: StateLayout) -> int:
    """Bytes that `fill` reads: the blocks that hold anything below `position`."""
    total = 0
    for link in links:
        stop = min(link.limit, position)
        for rows in layout.rows:
            ranges = row_ranges(rows, link.base, link.frontier, link.windows)
            wanted = sum(max(0, min(end, rows.num_rows(stop)) - start) for start, end in ranges)
            held = sum(end - start for start, end in ranges)
            total += _prefix_bytes(wanted, held, rows.row_bytes)
        if layout.tail_bytes:
            wanted = sum(tail <= stop for tail in link.tails)
            total += _prefix_bytes(wanted, len(link.tails), layout.tail_bytes)
    return total


def _prefix_bytes(wanted: int, held: int, unit_bytes: int) -> int:
    size = block_bytes(unit_bytes)
    return min(-(-wanted * unit_bytes // size) * size, held * unit_bytes)


@dataclass(slots=True)
class _Read:
    """A block on its way: into the sink itself, or into `bounce` when not all of it is wanted."""

    block: RowBlock
    row_bytes: int
    view: memoryview
    bounce: bool


@dataclass(slots=True)
class _Job:
    """Blocks of one file that one reader reads, together about 1 MiB."""

    file: BankFile
    reads: list[_Read] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(slots=True)
class Load:
    """One load. `fill` blocks and runs in a worker thread; `stop` from any thread ends it."""

    files: Files
    form: StateForm
    readers: Executor  # its threads must not run `fill`
    stop: threading.Event = field(default_factory=threading.Event)

    def fill(self, links: Sequence[Link], position: int, sink: RowSink) -> int:
        """Fills the sink with what the chain holds below `position`; returns the bytes read.

        When it returns or raises, nothing touches the sink's memory any more.
        Raises BrokenLink, LoadStopped.
        """
        total = 0
        for link in links:
            try:
                with BankFile.open(self.files, link.path, self.form) as file:
                    _check(file, link)
                    total += self._fill_from(file, min(link.limit, position), sink)
            except BankCorrupt as error:
                raise BrokenLink(link.bank_id, error) from error
        return total

    def _fill_from(self, file: BankFile, stop_tokens: int, sink: RowSink) -> int:
        total = 0
        flying: deque[tuple[_Job, Future[None]]] = deque()
        try:
            for job in self._jobs(file, stop_tokens, sink):
                if len(flying) == MAX_READS_IN_FLIGHT:
                    total += _land(*flying.popleft(), sink)
                if self.stop.is_set():
                    raise LoadStopped
                flying.append((job, self.readers.submit(_read, job)))
            while flying:
                total += _land(*flying.popleft(), sink)
        finally:
            for _, future in flying:  # after an error: until the last buffer is left alone
                future.exception()
        if self.form.layout.tail_bytes:
            for position, tail, read_bytes in file.read_tails(stop_tokens):
                sink.put_tail(position, tail)
                total += read_bytes
        return total

    def _jobs(self, file: BankFile, stop_tokens: int, sink: RowSink) -> Iterator[_Job]:
        job = _Job(file)
        for block in file.row_blocks(stop_tokens):
            row_bytes = self.form.layout.rows[block.plane].row_bytes
            if block.is_whole(row_bytes):
                piece = block.pieces[0]
                view = sink.view(block.plane, piece.start_row, piece.stop_row)
                assert len(view) == block.num_bytes
                read = _Read(block, row_bytes, view, bounce=False)
            else:
                view = memoryview(bytearray(block.num_bytes))
                read = _Read(block, row_bytes, view, bounce=True)
            if job.num_bytes + block.num_bytes > MAX_BLOCK_BYTES and job.reads:
                yield job
                job = _Job(file)
            job.reads.append(read)
            job.num_bytes += block.num_bytes
        if job.reads:
            yield job


def _read(job: _Job) -> None:
    for read in job.reads:
        job.file.read_block(read.block.section, read.block.index, read.view)


def _land(job: _Job, future: Future[None], sink: RowSink) -> int:
    future.result()
    for read in job.reads:
        for piece in read.block.pieces:
            if read.bounce:
                size = (piece.stop_row - piece.start_row) * read.row_bytes
                target = sink.view(read.block.plane, piece.start_row, piece.stop_row)
                target[:] = read.view[piece.offset : piece.offset + size]
            sink.done(read.block.plane, piece.start_row, piece.stop_row)
    return job.num_bytes


def _check(file: BankFile, link: Link) -> None:
    """The file must be what the catalog promised when the load was decided."""
    header = file.header
    actual = (header.parent_id, header.frontier, header.windows, header.tails)
    if actual != (link.parent_id, link.frontier, link.windows, link.tails):
        raise BankCorrupt("the file is not the one that the catalog knows", kind="identity")
