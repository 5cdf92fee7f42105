"""A small life of a store that is cut short, and what must hold at the next start."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bankkit import (
    FINGERPRINT,
    PLAIN,
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

STEM = Turns(head=20).grow(1, 60)
LEFT, RIGHT = STEM.grow(2, 40), STEM.grow(3, 30)
LONE = Turns().grow(4, 90)
ONE = Turns().grow(5, 750)  # three of these are worth merging
TWO = ONE.grow(6, 750)
THREE = TWO.grow(7, 750)
NAMED = {"stem": STEM, "left": LEFT, "right": RIGHT, "lone": LONE}
MERGED = {"one": ONE, "two": TWO, "three": THREE}

Tell = Callable[[str], None]


async def live(folder: Path, files: Files, tell: Tell) -> None:
    """Publish, pin, unpin, hide, unhide, quarantine, rescan, delete, restart, evict.

    Tells `<what> <name>` before a bank may come or go, and after each change that was confirmed.
    """
    async with Store(config_of(folder), Observed(), files) as store:
        ids = {name: turns.bank_id for name, turns in NAMED.items()}

        async def put(name: str, *, pin: bool = False) -> None:
            tell(f"going {name}")  # neither here nor there until it is confirmed
            persisted = await store.persist(NAMED[name].source(pin=pin))
            assert (persisted.bank_id, persisted.detail) == (ids[name], "")
            tell(f"stored {name}")

        async def delete(name: str) -> None:
            tell(f"going {name}")
            await store.delete(ids[name])
            tell(f"gone {name}")

        await put("stem")
        await put("left")
        await put("right", pin=True)
        await store.unpin(ids["right"])
        await store.pin(ids["left"])
        tell("pinned left")
        await delete("stem")  # hidden: its children need it
        await put("stem")
        await delete("stem")
        tell("going right")
        await store.quarantine(ids["right"], "a check failed")
        tell("gone right")
        await store.rescan()
        tell("unpinning left")
        await store.unpin(ids["left"])
        tell("unpinned left")
        await delete("left")  # and the stem, which nobody needs any more
        await put("left")
        await put("lone")
    async with Store(config_of(folder), Observed(), files) as store:
        # What is in quarantine goes first.
        less = store.disk_bytes - quarantined_bytes(folder) - 1
    tell("going left")
    tell("going lone")
    async with Store(config_of(folder, quota_bytes=less), Observed(), files) as store:
        kept = {info.bank_id for info in await store.list_banks()}
        assert len(kept & {ids["left"], ids["lone"]}) < 2, "nothing was evicted"
        for name in ("left", "lone"):
            tell(f"stored {name}" if ids[name] in kept else f"gone {name}")


async def merge(folder: Path, files: Files, tell: Tell) -> None:
    """Publish, compact, delete what leans on the merged file, and that file's own bank."""
    async with Store(config_of(folder), Observed(), files) as store:
        for name, turns in MERGED.items():
            tell(f"going {name}")
            assert (await store.persist(turns.source())).detail == ""
            tell(f"stored {name}")
        assert await store.compact() == 1
        for name in ("one", "three"):
            tell(f"going {name}")
            await store.delete(MERGED[name].bank_id)
            tell(f"gone {name}")


@dataclass(slots=True)
class Due:
    """What must be found after a life that had confirmed so much."""

    here: set[str]
    gone: set[str]
    left_is_pinned: bool | None  # None: either

    @staticmethod
    def of(told: list[str]) -> Due:
        due = Due(set(), set(), None)
        for line in told:
            what, name = line.split()
            if what in ("stored", "going", "gone"):
                due.here.discard(name)
                due.gone.discard(name)
            if what == "stored":
                due.here.add(name)
            elif what == "gone":
                due.gone.add(name)
            elif what == "pinned":
                due.left_is_pinned = True
            elif what in ("unpinning", "unpinned"):
                due.left_is_pinned = None if what == "unpinning" else False
        return due


async def check(folder: Path, told: list[str]) -> None:
    """What was confirmed is so, nothing is half there, and the store goes on."""
    due = Due.of(told)
    known = NAMED | MERGED
    async with Store(config_of(folder), Observed()) as store:
        listed = {info.bank_id: info for info in await store.list_banks()}
        assert names(folder, "*.tmp") == names(folder, "*.dead") == []
        assert {name for name in due.gone if known[name].bank_id in listed} == set(), "came back"
        assert {name for name in due.here if known[name].bank_id not in listed} == set(), "lost"
        if "left" in due.here and due.left_is_pinned is not None:
            assert listed[LEFT.bank_id].pinned == due.left_is_pinned
        verdicts = [verdict async for verdict in store.verify()]
        assert [verdict.detail for verdict in verdicts if not verdict.ok] == []
        assert rows_of(folder) == stored_names(folder)
        for name in sorted(due.here):
            await check_restores(store, known[name])
        assert (await store.persist(LEFT.source())).detail == ""
        await check_restores(store, LEFT)


async def check_restores(store: Store, turns: Turns) -> None:
    """That the bank is found, and every row of it is as it was."""
    leases = await store.match(turns.query())
    lease = next(each for each in leases if each.content.frontier == turns.frontier)
    sink = MemorySink(PLAIN, turns.frontier)
    await lease.load(turns.frontier, sink)
    sink.assert_holds(MemorySource(PLAIN, turns.ids), turns.frontier, lease.content.held)
    for each in leases:
        each.release()


def catalog_of(folder: Path) -> Path:
    return folder / FINGERPRINT.hex()[:16] / "catalog.db"


def quarantined_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/quarantine/*"))


def rows_of(folder: Path) -> set[str]:
    """The names of the files that the catalog speaks of."""
    with closing(sqlite3.connect(catalog_of(folder))) as catalog:
        found = catalog.execute("select bank_id, base from banks").fetchall()
    return {f"{bank_id}.{base}.bank" for bank_id, base in found}


def run_until(deadline: int, work: Callable[[DyingFiles, Tell], Awaitable[None]]) -> list[str]:
    """Runs `work` in a process that dies before its `deadline`-th change; returns what it told."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)

        def tell(line: str) -> None:
            os.write(sender, f"{line}\n".encode())

        try:
            asyncio.run(_awaited(work(DyingFiles(deadline), tell)))
        finally:
            os._exit(1)
    os.close(sender)
    with os.fdopen(receiver) as lines:
        told = lines.read().splitlines()
    os.waitpid(child, 0)
    return told


async def _awaited(work: Awaitable[None]) -> None:
    await work
