"""Power loss for the store's tests: its file operations are recorded, then replayed by halves.

A recorded life may be cut after any operation. What the disk then holds is what was synced, and of
the rest what a `Loss` lets through: names and bytes survive on their own, as they do on real disks.
The catalog is SQLite's own business, so it comes back as it was at that moment, as it was at some
earlier one, with a torn log, or not at all.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ds4grpc.store.files import Files

CATALOG = "catalog.db"
LOG = "catalog.db-wal"
SECTOR_BYTES = 512  # a disk writes these whole or not at all
LOSSES = ("nothing", "all", "some", "torn")  # what survives of what was not synced


@dataclass(frozen=True, slots=True)
class Step:
    """One operation that went well. `data` and `source` are a write's and a rename's."""

    operation: str
    path: str
    source: str = ""
    data: bytes = b""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """The catalog and its log as they stood between two steps."""

    catalog: bytes | None
    log: bytes | None


class RecordingFiles(Files):
    """Keeps every change below `root`, and the catalog as it was before each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.steps: list[Step] = []
        self.moments: list[Moment] = []  # one before each step
        self._last = Moment(None, None)
        self._lock = threading.Lock()

    def look(self) -> Moment:
        """The catalog now."""
        found: list[bytes | None] = []
        for name in (CATALOG, LOG):
            paths = list(self.root.rglob(name))
            found.append(paths[0].read_bytes() if paths else None)
        now = Moment(*found)
        if now != self._last:
            self._last = now
        return self._last

    def keep(self, step: Step, moment: Moment) -> None:
        with self._lock:
            self.steps.append(step)
            self.moments.append(moment)

    def make_folder(self, path: str) -> bool:
        moment = self.look()
        made = super().make_folder(path)
        if made:
            self.keep(Step("make_folder", path), moment)
        return made

    def create(self, path: str) -> int:
        moment = self.look()
        descriptor = super().create(path)
        self.keep(Step("create", path), moment)
        return descriptor

    def allocate(self, descriptor: int, size_bytes: int, path: str) -> None:
        moment = self.look()
        super().allocate(descriptor, size_bytes, path)
        self.keep(Step("allocate", path, offset=size_bytes), moment)

    def write(
        self, descriptor: int, data: bytes | bytearray | memoryview, offset: int, path: str
    ) -> None:
        moment = self.look()
        super().write(descriptor, data, offset, path)
        self.keep(Step("write", path, data=bytes(data), offset=offset), moment)

    def sync_data(self, descriptor: int, path: str) -> None:
        moment = self.look()
        super().sync_data(descriptor, path)
        self.keep(Step("sync_data", path), moment)

    def sync_folder(self, path: str) -> None:
        moment = self.look()
        super().sync_folder(path)
        self.keep(Step("sync_folder", path), moment)

    def rename(self, source: str, target: str) -> None:
        moment = self.look()
        super().rename(source, target)
        self.keep(Step("rename", target, source=source), moment)

    def unlink(self, path: str) -> None:
        moment = self.look()
        there = os.path.lexists(path)
        super().unlink(path)
        if there:
            self.keep(Step("unlink", path), moment)


@dataclass(slots=True)
class Inode:
    """A file's bytes, apart from its names. `pending` was written since the last sync."""

    data: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    is_folder: bool = False

    def apply(self, offset: int, data: bytes) -> None:
        if len(self.data) < offset + len(data):
            self.data.extend(bytes(offset + len(data) - len(self.data)))
        self.data[offset : offset + len(data)] = data

    def sync(self) -> None:
        for offset, data in self.pending:
            self.apply(offset, data)
        self.pending.clear()


@dataclass(frozen=True, slots=True)
class Naming:
    """A change of a folder: `inode` gets the name, or with None nobody has it any more."""

    path: str
    inode: Inode | None


