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
from ds4grpc.store.catalog import BANKS_A_BATCH
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
    rowless: list[list[FoundFile]] = field(default_factory=list)  # of each bank, best first
    bad: list[str] = field(default_factory=list)  # paths for the quarantine
    faults: list[str] = field(default_factory=list)  # kinds of what failed
    spare: list[FoundFile] = field(default_factory=list)  # second files of one bank


async def reconcile(shelf: Shelf, form: StateForm, known: Iterable[Entry]) -> Reconciled:
    """Rebuilds the index from the folder and `known`, entries of rows; it keeps some of them.

    `shelf.changes` must be held, and no bank be being written. Raises OSError, CatalogError.
    """
    rows = {entry.bank_id: entry for entry in known}
    found = await shelf.run(shelf.folder.scan)
    if found.stale:
        await shelf.run(shelf.folder.sweep, found.stale)
        found = await shelf.run(shelf.folder.scan)  # what could not be removed still counts
    result = await shelf.run(_sort, rows, found)
    outdated = await shelf.run(_mark, result.kept, found)
    adopted = await _adopt_all(shelf, form, result, found)
    for kind in result.faults:
        shelf.observer.restored(kind, 0.0, 0)
    index, orphans = await shelf.run(_family, [*result.kept, *adopted], form.layout.bytes_per_token)
    shelf.index = index
    shelf.version += 1
    for bank_id in outdated:
        shelf.rows.note(bank_id)
    shelf.budget.other_bytes = found.other_bytes
    bad = result.bad + [
        shelf.folder.bank_path(each.bank_id, each.base)
        for each in orphans
        if each.bank_id not in found.hidden
    ]
    # A deleted bank whose rows nobody needs: its remover died before the file had gone.
    unwanted = {each.bank_id for each in orphans} & found.hidden
    result.spare += [file for file in found.files if file.bank_id in unwanted]
    if bad or found.odd:
        log.warning("bank files quarantined files=%d", len(bad) + len(found.odd))
        await shelf.run(shelf.folder.quarantine, bad + found.odd)
    markers = {bank_id for bank_id in found.pinned | found.hidden if index.get(bank_id) is None}
    await shelf.run(shelf.folder.sweep_markers, markers)
    await shelf.retire_found(result.spare)
    dropped = [bank_id for bank_id in rows if index.get(bank_id) is None]
    lost = [entry.bank_id for entry in adopted if index.get(entry.bank_id) is None]
    if dropped or lost:
        await shelf.rows.ask("rescan", shelf.rows.catalog.remove(dropped + lost))
    await shelf.budget.measure()
    await shelf.budget.measure_foreign()
    return Reconciled(len(index), len(adopted) - len(lost), len(dropped), len(bad) + len(found.odd))


def _mark(entries: Iterable[Entry], found: Found) -> list[str]:
    """Pins and hides what the markers say, which count; returns whose rows say something else."""
    outdated = []
    for entry in entries:
        marked = (entry.bank_id in found.pinned, entry.bank_id in found.hidden)
        if (entry.pinned, entry.hidden) != marked:
            entry.pinned, entry.hidden = marked
            outdated.append(entry.bank_id)
    return outdated


async def _adopt_all(shelf: Shelf, form: StateForm, result: _Sorted, found: Found) -> list[Entry]:
    """Reads the files without rows and writes their rows, a few hundred at a time: what leads to
    all of them would not fit in memory. A row whose bank turns out to be an orphan does no harm.
    """
    adopted: list[Entry] = []
    for start in range(0, len(result.rowless), BANKS_A_BATCH):
        batch = result.rowless[start : start + BANKS_A_BATCH]
        added = await shelf.run_long(_adopt, shelf, form, batch, result)
        _mark((entry for entry, _ in added), found)
        shards = {entry.bank_id[:2] for entry, _ in added}
        await shelf.run(_sync_shards, shelf, shards)
        await shelf.rows.ask("rescan", shelf.rows.catalog.add(added))
        adopted += [entry for entry, _ in added]
    return adopted


def _sync_shards(shelf: Shelf, shards: Iterable[str]) -> None:
    """An adopted file's name may not have been synced when its writer died."""
    for shard in shards:
        shelf.folder.files.sync_folder(os.path.join(shelf.folder.path, shard))


def _sort(rows: dict[str, Entry], found: Found) -> _Sorted:
    """Which file goes with which row. Blocking."""
    result = _Sorted()
    by_bank: dict[str, list[FoundFile]] = {}
    for file in found.files:
        by_bank.setdefault(file.bank_id, []).append(file)
    for bank_id, files in by_bank.items():
        row = rows.get(bank_id)
        if row is None:
            # The one that needs fewer ancestors first.
            result.rowless.append(sorted(files, key=lambda file: file.base))
        elif Trust.QUARANTINED in row.trust:
            # Its writer died before it could move the file.
            result.bad.extend(file.path for file in files)
        else:
            _choose(row, files, result)
    return result


def _choose(row: Entry, files: list[FoundFile], result: _Sorted) -> None:
    """The row says which of a bank's files counts; when none is that one, all are looked into."""
    others = []
    is_kept = False
    for file in files:
        if not is_kept and (file.base, file.size_bytes) == (row.base, row.size_bytes):
            result.kept.append(row)
            is_kept = True
        else:
            others.append(file)
    if is_kept:
        result.spare += others
    else:
        others.sort(key=lambda file: (file.base != row.base, file.base))
        result.rowless.append(others)


def _adopt(
    shelf: Shelf, form: StateForm, batch: list[list[FoundFile]], result: _Sorted
) -> list[tuple[Entry, list[Mark]]]:
    """Reads header, ids and records of the first good file of each bank. Blocking."""
    adopted: list[tuple[Entry, list[Mark]]] = []
    for files in batch:
        is_adopted = False
        for file in files:
            if is_adopted:
                result.spare.append(file)
            elif (read := _read(shelf, form, file, result)) is not None:
                adopted.append(read)
                is_adopted = True
    return adopted


def _read(
    shelf: Shelf, form: StateForm, file: FoundFile, result: _Sorted
) -> tuple[Entry, list[Mark]] | None:
    """What a file without a row is; None when it is bad."""
    try:
        with BankFile.open(shelf.folder.files, file.path, form) as bank:
            content, header = bank.read_content(), bank.header
    except BankCorrupt as error:
        log.warning("bank file refused file=%s detail=%s", os.path.basename(file.path), error)
        result.faults.append(error.kind)
        result.bad.append(file.path)
        return None
    entry = entry_of(header, file.size_bytes, content.hidden, content.records)
    marks = bank_marks(header.namespace, content.ids, content.records, header.base, header.head)
    return entry, marks


def _family(entries: list[Entry], bytes_per_token: float) -> tuple[Index, list[Entry]]:
    """The index of all banks whose whole chain is there, and those whose is not."""
    index = Index(bytes_per_token)
    orphans: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.base):  # a parent's base is lower
        parent = index.get(entry.parent_id) if entry.parent_id else None
        if entry.parent_id and not (
            parent is not None
            and parent.base < entry.base <= parent.frontier
            and parent.namespace == entry.namespace
        ):
            orphans.append(entry)
            continue
        index.add(entry)
    index.order_children()
    return index, orphans


def copies(entries: Iterable[Entry]) -> list[Entry]:
    """Entries for `reconcile` of an index that stays in use meanwhile. Blocking."""
    return [replace(entry, children={}) for entry in entries]
