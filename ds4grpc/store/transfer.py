"""Banks that leave as one file, and files that come from elsewhere.

Owns both ways. Knows no tenants and no gRPC. Coroutines on the event loop; files are read, hashed
and written in worker threads, a piece at a time. What a caller begins ends with its block, however
it leaves: leases, descriptors and reserved bytes are given back by tasks that the store owns.

    export   lease -> blocks read for their checksums -> header -> blocks read again, sent
    import   incoming/x.tmp -> all of it checked -> header of the new owner -> published as any bank

An exported file is a bank file with base 0 of a namespace that is nobody's, so neither its id nor
its header say whose it was.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec, TypeVar

from ds4grpc.bank import PersistReason, Trust, bank_id
from ds4grpc.engine.banks import SourceMoved
from ds4grpc.errors import (
    BankCorrupt,
    BankNotFound,
    InvalidRequest,
    Overloaded,
    PreconditionFailed,
    StoreFailed,
    StoreFull,
)
from ds4grpc.store.compact import ChainRows
from ds4grpc.store.content import FileContent
from ds4grpc.store.database import CatalogError
from ds4grpc.store.delta import entry_of
from ds4grpc.store.files import Files
from ds4grpc.store.format import (
    Header,
    StateForm,
    aligned,
    checksum,
    data_start,
    encode_header,
    encode_preamble,
    with_checksums,
)
from ds4grpc.store.index import Entry
from ds4grpc.store.keys import bank_marks
from ds4grpc.store.load import BrokenLink, Link, held_by
from ds4grpc.store.match import Finder, LeasedBank
from ds4grpc.store.reader import BankFile, open_header
from ds4grpc.store.shelf import Shelf
from ds4grpc.store.tasks import OwnedTasks
from ds4grpc.store.writer import Draft, block_of, draft_file

P = ParamSpec("P")
T = TypeVar("T")

NOBODY = bytes(32)  # the namespace of exported files: no tenant's tag is all zeros
# At once: each takes a thread while it reads or writes, and an export a lease and descriptors.
MAX_EXPORTS = 4
MAX_IMPORTS = 2
RETRY_SECONDS = 5.0
RESERVE_BYTES = 8 << 20  # room is made as bytes really come, not for what a client says
CHUNK_BYTES = 512 << 10
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Outgoing:
    """A bank as one file: what it will be, and its bytes once `prepare` has run."""

    def __init__(self, files: Files, form: StateForm, links: tuple[Link, ...], ttl: float | None):
        self._files = files
        self._form = form
        self._links = links
        self._ttl_seconds = ttl
        self._stop = threading.Event()
        self._busy = threading.Lock()  # held by the one thread that reads
        self._opened = ExitStack()
        self._sha256 = hashlib.sha256()
        self._rest: Iterator[bytes] = iter(())
        self.size_bytes = 0
        self.frontier = links[-1].frontier

    @property
    def sha256(self) -> bytes:
        """Of all chunks so far."""
        return self._sha256.digest()

    def prepare(self) -> None:
        """Reads all rows for their checksums. Blocking. Raises BrokenLink, SourceMoved."""
        with self._busy:
            files = []
            for link in self._links:
                try:
                    file = BankFile.open(self._files, link.path, self._form)
                    files.append(self._opened.enter_context(file))
                    content = file.read_content()
                except BankCorrupt as error:
                    raise BrokenLink(link.bank_id, error) from error
            draft = self._draft(files[-1].header, content)
            limits = [(file, link.limit) for file, link in zip(files, self._links, strict=True)]
            rows = ChainRows(limits, self._form, self._stop)
            checksums: list[list[int]] = []
            for section in draft.header.sections:
                values = []
                for index in range(section.num_blocks):
                    rows.check()
                    values.append(checksum(block_of(section, index, draft, rows)))
                checksums.append(values)
            header_json = encode_header(with_checksums(draft.header, checksums))
            self.size_bytes = draft.size_bytes
            self._rest = _image(draft, header_json, rows)

    def _draft(self, last: Header, content: FileContent) -> Draft:
        windows, tails = held_by(self._links)
        header = replace(
            last,
            bank_id=bank_id(NOBODY, self._form.fingerprint, content.ids),
            parent_id="",
            base=0,
            namespace=NOBODY,
            reason=PersistReason.ADMIN,
            created_at_ms=int(time.time() * 1000),
            ttl_seconds=self._ttl_seconds,
            windows=windows,
            tails=tails,
            sections=(),
        )
        draft = draft_file(header, content, self._form)
        draft.check()
        return draft

    def read(self) -> bytes:
        """The next chunk, b"" after the last. Blocking. Raises BrokenLink, SourceMoved."""
        with self._busy:
            if self._stop.is_set():
                raise SourceMoved
            chunk = next(self._rest, b"")
            self._sha256.update(chunk)
            return chunk

    def stop(self) -> None:
        """Ends what is being read, soon. Any thread."""
        self._stop.set()

    def close(self) -> None:
        """Waits until nothing is being read. Blocking."""
        with self._busy:
            self._rest = iter(())
            self._opened.close()


def _image(draft: Draft, header_json: bytes, rows: ChainRows) -> Iterator[bytes]:
    """The bytes of a file in pieces of at most CHUNK_BYTES."""
    head = encode_preamble(header_json) + header_json
    yield from _pieces(head.ljust(data_start(len(header_json)), b"\0"))
    for section in draft.header.sections:
        for index in range(section.num_blocks):
            yield from _pieces(block_of(section, index, draft, rows))
        end = section.offset + section.length
        if padding := aligned(end) - end:
            yield bytes(padding)


def _pieces(data: bytes | bytearray | memoryview) -> Iterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of a file. `already_stored`: its bank was here before."""

    bank_id: str
    frontier: int
    size_bytes: int
    already_stored: bool


