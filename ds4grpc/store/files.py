"""Every file operation of the store, one method each.

Owns how bytes reach the disk: flags, modes, what is synced. Knows no format, no catalog and no
policy. Blocking: worker threads only. A subclass that overrides `before` can record, delay or
fail any operation, which is how crashes and power loss are tested.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FOLDER_MODE = 0o700
FILE_MODE = 0o600
BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own block is


@dataclass(frozen=True, slots=True)
class Seen:
    """One entry of a folder. `size_on_disk_bytes` is what it occupies, not its length."""

    name: str
    size_bytes: int
    size_on_disk_bytes: int
    modified_at: float
    is_file: bool
    is_folder: bool


class Files:
    """File operations by path. Each raises OSError; a symlink in the last two path components
    is an error, never followed."""

    def before(self, operation: str, path: str) -> None:
        """Called ahead of each operation that changes or reads the disk."""

    def make_folders(self, path: str) -> None:
        """Makes a folder and what is missing above it, for good; one that is there stays as it
        is."""
        missing: list[str] = []
        at = os.path.abspath(path)
        while not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        for folder in reversed(missing):
            self.make_folder(folder)
            self.sync_folder(os.path.realpath(os.path.dirname(folder)))

    def make_folder(self, path: str) -> bool:
        """Makes a private folder; returns False when it is there. Raises for anything else
        there, a symlink to a folder included."""
        self.before("make_folder", path)
        try:
            os.mkdir(path, FOLDER_MODE)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise NotADirectoryError(f"{path} is not a folder") from None
            return False
        return True

    def restrict_folder(self, path: str) -> None:
        """Takes the rights of everybody but the owner from a folder."""
        self.before("restrict_folder", path)
        os.chmod(path, FOLDER_MODE)

    def restrict_file(self, path: str) -> None:
        """Takes the rights of everybody but the owner from a file, who may read and write."""
        self.before("restrict_file", path)
        os.chmod(path, FILE_MODE)

    def create(self, path: str) -> int:
        """Makes a new private file for writing; returns its descriptor."""
        self.before("create", path)
        with _parent_of(path) as (folder, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, FILE_MODE, dir_fd=folder)

    def lock(self, path: str) -> int:
        """Locks a file, making it when it is not there; the lock ends with the descriptor that is
        returned, or with the process. Raises BlockingIOError while another holds it."""
        self.before("lock", path)
        with _parent_of(path) as (folder, name):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, FILE_MODE, dir_fd=folder)
        return _locked(descriptor)

    def lock_as_it_is(self, path: str) -> int | None:
        """Locks a file like `lock`, but changes nothing: None when it is not there. Raises
        BlockingIOError while another holds it."""
        self.before("open_read", path)
        try:
            with _parent_of(path) as (folder, name):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                descriptor = os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            return None
        return _locked(descriptor)  # which reading is enough for

    def open_read(self, path: str) -> int:
        """Opens a regular file for reading; returns its descriptor."""
        self.before("open_read", path)
        with _parent_of(path) as (folder, name):
            # O_NONBLOCK: a planted FIFO must not hang the reader.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(name, flags, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{path} is not a regular file")
        return descriptor

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def size_bytes(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def allocate(self, descriptor: int, size_bytes: int, path: str) -> None:
        """Takes the space now, so that a full disk shows before anything is written."""
        self.before("allocate", path)
        os.posix_fallocate(descriptor, 0, size_bytes)

    def write(
        self, descriptor: int, data: bytes | bytearray | memoryview, offset: int, path: str
    ) -> None:
        """Writes all of `data` at `offset`."""
        self.before("write", path)
        view = memoryview(data).cast("B")
        while len(view):
            written = os.pwrite(descriptor, view, offset)
            offset += written
            view = view[written:]

    def note(self, descriptor: int, data: bytes) -> None:
        """Writes a few bytes that need not outlive the process at the file's start."""
        os.pwrite(descriptor, data, 0)

    def read_into(self, descriptor: int, view: memoryview, offset: int, path: str) -> int:
        """Fills `view` from `offset`; returns the bytes read, fewer only at the file's end."""
        self.before("read", path)
        filled = 0
        while filled < len(view):
            count = os.preadv(descriptor, [view[filled:]], offset + filled)
            if count == 0:
                break
            filled += count
        return filled

    def sync_data(self, descriptor: int, path: str) -> None:
        """Returns when the file's bytes and size are on stable storage."""
        self.before("sync_data", path)
        os.fdatasync(descriptor)

    def sync_folder(self, path: str) -> None:
        """Returns when the folder's names are on stable storage."""
        self.before("sync_folder", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Renames, replacing what `target` names."""
        self.before("rename", target)
        with _parent_of(source) as (here, old), _parent_of(target) as (there, new):
            os.rename(old, new, src_dir_fd=here, dst_dir_fd=there)

    def unlink(self, path: str) -> None:
        """Removes a name; one that is not there is no error."""
        self.before("unlink", path)
        try:
            with _parent_of(path) as (folder, name):
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass

    def seen(self, path: str) -> Seen | None:
        """What `path` names now, without following a symlink; None when nothing."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return None
        return _seen(os.path.basename(path), found)

    def scan(self, path: str) -> list[Seen]:
        """The entries of a folder, in no order; none when the folder is not there."""
        self.before("scan", path)
        entries: list[Seen] = []
        try:
            with os.scandir(path) as listing:
                for entry in listing:
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed while we looked
                        continue
                    entries.append(_seen(entry.name, found))
        except FileNotFoundError:
            pass
        return entries

    def free_bytes(self, path: str) -> int:
        """Bytes that an unprivileged process may still write to the file system of `path`."""
        state = os.statvfs(path)
        return state.f_bavail * state.f_frsize


def _locked(descriptor: int) -> int:
    """The descriptor, its file locked; closed when another has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _seen(name: str, found: os.stat_result) -> Seen:
    return Seen(
        name=name,
        size_bytes=found.st_size,
        size_on_disk_bytes=found.st_blocks * BLOCK_BYTES,
        modified_at=found.st_mtime,
        is_file=stat.S_ISREG(found.st_mode),
        is_folder=stat.S_ISDIR(found.st_mode),
    )


@contextmanager
def _parent_of(path: str) -> Iterator[tuple[int, str]]:
    """The descriptor of the folder that holds `path`, itself not a symlink, and the name in it."""
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)
