"""The process dies at every file operation: the next start is consistent, each time.

The child is a real process that ends at once, in the middle; what it had confirmed before goes
through a pipe.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from bankkit import (
    FINGERPRINT,
    PLAIN,
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
# Reading changes nothing, so dying there is dying before the next change.
READS = ("read", "open_read", "scan")
STEM = Turns(head=20).grow(1, 60)
LEFT, RIGHT = STEM.grow(2, 40), STEM.grow(3, 30)
NAMED = {"stem": STEM, "left": LEFT, "right": RIGHT}


class DyingFiles(Files):
    """Ends the process before its `deadline`-th change; counts them when it is 0."""

    def __init__(self, deadline: int = 0) -> None:
        self.deadline = deadline
        self.operations: list[str] = []

    def before(self, operation: str, path: str) -> None:
        if operation not in READS:
            self.operations.append(operation)
            if len(self.operations) == self.deadline:
                os._exit(9)


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


def test_process_that_dies_at_any_step_leaves_a_good_folder(
    tmp_path: Path, no_blocking_calls: object
) -> None:
    operations = num_changes(tmp_path / "whole")
    assert {"create", "write", "sync_data", "rename", "sync_folder", "unlink"} <= set(operations)
    told = run_until(tmp_path / "alive", 0)
    assert told[-1] == "deleted left"
    for deadline in range(1, len(operations) + 1, 1 if LONG else 7):
        folder = tmp_path / str(deadline)
        asyncio.run(check(folder, run_until(folder, deadline)))


class FailingFiles(Files):
    """Every operation from the `first`-th change on fails, `count` times."""

    def __init__(self, first: int, count: int, error: int) -> None:
        self.left = range(first, first + count)
        self.error = error
        self.armed = False
        self.changes = 0

    def before(self, operation: str, path: str) -> None:
        if self.armed and operation not in READS:
            self.changes += 1
            if self.changes in self.left:
                raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("error", [28, 5, 30], ids=["ENOSPC", "EIO", "EROFS"])
async def test_persist_on_a_failing_disk_is_lost_and_the_next_one_works(
    tmp_path: Path, error: int
) -> None:
    for first in range(1, 20):
        folder = tmp_path / str(first)
        files, observed = FailingFiles(first, 1, error), Observed()
        async with Store(config_of(folder), observed, files) as store:
            await store.persist(STEM.source())
            files.armed = True
            source = LEFT.source()
            persisted = await store.persist(source)
            done = files.changes < first
            files.armed = False
            assert (persisted.detail == "") == done, f"change {first}"
            assert persisted.frontier == (LEFT.frontier if done else STEM.frontier)
            assert source.rows.closed  # type: ignore[attr-defined]
            again = await store.persist(LEFT.source())
            assert again.detail == ""
            assert not names(folder, "*.tmp")
            assert store.disk_bytes >= sum(p.stat().st_size for p in folder.rglob("*.bank"))
        if done:
            return
    pytest.fail("the persist never got through")
