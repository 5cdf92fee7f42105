"""The folder of one fingerprint: its names, its lock, and the steps by which files come and go.

    cap.lock                      held while a process takes room below the shared cap
    <folder>/                     one for each model that shares the folder
      catalog.db  -wal  -shm      the index; rebuilt from the files when it is lost
      lock                        held for as long as a process owns the folder; says how many
                                  bytes it may still write, so that others count them
      ab/<bank id>.<base>.bank    banks, in 256 folders by the id's first two digits
      ab/<bank id>.pin            the bank is pinned
      ab/<bank id>.hidden         the bank is deleted, its rows are needed by children
      ab/*.tmp  *.dead            being written, being removed: swept at start
      quarantine/                 files that failed a check, the newest few
      incoming/*.tmp              files from elsewhere, not checked yet: swept at start

Owns every path and the order of operations on it. Knows no rows and no policy. Blocking: worker
threads only. A pair of marker and bank changes under the store's own lock.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ds4grpc.errors import StoreDisabled
from ds4grpc.store.files import Files, Seen
from ds4grpc.store.format import file_name, is_bank_id, parse_file_name

log = logging.getLogger(__name__)

MAX_QUARANTINED_FILES = 16  # enough to look into a fault, little beside any cap
_CATALOG_NAMES = ("catalog.db", "catalog.db-wal", "catalog.db-shm")
_ASIDE_SUFFIX = ".bad-"
_LOCK_NAME = "lock"
_PROBE_BYTES = 64 << 10
_CAP_LOCK_SECONDS = 5.0  # others hold it for as long as evicting takes
_CAP_LOCK_PAUSE_SECONDS = 0.005
# A folder's time of change is as coarse as the kernel's tick: what changed just now may change
# again without its time moving.
_SETTLED_SECONDS = 1.0
_SHARD_NAME = re.compile("[0-9a-f]{2}")
_FINGERPRINT_NAME = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A bank file by its name alone: nothing in it has been read."""

    bank_id: str
    base: int
    path: str
    size_bytes: int
    modified_at: float


@dataclass(slots=True)
class Found:
    """What a scan of the folder saw."""

    files: list[FoundFile] = field(default_factory=list)
    pinned: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    stale: list[str] = field(default_factory=list)  # *.tmp, *.dead
    odd: list[str] = field(default_factory=list)  # named like a bank, but no regular file
    other_bytes: int = 0  # all but bank files and what is in quarantine


def occupied_bytes(files: Files, root: str) -> int:
    """What is below a folder; nothing when it is not there. Raises OSError."""
    total, pending = 0, [root]
    while pending:
        folder = pending.pop()
        for seen in files.scan(folder):
            total += seen.size_on_disk_bytes
            if seen.is_folder:
                pending.append(os.path.join(folder, seen.name))
    return total


