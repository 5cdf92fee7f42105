"""What lies in the folder and is of no use to anybody: found, removed, and reported.

Owns what counts as garbage. Knows no engine and no tenant. Coroutines on the event loop, in tasks
that the store owns; the folder is read in worker threads. All but quarantined files go by
themselves sooner or later, at the next upkeep or start; this is for who does not want to wait.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from ds4grpc.store.folder import Folder, Found
from ds4grpc.store.index import Entry, Index
from ds4grpc.store.shelf import Shelf


class Garbage(enum.StrEnum):
    """Why a file is of no use."""

    EXPIRED = "expired"  # a bank whose time to live is over
    DELETED = "deleted"  # a deleted bank whose rows nobody needs any more
    RETIRED = "retired"  # a merged file has taken its place
    LEFTOVER = "leftover"  # of a write or a removal that was cut short, or of a bank's marker
    ORPHAN = "orphan"  # a bank file without a bank: adopted, or else quarantined
    QUARANTINED = "quarantined"  # failed a check


@dataclass(frozen=True, slots=True)
class Piece:
    """One file that is garbage; `size_bytes` is what it occupies."""

    kind: Garbage
    path: str
    size_bytes: int


async def collect(
    shelf: Shelf, rescan: Callable[[], Awaitable[object]], *, quarantined: bool, dry_run: bool
) -> list[Piece]:
    """Removes garbage, quarantined files only when that is asked for; returns what has gone, or
    with `dry_run` what would. Nothing may be being written. `rescan` looks into files without rows.

    Raises OSError, CatalogError, StoreFailed.
    """
    async with shelf.changes:
        now = time.time()
        found = await shelf.run(shelf.folder.scan)
        dead = [*_unneeded(shelf, now)]
        strays = await shelf.run(_strays, shelf.folder, shelf.index, found, set(shelf.retired))
        pieces = [*dead, *strays, *(await shelf.run(_failed, shelf.folder) if quarantined else ())]
        # A scan starts counting anew, so its sum takes the place of what was known before.
        shelf.budget.other_bytes = found.other_bytes + sum(size for _, _, size in shelf.retired)
        shelf.budget.other_bytes += _size_of(pieces, Garbage.ORPHAN)
    if dry_run:
        return pieces
    await shelf.expire(now)
    await shelf.bury_retired()
    async with shelf.changes:
        stale = [piece for piece in pieces if piece.kind is Garbage.LEFTOVER]
        await shelf.run(shelf.folder.sweep, [piece.path for piece in stale])
        swept = await shelf.run(_gone, shelf.folder, stale)
        shelf.budget.other_bytes -= _size_of(swept, Garbage.LEFTOVER)
    if any(piece.kind is Garbage.ORPHAN for piece in pieces):
        await rescan()  # which counts anew, too
    async with shelf.changes:
        if quarantined:
            await shelf.run(shelf.folder.trim_quarantine, 0)
        await shelf.budget.measure()
    return await shelf.run(_gone, shelf.folder, pieces)


def _unneeded(shelf: Shelf, now: float) -> Iterable[Piece]:
    """The files of banks that have expired or are deleted, and of those whose place others took,
    as far as nobody needs or reads them."""
    index, held = shelf.index, shelf.leases.held()
    ends: dict[str, bool] = {}

    def is_free(entry: Entry) -> bool:
        """Whether nothing keeps it; a parent goes with the last of its children."""
        known = ends.get(entry.bank_id)
        if known is None:
            ends[entry.bank_id] = False
            known = (entry.hidden or entry.is_expired(now)) and entry.bank_id not in held
            known = known and all(is_free(child) for child in index.children(entry))
            ends[entry.bank_id] = known
        return known

    candidates = [*index.hidden(), *filter(None, map(index.get, list(index.mortal)))]
    for entry in {entry.bank_id: entry for entry in candidates}.values():
        if is_free(entry):
            kind = Garbage.DELETED if entry.hidden else Garbage.EXPIRED
            path = shelf.folder.bank_path(entry.bank_id, entry.base)
            yield Piece(kind, path, entry.size_bytes)
    for bank_id, base, size_bytes in shelf.retired:
        path = shelf.folder.bank_path(bank_id, base)
        if not shelf.leases.needs(path):
            yield Piece(Garbage.RETIRED, path, size_bytes)


def _strays(
    folder: Folder, index: Index, found: Found, retired: set[tuple[str, int, int]]
) -> list[Piece]:
    """Files that belong to nothing in the index. Blocking."""
    markers = [
        os.path.join(folder.path, bank_id[:2], bank_id + suffix)
        for suffix, bank_ids in ((".pin", found.pinned), (".hidden", found.hidden))
        for bank_id in bank_ids
        if index.get(bank_id) is None
    ]
    pieces = [_piece(folder, Garbage.LEFTOVER, path) for path in (*found.stale, *markers)]
    spare = {(bank_id, base) for bank_id, base, _ in retired}
    for file in found.files:
        entry = index.get(file.bank_id)
        in_use = entry is not None and entry.base == file.base
        if not in_use and (file.bank_id, file.base) not in spare:
            pieces.append(_piece(folder, Garbage.ORPHAN, file.path))
    return pieces


def _failed(folder: Folder) -> list[Piece]:
    """Quarantined files. Blocking."""
    return [
        Piece(
            Garbage.QUARANTINED,
            os.path.join(folder.quarantine_path, seen.name),
            seen.size_on_disk_bytes,
        )
        for seen in folder.quarantined()
        if not seen.is_folder
    ]


def _size_of(pieces: Iterable[Piece], kind: Garbage) -> int:
    return sum(piece.size_bytes for piece in pieces if piece.kind is kind)


def _piece(folder: Folder, kind: Garbage, path: str) -> Piece:
    seen = folder.files.seen(path)
    return Piece(kind, path, seen.size_on_disk_bytes if seen is not None else 0)


def _gone(folder: Folder, pieces: Iterable[Piece]) -> list[Piece]:
    """Those that are no longer where they were. Blocking. An orphan that is a bank again stays."""
    return [piece for piece in pieces if folder.files.seen(piece.path) is None]
