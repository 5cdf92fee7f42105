"""The process dies at every file operation: the next start is consistent, each time.

The child is a real process that ends at once, in the middle; what it had confirmed before goes
through a pipe.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from bankkit import (
    FINGERPRINT,
    PLAIN,
    READS,
    DyingFiles,
    MemorySink,
    MemorySource,
    Observed,
    Turns,
    config_of,
    names,
    stored_names,
)

from ds4grpc.store.files import Files
from ds4grpc.store.store import Store

LONG = bool(os.environ.get("DS4GRPC_LONG"))  # `make test-long`: every step, not each seventh
STEM = Turns(head=20).grow(1, 60)
LEFT, RIGHT = STEM.grow(2, 40), STEM.grow(3, 30)
NAMED = {"stem": STEM, "left": LEFT, "right": RIGHT}


async def live(folder: Path, files: Files, tell: Callable[[str], None]) -> None:
    """A small life that goes through publish, pin, unpin, hide, delete, quarantine, rescan."""
    async with Store(config_of(folder, min_tokens=16), Observed(), files) as store:
        ids = {}
        for name, turns in NAMED.items():
            ids[name] = (await store.persist(turns.source(pin=name == "right"))).bank_id
            tell(f"stored {name} {ids[name]}")
        await store.unpin(ids["right"])
        await store.pin(ids["left"])
        tell("pinned left")
        tell("deleting stem")
        await store.delete(ids["stem"])
        tell("deleted stem")
        tell("deleting right")
        await store.quarantine(ids["right"], "a check failed")
        tell("deleted right")
        await store.rescan()
        await store.unpin(ids["left"])
        tell("deleting left")
        await store.delete(ids["left"])  # and the stem, which nobody needs any more
        tell("deleted left")


def run_until(folder: Path, deadline: int) -> list[str]:
    """Runs `live` in a child that dies at its deadline; returns what it had confirmed."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        try:
            asyncio.run(
                live(
                    folder,
                    DyingFiles(deadline),
                    lambda line: void(os.write(sender, f"{line}\n".encode())),
                )
            )
        finally:
            os._exit(1)
    os.close(sender)
    with os.fdopen(receiver) as lines:
        told = lines.read().splitlines()
    os.waitpid(child, 0)
    return told


def void(_: object) -> None:
    return None


async def check(folder: Path, told: list[str]) -> None:
    """What was confirmed is so, nothing is half there."""
    stored = dict(line.split()[1:] for line in told if line.startswith("stored"))
    deleting = {line.split()[1] for line in told if line.startswith("deleting")}
    deleted = {line.split()[1] for line in told if line.startswith("deleted")}
    async with Store(config_of(folder, min_tokens=16), Observed()) as store:
        listed = {info.bank_id: info for info in await store.list_banks()}
        assert not names(folder, "*.tmp") + names(folder, "*.dead")
        verdicts = [verdict async for verdict in store.verify()]
        assert all(verdict.ok for verdict in verdicts)
        for name, bank_id in stored.items():
            if name in deleted:
                assert bank_id not in listed, f"{name} came back"
            elif name not in deleting:
                assert bank_id in listed, f"{name} was lost"
                await check_restores(store, NAMED[name])
                if name == "left" and "pinned left" in told and "deleting left" not in told:
                    assert listed[bank_id].pinned or "deleted right" in told
        persisted = await store.persist(LEFT.source())
        assert persisted.detail == ""
        await check_restores(store, LEFT)
    rows = sqlite3.connect(folder / FINGERPRINT.hex()[:16] / "catalog.db")
    named = {
        f"{bank_id}.{base}.bank"
        for bank_id, base in rows.execute("select bank_id, base from banks")
    }
    rows.close()
    assert named == stored_names(folder)


async def check_restores(store: Store, turns: Turns) -> None:
    leases = await store.match(turns.query())
    lease = next(each for each in leases if each.content.frontier == turns.frontier)
    sink = MemorySink(PLAIN, turns.frontier)
    await lease.load(turns.frontier, sink)
    sink.assert_holds(MemorySource(PLAIN, turns.ids), turns.frontier, lease.content.held)
    for each in leases:
        each.release()


def num_changes(folder: Path) -> list[str]:
    files = DyingFiles()
    asyncio.run(live(folder, files, void))
    return files.operations


@pytest.mark.slow
def test_process_that_dies_at_any_step_leaves_a_good_folder(
    tmp_path: Path, no_blocking_calls: object
) -> None:
    operations = num_changes(tmp_path / "whole")
    assert {"create", "write", "sync_data", "rename", "sync_folder", "unlink"} <= set(operations)
    told = run_until(tmp_path / "alive", 0)
    assert told[-1] == "deleted left"
    for deadline in range(1, len(operations) + 1, 1 if LONG else 9):
        folder = tmp_path / str(deadline)
        asyncio.run(check(folder, run_until(folder, deadline)))


class WatchingFiles(Files):
    """Counts the rows of the catalog ahead of each sync and rename in a folder of banks."""

    def __init__(self, folder: Path) -> None:
        self.catalog = folder / FINGERPRINT.hex()[:16] / "catalog.db"
        self.steps: list[tuple[str, int]] = []

    def before(self, operation: str, path: str) -> None:
        shard = path if operation == "sync_folder" else os.path.dirname(path)
        watched = operation in ("sync_data", "rename", "sync_folder")
        if watched and len(os.path.basename(shard)) == 2:
            with closing(sqlite3.connect(self.catalog)) as catalog:
                (count,) = catalog.execute("select count(*) from banks").fetchone()
            self.steps.append((operation, count))


async def test_row_comes_after_its_file_and_goes_after_its_name(tmp_path: Path) -> None:
    files = WatchingFiles(tmp_path)
    async with Store(config_of(tmp_path), Observed(), files) as store:
        persisted = await store.persist(Turns().grow(1, 60).source())
        await store.delete(persisted.bank_id)
    comes = [("sync_data", 0), ("rename", 0), ("sync_folder", 0)]
    assert files.steps == [*comes, ("rename", 1), ("sync_folder", 1)]


def bank_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.bank"))


class FailingFiles(Files):
    """The `first`-th change after arming fails."""

    def __init__(self, first: int, error: int) -> None:
        self.first = first
        self.error = error
        self.armed = False
        self.changes = 0

    def before(self, operation: str, path: str) -> None:
        if self.armed and operation not in READS:
            self.changes += 1
            if self.changes == self.first:
                raise OSError(self.error, os.strerror(self.error))


async def test_persist_on_a_failing_disk_is_lost_and_the_next_one_works(tmp_path: Path) -> None:
    """One operation fails, each in its turn; then the disk is well again."""
    errors = (errno.ENOSPC, errno.EIO, errno.EROFS)
    for first in range(1, 30):
        folder = tmp_path / str(first)
        files = FailingFiles(first, errors[first % len(errors)])
        async with Store(config_of(folder), Observed(), files) as store:
            await store.persist(STEM.source())
            files.armed = True
            source = LEFT.source()
            persisted = await store.persist(source)
            done = files.changes < first
            files.armed = False
            assert (persisted.detail == "") == done, f"change {first}"
            assert persisted.frontier == (LEFT.frontier if done else STEM.frontier)
            assert isinstance(source.rows, MemorySource)
            assert source.rows.closed
            assert (await store.persist(LEFT.source())).detail == ""
            assert names(folder, "*.tmp") == []
            assert store.disk_bytes >= bank_bytes(folder)
        if done:
            return
    pytest.fail("the persist never got through")