class Disk:
    """What a disk holds under the rules of POSIX and no better: only what was synced is safe."""

    def __init__(self, base: str) -> None:
        self.base = base  # is there, whatever happens
        self.names: dict[str, Inode] = {}  # as the running system sees them
        self.durable: dict[str, Inode] = {}
        self.pending: list[Naming] = []  # in order, over all folders

    def hold(self, folder: Path) -> None:
        """What is in a folder now, catalogs apart, is safe."""
        for path in (folder, *folder.rglob("*")):
            if not path.name.startswith(CATALOG):
                data = bytearray() if path.is_dir() else bytearray(path.read_bytes())
                inode = Inode(data, is_folder=path.is_dir())
                self.names[str(path)] = self.durable[str(path)] = inode

    def do(self, step: Step) -> None:
        path = step.path
        match step.operation:
            case "make_folder":
                self._name(path, Inode(is_folder=True))
            case "create":
                self._name(path, Inode())
            case "allocate":
                self.names[path].pending.append((step.offset, b""))
            case "write":
                self.names[path].pending.append((step.offset, step.data))
            case "sync_data":
                self.names[path].sync()
            case "sync_folder":
                self._settle(lambda naming: os.path.dirname(naming.path) == path)
            case "rename":
                inode = self.names[step.source]
                self._name(step.source, None)
                self._name(path, inode)
            case "unlink":
                self._name(path, None)
            case other:
                raise AssertionError(other)

    def lose_power(self, loss: str, chance: random.Random) -> None:
        """Settles what of the un-synced part has survived."""
        inodes = {id(inode): inode for inode in (*self.names.values(), *self.durable.values())}
        unsynced = [inode for inode in inodes.values() if inode.pending]
        if loss == "torn" and unsynced:
            # Everything got through but the end of the last write.
            offset, data = unsynced[-1].pending.pop()
            whole = chance.randrange(len(data) // SECTOR_BYTES + 1) * SECTOR_BYTES
            unsynced[-1].pending.append((offset, data[:whole] + bytes(len(data) - whole)))
        if loss == "some":
            for inode in unsynced:
                inode.pending = [write for write in inode.pending if chance.random() < 0.5]
            self.pending = [naming for naming in self.pending if chance.random() < 0.5]
        if loss != "nothing":
            for inode in unsynced:
                inode.sync()
            self._settle(lambda naming: True)

    def write_to(self, folder: Path) -> None:
        """Puts the surviving files into an empty folder that stands for `base`."""
        for path in sorted(self.durable):  # folders come before what is in them
            inode = self.durable[path]
            target = folder / os.path.relpath(path, self.base)
            if os.path.basename(path).startswith(CATALOG) or not target.parent.is_dir():
                continue
            if inode.is_folder:
                target.mkdir(0o700)
            else:
                target.write_bytes(inode.data)

    def _name(self, path: str, inode: Inode | None) -> None:
        if inode is None:
            del self.names[path]
        else:
            self.names[path] = inode
        self.pending.append(Naming(path, inode))

    def _settle(self, chosen: Callable[[Naming], bool]) -> None:
        """Makes pending names durable; the others keep their order."""
        rest: list[Naming] = []
        for naming in self.pending:
            if not chosen(naming):
                rest.append(naming)
            elif naming.inode is None:
                self.durable.pop(naming.path, None)
            else:
                self.durable[naming.path] = naming.inode
        self.pending = rest


def replay(files: RecordingFiles, num_steps: int, loss: str, seed: int, folder: Path) -> None:
    """What a disk holds that lost power after so many steps, in a fresh `folder`."""
    chance = random.Random(f"{seed} {num_steps} {loss}")
    disk = Disk(os.path.dirname(files.root))
    for step in files.steps[:num_steps]:
        disk.do(step)
    picture(disk, files, num_steps, loss, chance, folder)


def picture(
    disk: Disk,
    files: RecordingFiles,
    num_steps: int,
    loss: str,
    chance: random.Random,
    folder: Path,
) -> None:
    """What survives when power goes now, after so many of the recorded steps, in a fresh
    `folder`."""
    disk.lose_power(loss, chance)
    folder.mkdir()
    disk.write_to(folder)
    _put_catalog(files, num_steps, loss, chance, folder)


def _put_catalog(
    files: RecordingFiles, num_steps: int, loss: str, chance: random.Random, folder: Path
) -> None:
    homes = [path for path in (folder / files.root.name).glob("*") if path.is_dir()]
    if not homes:
        return
    now = files.moments[num_steps] if num_steps < len(files.moments) else files.look()
    if loss == "some":  # an older state, or the file without its name
        now = chance.choice([*files.moments[: num_steps + 1], Moment(None, None)])
    log = now.log
    if loss == "nothing":
        log = None  # of the log nothing is synced until it is written back
    elif loss == "torn" and log:
        log = log[: chance.randrange(len(log))]
    for name, data in ((CATALOG, now.catalog), (LOG, log)):
        if data is not None:
            (homes[0] / name).write_bytes(data)
