"""Checking bank files while no server runs: every checksum, every chain, without the model.

Owns what can be told from the files alone; changes nothing. Knows no catalog. Blocking; one thread.
The folder's lock is held meanwhile, so that no server changes what is being read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ds4grpc.errors import BankCorrupt, StoreDisabled, StoreFailed
from ds4grpc.store.files import Files
from ds4grpc.store.folder import Folder, FoundFile
from ds4grpc.store.format import Header
from ds4grpc.store.reader import BankFile

_MODEL_NAME = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """What checking one file found; `detail` says what failed. `done` of `total` are through.
    `model` is the beginning of its fingerprint."""

    model: str
    bank_id: str
    detail: str
    read_bytes: int
    done: int
    total: int


@dataclass(slots=True)
class _Known:
    """Good files by bank, as far as chains need them."""

    headers: dict[str, list[tuple[Header, str]]] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    layout_id: str = ""


def model_folders(root: str) -> list[str]:
    """The names of the models' folders below a bank folder. Raises StoreFailed."""
    try:
        with os.scandir(root) as listing:
            return sorted(e.name for e in listing if _MODEL_NAME.fullmatch(e.name) and e.is_dir())
    except OSError as error:
        raise StoreFailed(f"{root} cannot be read: {error.strerror}") from error


def verify_folder(
    root: str, name: str, wanted: Sequence[str] = (), files: Files | None = None
) -> Iterator[FileVerdict]:
    """Checks the bank files of one model, those whose ids begin as `wanted` says (none: all), each
    after the one that it leans on.

    Raises StoreDisabled while a process owns the folder, StoreFailed when it cannot be read.
    """
    folder = Folder(files or Files(), os.path.realpath(root), bytes.fromhex(name))
    with _locked(folder):
        try:
            found = folder.scan()
        except OSError as error:
            raise StoreFailed(f"{folder.path} cannot be read: {error.strerror}") from error
        # A parent's base is lower, so it comes first.
        all_files = sorted(found.files, key=lambda file: (file.base, file.bank_id))
        chosen = {f.path for f in all_files if not wanted or f.bank_id.startswith(tuple(wanted))}
        known = _Known()
        done = 0
        for file in all_files:
            if file.path not in chosen:
                _learn(folder.files, file, known)
                continue
            done += 1
            read_bytes, detail = _verify(folder.files, file, name, known)
            if detail:
                known.bad.add(file.bank_id)
            yield FileVerdict(name, file.bank_id, detail, read_bytes, done, len(chosen))


def verify_file(path: str, files: Files | None = None) -> FileVerdict:
    """Checks a file that `banks export` made, under whatever name. Never raises for a bad one."""
    model = bank_id = ""
    try:
        with BankFile.open_any(files or Files(), path, is_named=False) as file:
            model, bank_id = file.header.fingerprint.hex()[:16], file.header.bank_id
            read_bytes = file.verify()
            file.check_padding()
            if file.header.base:
                raise BankCorrupt("it holds a part of a bank only", kind="format")
            return FileVerdict(model, bank_id, "", read_bytes, 1, 1)
    except BankCorrupt as error:
        return FileVerdict(model, bank_id, error.message, 0, 1, 1)


@contextmanager
def _locked(folder: Folder) -> Iterator[None]:
    try:
        lock = folder.files.lock_as_it_is(folder.lock_path)
    except BlockingIOError as error:
        raise StoreDisabled(
            f"a running server owns the bank folder {folder.path}; stop it, or verify through it:"
            " without --offline",
            reason="STORE_FOLDER_BUSY",
        ) from error
    except OSError as error:
        raise StoreFailed(f"{folder.path} cannot be locked: {error.strerror}") from error
    try:
        yield
    finally:
        if lock is not None:
            folder.files.close(lock)


def _learn(files: Files, file: FoundFile, known: _Known) -> None:
    """Takes note of a file that others may lean on; its rows are not looked at."""
    try:
        with BankFile.open_any(files, file.path) as opened:
            known.headers.setdefault(file.bank_id, []).append((opened.header, file.path))
    except BankCorrupt:
        known.bad.add(file.bank_id)


def _verify(files: Files, file: FoundFile, name: str, known: _Known) -> tuple[int, str]:
    """(bytes read, what failed)."""
    try:
        with BankFile.open_any(files, file.path) as opened:
            header = opened.header
            if header.fingerprint.hex()[:16] != name:
                raise BankCorrupt("the file belongs to another model", kind="foreign")
            if header.layout_id != (known.layout_id or header.layout_id):
                raise BankCorrupt(
                    f"layout {header.layout_id} beside {known.layout_id}", kind="foreign"
                )
            read_bytes = opened.verify()
            opened.check_padding()
            _check_chain(files, opened, known)
    except BankCorrupt as error:
        return 0, error.message
    known.layout_id = header.layout_id
    known.headers.setdefault(file.bank_id, []).append((header, file.path))
    return read_bytes, ""


def _check_chain(files: Files, file: BankFile, known: _Known) -> None:
    """That the rows below its base are those of the same tokens, in a good file. Raises
    BankCorrupt."""
    header = file.header
    if not header.parent_id:
        return
    parents = known.headers.get(header.parent_id, [])
    if not parents:
        state = "is damaged" if header.parent_id in known.bad else "is not there"
        raise BankCorrupt(f"it needs bank {header.parent_id}, which {state}", kind="identity")
    for parent, path in parents:
        if parent.base < header.base <= parent.frontier and parent.namespace == header.namespace:
            with BankFile.open_any(files, path) as opened:
                ids = opened.read_ids()
            if (ids[: header.base] == file.read_ids()[: header.base]).all():
                return
    raise BankCorrupt(f"bank {header.parent_id} does not hold what it needs", kind="identity")
