"""A bank is written, read and evicted at once: whole or a miss, never half of one."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from bankkit import FINGERPRINT, PLAIN, MemorySink, MemorySource, Observed, Turns, config_of

from ds4grpc.store.files import Files
from ds4grpc.store.store import Store

NUM_ROUNDS = 500 if os.environ.get("DS4GRPC_LONG") else 15
NUM_READERS = 8
QUOTA_BYTES = 2 << 20  # room for a few of the banks below beside the catalog


class SlowFiles(Files):
    """Takes its time over every piece that is written or read."""

    def before(self, operation: str, path: str) -> None:
        if operation in ("write", "read", "sync_data", "rename"):
            time.sleep(0.002)


@pytest.mark.timeout(900)
async def test_b26_banks_read_while_written_and_evicted_are_whole_or_missed(
    tmp_path: Path, no_blocking_calls: object, measured: Callable[[str], None]
) -> None:
    draw = random.Random(26)
    observed = Observed()
    found = [0, 0]  # lookups that missed, and that did not
    kept: list[Turns] = []  # what is stored, oldest first
    over = threading.Event()
    async with Store(config_of(tmp_path, quota_bytes=QUOTA_BYTES), observed, SlowFiles()) as store:
        polling = asyncio.create_task(asyncio.to_thread(_poll, tmp_path, over))
        try:
            for number in range(NUM_ROUNDS):
                written = [Turns().grow(2 * number + each, 700) for each in range(2)]
                kept += written
                async with asyncio.TaskGroup() as group:
                    for _ in range(NUM_READERS // 2):  # of what goes next to make room
                        delays = draw.uniform(0, 0.02), draw.uniform(0, 0.2)
                        group.create_task(_read(store, kept[0], delays, found))
                    for _ in range(NUM_READERS // 2):  # of what is being written
                        delays = draw.uniform(0, 0.3), 0.0
                        group.create_task(_read(store, written[0], delays, found))
                    for turns in written:
                        group.create_task(_persist(store, turns))
                here = {info.bank_id for info in await store.list_banks()}
                kept = [turns for turns in kept if turns.bank_id in here]
        finally:
            over.set()
        num_polled = await polling
        assert store.num_leased == 0
    num_evicted = sum(event == "evicted" for event, _ in observed.events)
    assert num_evicted > 0
    assert [event for event in observed.events if event[0] == "restored" and event[1] != "ok"] == []
    assert min(found) > 0, f"{found[0]} misses, {found[1]} hits"
    measured(
        f"{NUM_ROUNDS} rounds: {found[1]} hits, {found[0]} misses, {num_evicted} evictions, "
        f"{num_polled} rows polled"
    )


async def _persist(store: Store, turns: Turns) -> None:
    assert (await store.persist(turns.source())).detail == ""


async def _read(store: Store, turns: Turns, delays: tuple[float, float], found: list[int]) -> None:
    """Finds a bank, does something else, and then reads it: `delays` before each."""
    await asyncio.sleep(delays[0])
    leases = await store.match(turns.query())
    found[bool(leases)] += 1
    await asyncio.sleep(delays[1])
    for lease in leases:
        assert lease.bank_id == turns.bank_id
        sink = MemorySink(PLAIN, turns.frontier)
        await lease.load(turns.frontier, sink)
        source = await asyncio.to_thread(MemorySource, PLAIN, turns.ids)
        sink.assert_holds(source, turns.frontier, lease.content.held)
        lease.release()


def _poll(folder: Path, over: threading.Event) -> int:
    """Looks at rows and files from outside until it is over; returns how many rows it saw."""
    num_rows = 0
    own = folder / FINGERPRINT.hex()[:16]
    with closing(sqlite3.connect(own / "catalog.db")) as catalog:
        while not over.is_set():
            for bank_id, base, size_bytes in catalog.execute(
                "select bank_id, base, size_bytes from banks"
            ).fetchall():
                num_rows += 1
                try:
                    seen = (own / bank_id[:2] / f"{bank_id}.{base}.bank").stat()
                except FileNotFoundError:  # just evicted: its row goes after its file
                    continue
                assert seen.st_blocks * 512 == size_bytes, f"{bank_id}: {seen} is not whole"
            time.sleep(0.005)
    return num_rows
