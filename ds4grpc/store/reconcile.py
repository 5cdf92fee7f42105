"""Making index and catalog agree with the files: at every start, and on request.

Owns what is adopted, dropped and quarantined. Knows no lookup and no writing of banks. Coroutines
on the event loop, in tasks that the store owns; the folder is read in worker threads. Files are
the truth: a row only spares reading one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ds4grpc.bank import Trust
from ds4grpc.errors import BankCorrupt
from ds4grpc.store.delta import entry_of
from ds4grpc.store.folder import Found, FoundFile
from ds4grpc.store.format import StateForm
from ds4grpc.store.index import Entry, Index
from ds4grpc.store.keys import Mark, bank_marks
from ds4grpc.store.reader import BankFile
from ds4grpc.store.shelf import Shelf

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What became of the folder: banks now known, taken from files without rows, rows dropped
    for want of a file, files that failed a check."""

    num_banks: int
    num_adopted: int
    num_dropped: int
    num_quarantined: int


@dataclass(slots=True)
class _Sorted:
    """Files and rows brought together."""

    kept: list[Entry] = field(default_factory=list)  # row and file agree
    adopted: list[tuple[Entry, list[Mark]]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)  # paths for the quarantine
    faults: list[str] = field(default_factory=list)  # kinds of what failed
    spare: list[tuple[str, int]] = field(default_factory=list)  # second files of one bank


async def reconcile(shelf: Shelf, form: StateForm, known: Iterable[Entry]) -> Reconciled:
    """Rebuilds the index from the folder and `known`, the entries of rows or of the index.

    `shelf.changes` must be held, and no bank be being written. Raises OSError, CatalogError.
    """
    rows = {entry.bank_id: entry for entry in known}
    found = await shelf.run(shelf.folder.scan)
    await shelf.run(shelf.folder.sweep, found.stale)
    result = await shelf.run(_sort, shelf, form, rows, found)
    for kind in result.faults:
        shelf.observer.restored(kind, 0.0, 0)
    index, orphans = await shelf.run(_family, result, found)
    shelf.index = index
    shelf.version += 1
    shelf.other_bytes = found.other_bytes
    bad = result.bad + [shelf.folder.bank_path(each.bank_id, each.base) for each in orphans]
    if bad or found.odd:
        log.warning("bank files quarantined files=%d", len(bad) + len(found.odd))
        await shelf.run(shelf.folder.quarantine, bad + found.odd)
    markers = {bank_id for bank_id in found.pinned | found.hidden if index.get(bank_id) is None}
    await shelf.run(shelf.folder.sweep_markers, markers)
    if result.spare:
        dead, _ = await shelf.run(shelf.folder.kill, result.spare)
        await shelf.run(shelf.folder.bury, dead, ())
    adopted = [
        (entry, marks)
        for read, marks in result.adopted
        if (entry := index.get(read.bank_id)) is not None
    ]
    dropped = [bank_id for bank_id in rows if index.get(bank_id) is None]
    if dropped:
        await shelf.ask("rescan", shelf.catalog.remove(dropped))
    if adopted:
        await shelf.run(_sync_shards, shelf, {entry.bank_id[:2] for entry, _ in adopted})
        await shelf.ask("rescan", shelf.catalog.add(adopted))
    await shelf.measure()
    await shelf.measure_foreign()
    return Reconciled(len(index), len(adopted), len(dropped), len(bad) + len(found.odd))


def _sync_shards(shelf: Shelf, shards: Iterable[str]) -> None:
    """An adopted file's name may not have been synced when its writer died."""
    for shard in shards:
        shelf.folder.files.sync_folder(os.path.join(shelf.folder.path, shard))


def _sort(shelf: Shelf, form: StateForm, rows: dict[str, Entry], found: Found) -> _Sorted:
    """Which file goes with which row; opens those without. Blocking."""
    result = _Sorted()
    by_bank: dict[str, list[FoundFile]] = {}
    for file in found.files:
        by_bank.setdefault(file.bank_id, []).append(file)
    for bank_id, files in by_bank.items():
        row = rows.get(bank_id)
        # The row says which of two files counts; else the one that needs fewer ancestors.
        files.sort(key=lambda file: (row is None or file.base != row.base, file.base))
        settled = False
        for file in files:
            if settled:
                result.spare.append((file.bank_id, file.base))
            elif row is not None and Trust.QUARANTINED in row.trust:
                result.bad.append(file.path)  # its writer died before it could move the file
            elif row is not None and (file.base, file.size_bytes) == (row.base, row.size_bytes):
                result.kept.append(row)
                settled = True
            else:
                settled = _adopt(shelf, form, file, result)
    return result


def _adopt(shelf: Shelf, form: StateForm, file: FoundFile, result: _Sorted) -> bool:
    """Reads header, ids and records of a file without a row; False when it is bad."""
    try:
        with BankFile.open(shelf.folder.files, file.path, form) as bank:
            content, header = bank.read_content(), bank.header
    except BankCorrupt as error:
        log.warning("bank file refused file=%s detail=%s", os.path.basename(file.path), error)
        result.faults.append(error.kind)
        result.bad.append(file.path)
        return False
    entry = entry_of(header, file.size_bytes, content.hidden, content.records)
    marks = bank_marks(header.namespace, content.ids, content.records, header.base)
    result.adopted.append((entry, marks))
    return True


def _family(result: _Sorted, found: Found) -> tuple[Index, list[Entry]]:
    """The index of all banks whose whole chain is there, and those whose is not.

    Made of copies: the entries given may be those of the index that is still in use.
    """
    index = Index()
    orphans: list[Entry] = []
    entries = result.kept + [entry for entry, _ in result.adopted]
    for entry in sorted(entries, key=lambda entry: entry.base):  # a parent's base is lower
        parent = index.get(entry.parent_id) if entry.parent_id else None
        if entry.parent_id and not (
            parent is not None
            and parent.base < entry.base <= parent.frontier
            and parent.namespace == entry.namespace
        ):
            orphans.append(entry)
            continue
        index.add(
            replace(
                entry,
                children={},
                pinned=entry.bank_id in found.pinned,
                hidden=entry.bank_id in found.hidden,
            )
        )
    index.order_children()
    return index, orphans