class Folder:
    """`<root>/<fingerprint, 16 hex>`; open it before anything else, close it last."""

    def __init__(self, files: Files, root: str, fingerprint: bytes) -> None:
        self.files = files
        self._name = fingerprint.hex()[:16]
        self._place(root)
        self._lock: int | None = None
        self.new_bytes = 0  # of folders made since the last scan
        self._shards: set[str] = set()  # known to be there
        # Other models' folders of files: time of change and bytes of what is in them.
        self._foreign: dict[str, tuple[float, int]] = {}

    def open(self) -> None:
        """Makes the folder and takes its lock. Raises StoreDisabled with the reason."""
        # Whoever names the folder may do so by a link; below it none is followed.
        self._place(os.path.realpath(self.root))
        try:
            self.files.make_folders(self.root)
            self.files.make_folder(self.path)
            self.files.restrict_folder(self.path)
            self.files.sync_folder(self.root)
            self.files.make_folder(self.quarantine_path)
            self.files.make_folder(self.incoming_path)
            self._lock = self.files.lock(self.lock_path)
            self.sweep(
                os.path.join(self.incoming_path, seen.name)
                for seen in self.files.scan(self.incoming_path)
            )
        except BlockingIOError as error:
            raise StoreDisabled(
                f"another process owns the bank folder {self.path}; stop it, choose another "
                "folder with --kv-disk-dir or turn the tier off with --no-kv-disk",
                reason="STORE_FOLDER_BUSY",
            ) from error
        except OSError as error:
            raise StoreDisabled(
                f"the bank folder {self.path} cannot be used: {error.strerror or error}; "
                "choose another with --kv-disk-dir or turn the tier off with --no-kv-disk",
                reason="STORE_FOLDER_UNUSABLE",
            ) from error

    def _place(self, root: str) -> None:
        self.root = root
        self.path = os.path.join(root, self._name)
        self.catalog_path = os.path.join(self.path, _CATALOG_NAMES[0])
        self.quarantine_path = os.path.join(self.path, "quarantine")
        self.incoming_path = os.path.join(self.path, "incoming")
        self.lock_path = os.path.join(self.path, _LOCK_NAME)

    def close(self) -> None:
        """Gives the lock back; idempotent."""
        if self._lock is not None:
            try:
                self.claim(0)
            except OSError as error:  # others count too much until the next start
                log.warning("claim of the bank folder stays error=%s", error)
            self.files.close(self._lock)
            self._lock = None

    def bank_path(self, bank_id: str, base: int) -> str:
        return os.path.join(self.path, bank_id[:2], file_name(bank_id, base))

    def temp_path(self, bank_id: str, base: int) -> str:
        """Makes the folder it lies in when it is not there. Raises OSError."""
        shard = os.path.join(self.path, bank_id[:2])
        if shard not in self._shards:
            if self.files.make_folder(shard):
                self.files.sync_folder(self.path)
                made = self.files.seen(shard)
                self.new_bytes += made.size_on_disk_bytes if made is not None else 0
            self._shards.add(shard)
        return self.bank_path(bank_id, base) + ".tmp"

    def publish(self, bank_id: str, base: int, *, pinned: bool) -> None:
        """Gives a written and synced temp file its name, for good. Raises OSError.

        Markers come first, so that a bank never is without its pin, nor with what an earlier
        bank of its name may have left.
        """
        path = self.bank_path(bank_id, base)
        self.files.unlink(os.path.join(self.path, bank_id[:2], bank_id + ".hidden"))
        if pinned:
            self._mark(bank_id, ".pin")
        else:
            self.files.unlink(os.path.join(self.path, bank_id[:2], bank_id + ".pin"))
        self.files.rename(path + ".tmp", path)
        self.files.sync_folder(os.path.dirname(path))

    def replace(self, bank_id: str, base: int) -> None:
        """Gives a written and synced temp file its name beside the bank's present file, whose
        markers stay. Raises OSError."""
        path = self.bank_path(bank_id, base)
        self.files.rename(path + ".tmp", path)
        self.files.sync_folder(os.path.dirname(path))

    def adopt(self, path: str, bank_id: str, base: int) -> None:
        """Makes a written and synced file of `incoming/` a bank's temp file. Raises OSError."""
        self.files.rename(path, self.temp_path(bank_id, base))

    def discard(self, bank_id: str, base: int) -> None:
        """Removes a temp file that will not be published. Raises OSError."""
        self.files.unlink(self.bank_path(bank_id, base) + ".tmp")

    def pin(self, bank_id: str) -> None:
        self._mark(bank_id, ".pin")
        self.files.sync_folder(os.path.join(self.path, bank_id[:2]))

    def unpin(self, bank_id: str) -> None:
        self._unmark(bank_id, ".pin")

    def hide(self, bank_id: str) -> None:
        self._mark(bank_id, ".hidden")
        self.files.sync_folder(os.path.join(self.path, bank_id[:2]))

    def unhide(self, bank_id: str) -> None:
        self._unmark(bank_id, ".hidden")

    def kill(self, banks: Iterable[tuple[str, int]]) -> tuple[list[str], list[str]]:
        """First half of removing: renames the files, for good. Between the halves the rows go.

        Returns what `bury` unlinks, and the ids of banks that could not be renamed for good: they
        have their names back. A file that is not there any more is no failure.
        """
        dead: list[str] = []
        failed: list[str] = []
        for bank_id, base in banks:
            path = self.bank_path(bank_id, base)
            try:
                self.files.rename(path, path + ".dead")
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("bank file not removed bank=%s error=%s", bank_id, error)
                failed.append(bank_id)
            else:
                dead.append(path + ".dead")
        try:
            self._sync_parents(dead)
        except OSError as error:
            log.warning("removal of bank files not synced files=%d error=%s", len(dead), error)
            return self._take_names_back(dead, failed)
        return dead, failed

    def _take_names_back(self, dead: list[str], failed: list[str]) -> tuple[list[str], list[str]]:
        """Undoes `kill`, as far as the disk lets us; returns what it returns."""
        still_dead: list[str] = []
        for path in dead:
            name = path.removesuffix(".dead")
            try:
                self.files.rename(path, name)
            except OSError:
                still_dead.append(path)
            else:
                failed.append(os.path.basename(name).partition(".")[0])
        return still_dead, failed

    def bury(self, dead: Iterable[str], bank_ids: Iterable[str]) -> None:
        """Second half of removing: unlinks files and markers."""
        for path in dead:
            self.files.unlink(path)
        for bank_id in bank_ids:
            for suffix in (".pin", ".hidden"):
                self.files.unlink(os.path.join(self.path, bank_id[:2], bank_id + suffix))

    def quarantine(self, paths: Iterable[str]) -> None:
        """Takes files out of service and keeps the newest few of all that ever failed."""
        moved: list[str] = []
        for path in paths:
            try:
                self.files.rename(path, os.path.join(self.quarantine_path, os.path.basename(path)))
            except FileNotFoundError:
                continue
            moved.append(path)
        self._sync_parents(moved)
        self.trim_quarantine(MAX_QUARANTINED_FILES)

    def trim_quarantine(self, num_kept: int) -> None:
        """Removes the oldest quarantined files beyond `num_kept`."""
        kept = sorted(
            self.files.scan(self.quarantine_path), key=lambda seen: seen.modified_at, reverse=True
        )
        for seen in kept[num_kept:]:
            if seen.is_folder:  # that somebody had named like a bank: not ours to empty
                continue
            self.files.unlink(os.path.join(self.quarantine_path, seen.name))

    def quarantined(self) -> list[Seen]:
        return self.files.scan(self.quarantine_path)

    def set_catalog_aside(self, suffix: str) -> str:
        """Renames a catalog that cannot be used, log included; returns its new name.

        Only the last one is kept.
        """
        for seen in self.files.scan(self.path):
            if _ASIDE_SUFFIX in seen.name and not seen.is_folder:
                self.files.unlink(os.path.join(self.path, seen.name))
        for name in reversed(_CATALOG_NAMES):  # the log first: it must not meet another catalog
            path = os.path.join(self.path, name)
            try:
                self.files.rename(path, os.path.join(self.path, f"{name}{_ASIDE_SUFFIX}{suffix}"))
            except FileNotFoundError:
                pass
        return f"{_CATALOG_NAMES[0]}{_ASIDE_SUFFIX}{suffix}"

    def prepare_catalog(self) -> bool:
        """Makes the catalog's files private, before SQLite would make a public one; says whether
        there was none. Raises OSError."""
        for name in _CATALOG_NAMES:
            path = os.path.join(self.path, name)
            if self.files.seen(path) is not None:
                self.files.restrict_file(path)
        seen = self.files.seen(self.catalog_path)
        if seen is None:
            self.files.close(self.files.create(self.catalog_path))
        return seen is None or seen.size_bytes == 0

    def catalog_fault(self) -> str:
        """Why SQLite shall not even look at what is there; "" when it may."""
        for name in _CATALOG_NAMES:
            seen = self.files.seen(os.path.join(self.path, name))
            if seen is not None and not seen.is_file:
                return f"{name} is not a regular file"
        return ""

    def sweep_markers(self, bank_ids: Iterable[str]) -> None:
        """Removes the markers of banks that are gone."""
        self.sweep(
            os.path.join(self.path, bank_id[:2], bank_id + suffix)
            for bank_id in bank_ids
            for suffix in (".pin", ".hidden")
        )

    def sweep(self, paths: Iterable[str]) -> None:
        """Removes what an earlier process left behind; what cannot be removed stays and counts."""
        for path in paths:
            try:
                self.files.unlink(path)
            except OSError as error:
                log.warning("stale file not removed file=%s error=%s", path, error)

    def catalog_bytes(self) -> int:
        """What the catalog and its log occupy now."""
        seen = (self.files.seen(os.path.join(self.path, name)) for name in _CATALOG_NAMES)
        return sum(each.size_on_disk_bytes for each in seen if each is not None)

    def log_bytes(self) -> int:
        """Length of the catalog's log."""
        seen = self.files.seen(os.path.join(self.path, _CATALOG_NAMES[1]))
        return seen.size_bytes if seen is not None else 0

    def scan(self) -> Found:
        """Everything in the folder, by name and size. Raises OSError."""
        found = Found()
        self.new_bytes = 0
        self._shards.clear()  # one may have been removed behind our back
        for seen in self.files.scan(self.path):
            if seen.name not in _CATALOG_NAMES:
                found.other_bytes += seen.size_on_disk_bytes
            if seen.is_folder and _SHARD_NAME.fullmatch(seen.name):
                self._scan_shard(seen.name, found)
        return found

    def _scan_shard(self, shard: str, found: Found) -> None:
        folder = os.path.join(self.path, shard)
        for seen in self.files.scan(folder):
            path = os.path.join(folder, seen.name)
            name = parse_file_name(seen.name)
            stem, _, suffix = seen.name.partition(".")
            if name is not None and name[0].startswith(shard):
                if seen.is_file:
                    found.files.append(FoundFile(*name, path, seen.size_bytes, seen.modified_at))
                    continue
                found.odd.append(path)
            elif seen.name.endswith((".tmp", ".dead")):
                found.stale.append(path)
            elif is_bank_id(stem) and suffix == "pin":
                found.pinned.add(stem)
            elif is_bank_id(stem) and suffix == "hidden":
                found.hidden.add(stem)
            found.other_bytes += seen.size_on_disk_bytes

    @contextmanager
    def cap_lock(self) -> Iterator[None]:
        """Keeps other processes from taking room below the shared cap. Raises OSError."""
        deadline = time.monotonic() + _CAP_LOCK_SECONDS
        while True:
            try:
                lock = self.files.lock(os.path.join(self.root, "cap.lock"))
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_CAP_LOCK_PAUSE_SECONDS)
        try:
            yield
        finally:
            self.files.close(lock)

    def probe(self) -> None:
        """Writes a small file, for good, and removes it. Raises OSError."""
        path = self.temp_path("0" * 32, 0)
        self.files.unlink(path)
        descriptor = self.files.create(path)
        try:
            self.files.allocate(descriptor, _PROBE_BYTES, path)
            self.files.sync_data(descriptor, path)
        finally:
            self.files.close(descriptor)
            self.files.unlink(path)

    def claim(self, num_bytes: int) -> None:
        """Tells the other owners what this one may write beyond what they see. Raises OSError."""
        assert self._lock is not None
        self.files.note(self._lock, b"%020d" % num_bytes)

    def foreign_bytes(self) -> tuple[int, int]:
        """What everything but this folder occupies under the root, and what other owners may
        still write: all share one cap.

        Files of banks do not change their size, so a folder of them is read again only when its
        names have changed.
        """
        total = claimed = 0
        pending = [self.root]
        while pending:
            folder = pending.pop()
            for seen in self.files.scan(folder):
                path = os.path.join(folder, seen.name)
                if path == self.path:
                    continue
                total += seen.size_on_disk_bytes
                if seen.is_file and seen.name == _LOCK_NAME:
                    claimed += self._claimed(path)
                if not seen.is_folder:
                    continue
                if not _SHARD_NAME.fullmatch(seen.name):
                    pending.append(path)
                else:
                    total += self._shard_bytes(path, seen.modified_at)
        return total, claimed

    def _shard_bytes(self, path: str, modified_at: float) -> int:
        known = self._foreign.get(path)
        if known is not None and known[0] == modified_at:
            return known[1]
        num_bytes = sum(seen.size_on_disk_bytes for seen in self.files.scan(path))
        if time.time() - modified_at > _SETTLED_SECONDS:
            self._foreign[path] = (modified_at, num_bytes)
        else:
            self._foreign.pop(path, None)
        return num_bytes

    def _claimed(self, path: str) -> int:
        """What the owner of a lock file says; nothing when it says nothing sensible."""
        try:
            descriptor = self.files.open_read(path)
        except OSError:
            return 0
        text = bytearray(20)
        try:
            self.files.read_into(descriptor, memoryview(text), 0, path)
        except OSError:
            return 0
        finally:
            self.files.close(descriptor)
        return int(text) if text.isdigit() else 0

    def _mark(self, bank_id: str, suffix: str) -> None:
        path = os.path.join(self.path, bank_id[:2], bank_id + suffix)
        if self.files.seen(path) is None:
            self.files.close(self.files.create(path))

    def _unmark(self, bank_id: str, suffix: str) -> None:
        folder = os.path.join(self.path, bank_id[:2])
        self.files.unlink(os.path.join(folder, bank_id + suffix))
        self.files.sync_folder(folder)

    def _sync_parents(self, paths: Iterable[str]) -> None:
        for folder in sorted({os.path.dirname(path) for path in paths}):
            self.files.sync_folder(folder)