@dataclass(frozen=True, slots=True)
class _Checked:
    """A file that is whole and of this model."""

    header: Header
    header_bytes: int
    content: FileContent


class Incoming:
    """A file that is being received; see `Transfer.receive`."""

    def __init__(self, transfer: Transfer, path: str, size_bytes: int) -> None:
        self._transfer = transfer
        self._shelf = transfer.shelf
        self._files = transfer.shelf.folder.files
        self._path = path
        self._declared_bytes = size_bytes
        self._turn = asyncio.Lock()  # of the steps, which outlive a caller that gives up
        self._descriptor: int | None = None
        self._reserved_bytes = 0
        self._num_bytes = 0
        self._sha256 = hashlib.sha256()

    async def add(self, chunk: bytes) -> None:
        """Raises InvalidRequest, StoreFull, StoreFailed."""
        if self._declared_bytes and self._num_bytes + len(chunk) > self._declared_bytes:
            raise InvalidRequest(
                f"the file has more than the {self._declared_bytes} bytes that were announced;"
                " announce all of it, or 0",
                field="chunk",
                reason="TOO_LONG",
            )
        await self._transfer.finish(self._step(self._add(chunk)))

    async def publish(self, space: bytes, sha256: bytes, *, pin: bool) -> Imported:
        """Checks the file and makes it a bank of that namespace.

        Raises InvalidRequest, PreconditionFailed, StoreFull, StoreFailed.
        """
        return await self._transfer.finish(self._step(self._publish(space, sha256, pin)))

    async def end(self) -> None:
        """Gives everything back; what has been published stays."""
        async with self._turn:
            await self._shelf.run(self._discard)
            self._shelf.unreserve(self._reserved_bytes)
            self._reserved_bytes = 0

    async def _step(self, work: Awaitable[T]) -> T:
        async with self._turn:
            try:
                return await work
            except CatalogError as error:
                raise StoreFailed(f"the catalog refused the bank: {error}") from error
            except OSError as error:
                if error.errno in _NO_SPACE:
                    raise StoreFull(f"the disk is full: {error.strerror}") from error
                raise StoreFailed(f"the file could not be kept: {error}") from error

    async def _add(self, chunk: bytes) -> None:
        while self._num_bytes + len(chunk) > self._reserved_bytes:
            await self._shelf.reserve(RESERVE_BYTES)
            self._reserved_bytes += RESERVE_BYTES
        await self._transfer.run(self._append, chunk)

    def _append(self, chunk: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = self._files.create(self._path)
        self._sha256.update(chunk)
        self._files.write(self._descriptor, chunk, self._num_bytes, self._path)
        self._num_bytes += len(chunk)

    async def _publish(self, space: bytes, sha256: bytes, pin: bool) -> Imported:
        started = time.monotonic()
        if self._descriptor is None:
            raise InvalidRequest("the file is empty", field="chunk", reason="BANK_FILE_DAMAGED")
        if sha256 != self._sha256.digest():
            raise InvalidRequest(
                "the SHA-256 of the chunks is not that of `end`: bytes were lost or changed on the"
                " way; send the file again",
                field="end.sha256",
                reason="BANK_FILE_DAMAGED",
            )
        checked = await self._transfer.run(self._check)
        entry = await self._transfer.run(self._rewrite, checked, space)
        entry.pinned = pin
        content = checked.content
        marks = await self._transfer.run(
            bank_marks, space, content.ids, content.records, 0, entry.head
        )
        async with self._transfer.writing:
            known = self._shelf.index.get(entry.bank_id)
            if known is not None:
                await self._again(known, pin=pin)
                return Imported(known.bank_id, known.frontier, known.size_bytes, True)
            folder = self._shelf.folder
            await self._shelf.run(folder.adopt, self._path, entry.bank_id, entry.base)
            self._reserved_bytes -= entry.size_bytes
            try:
                await self._shelf.publish(entry, marks)
            except BaseException:
                self._reserved_bytes += entry.size_bytes
                raise
        self._shelf.condition.worked()
        seconds = time.monotonic() - started
        self._shelf.observer.persisted(entry.reason, seconds, entry.size_bytes)
        return Imported(entry.bank_id, entry.frontier, entry.size_bytes, False)

    async def _again(self, known: Entry, *, pin: bool) -> None:
        """The bank is here; one that is deleted or expired is wanted again."""
        now = time.time()
        if Trust.QUARANTINED in known.trust:
            raise StoreFailed("the stored bank is being quarantined; retry later")
        if not known.is_usable(now):
            await self._shelf.revive(known.bank_id, now)
        if pin:
            await self._shelf.set_pinned(known.bank_id, pinned=True)

    def _check(self) -> _Checked:
        """Everything in the file. Blocking. Raises InvalidRequest, PreconditionFailed."""
        form = self._transfer.form
        try:
            with open_header(self._files, self._path) as opened:
                _refuse_other_model(opened.header, form)
                header_bytes = opened.header_bytes
            with BankFile.open(self._files, self._path, form, is_named=False) as file:
                content = file.read_content()
                file.verify()
                file.check_padding()
                if file.header.base:
                    raise BankCorrupt("it holds a part of a bank only", kind="format")
                return _Checked(file.header, header_bytes, content)
        except BankCorrupt as error:
            raise InvalidRequest(
                f"the file is no whole bank: {error.message}; export it again",
                field="chunk",
                reason="BANK_FILE_DAMAGED",
                metadata=error.metadata,
            ) from error

    def _rewrite(self, checked: _Checked, space: bytes) -> Entry:
        """Makes it its new owner's: only the header says whose it is. Blocking."""
        now = time.time()
        fingerprint = self._transfer.form.fingerprint
        header = replace(
            checked.header,
            bank_id=bank_id(space, fingerprint, checked.content.ids),
            namespace=space,
            reason=PersistReason.ADMIN,
            created_at_ms=int(now * 1000),
        )
        # JSON ends in as much white space as one likes; the sections stay where they are.
        header_json = encode_header(header).ljust(checked.header_bytes)
        if data_start(len(header_json)) != data_start(checked.header_bytes):
            raise InvalidRequest(
                "the file was not made by ExportBank", field="chunk", reason="BANK_FILE_DAMAGED"
            )
        assert self._descriptor is not None
        head = (encode_preamble(header_json) + header_json).ljust(
            data_start(len(header_json)), b"\0"
        )
        self._files.write(self._descriptor, head, 0, self._path)
        self._files.sync_data(self._descriptor, self._path)
        content = checked.content
        entry = entry_of(header, self._num_bytes, content.hidden, content.records)
        entry.verified_at = now
        return entry

    def _discard(self) -> None:
        if self._descriptor is not None:
            self._files.close(self._descriptor)
            self._descriptor = None
            self._shelf.folder.sweep([self._path])


def _refuse_other_model(header: Header, form: StateForm) -> None:
    ours = (form.fingerprint.hex(), form.layout.layout_id)
    theirs = (header.fingerprint.hex(), header.layout_id)
    if ours != theirs:
        raise PreconditionFailed(
            f"the file belongs to another model or numeric mode: fingerprint {theirs[0]}, layout"
            f" {theirs[1]}; this server has {ours[0]}, {ours[1]}; import it where that model is"
            " served",
            reason="OTHER_MODEL",
            metadata={
                **{"file_fingerprint": theirs[0], "file_layout": theirs[1]},
                **{"server_fingerprint": ours[0], "server_layout": ours[1]},
            },
        )


class Transfer:
    """Exports and imports of one store."""

    def __init__(self, finder: Finder, tasks: OwnedTasks, writing: asyncio.Lock) -> None:
        """`writing` is held while a bank is written."""
        self.shelf: Shelf = finder.shelf
        self.form = finder.form
        self.writing = writing
        self.finish = tasks.finish
        self._finder = finder
        self._tasks = tasks
        self._num_exports = 0
        self._num_imports = 0

    @asynccontextmanager
    async def send(self, bank_id: str) -> AsyncIterator[Outgoing]:
        """A stored bank as one file, its rows read once already. Raises BankNotFound, Overloaded,
        BankCorrupt."""
        entry = self.shelf.index.get(bank_id)
        if entry is None or entry.hidden or Trust.QUARANTINED in entry.trust:
            raise BankNotFound(f"no bank {bank_id!r} is stored; `ds4grpc banks ls` shows which are")
        if self._num_exports >= MAX_EXPORTS:
            raise _too_many("exports", self._num_exports)
        self._num_exports += 1
        lease = self._finder.lease(entry)
        files = self.shelf.folder.files
        outgoing = Outgoing(files, self.form, lease.links, entry.ttl_seconds)
        try:
            await self._read(outgoing.prepare)
            yield outgoing
        finally:
            outgoing.stop()
            await self._tasks.finish(self._end_export(outgoing, lease))

    async def next_chunk(self, outgoing: Outgoing) -> bytes:
        """What follows of a file; b"" at its end. Raises BankCorrupt."""
        return await self._read(outgoing.read)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs blocking work in a thread that no load waits for."""
        loop = asyncio.get_running_loop()
        pool = self.shelf.threads.transfer
        return await loop.run_in_executor(pool, partial(work, *args, **kwargs))

    async def _read(self, work: Callable[[], T]) -> T:
        try:
            return await self._tasks.finish(self.run(work))
        except BrokenLink as broken:
            self.shelf.observer.restored(broken.error.kind, 0.0, 0)
            await self._tasks.finish(self.shelf.quarantine(broken.bank_id, broken.error.message))
            raise broken.error from broken

    async def _end_export(self, outgoing: Outgoing, lease: LeasedBank) -> None:
        try:
            await self.shelf.run(outgoing.close)
        finally:
            lease.release()
            self._num_exports -= 1

    @asynccontextmanager
    async def receive(self, size_bytes: int) -> AsyncIterator[Incoming]:
        """A place for a file of that size (0: not known). Raises Overloaded, StoreFull,
        StoreFailed."""
        if self._num_imports >= MAX_IMPORTS:
            raise _too_many("imports", self._num_imports)
        quota_bytes = self.shelf.budget.quota_bytes
        if size_bytes > quota_bytes:
            raise StoreFull(
                f"the file has {size_bytes} bytes, the disk cap is {quota_bytes}; raise"
                " --kv-disk-space-mb",
                metadata={"quota_bytes": str(quota_bytes)},
            )
        self._num_imports += 1
        folder = self.shelf.folder
        path = os.path.join(folder.incoming_path, f"{secrets.token_hex(8)}.tmp")
        incoming = Incoming(self, path, size_bytes)
        try:
            yield incoming
        finally:
            await self._tasks.finish(self._end_import(incoming))

    async def _end_import(self, incoming: Incoming) -> None:
        try:
            await incoming.end()
        finally:
            self._num_imports -= 1


def _too_many(what: str, count: int) -> Overloaded:
    return Overloaded(
        f"{count} {what} run already, the most at once; retry later",
        retry_seconds=RETRY_SECONDS,
        quota=what,
    )
