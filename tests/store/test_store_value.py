"""What is evicted when the cap is reached, as people met it, and that the cap is never passed.

The names carry the ids of docs/field-reports.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bankkit import FINGERPRINT, PLAIN, Observed, Turns, names
from budgetkit import FILE_BYTES, TOKENS, conversation, is_stored, occupied, store_for

from ds4grpc.store.store import Store, StoreConfig

OTHER_FINGERPRINT = bytes(reversed(FINGERPRINT))


class Sampler:
    """Looks at the real bytes of a folder every 20 ms, in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most_bytes = 0
        self.num_samples = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        done = threading.Event()

        def look() -> None:
            while not done.wait(0.02):
                self.most_bytes = max(self.most_bytes, occupied(self.folder))
                self.num_samples += 1

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


async def test_b14_new_conversation_in_a_full_cache_is_kept(tmp_path: Path) -> None:
    observed = Observed()
    async with store_for(tmp_path, 3, observed) as store:
        for seed in range(3):
            await store.persist(conversation(seed).source())
        before = observed.written_bytes
        turns = Turns()
        for seed in range(3):
            turns = turns.grow(100 + seed, TOKENS // 3)
            first = await store.persist(turns.source())
            again = await store.persist(turns.source())
            assert (first.detail, again.written_bytes) == ("", 0)
            assert await is_stored(store, turns)
        kept = sum(info.size_bytes for info in await store.list_banks() if info.created_at)
        assert observed.written_bytes - before <= 2 * kept
        assert 1 <= observed.count("evicted", "lru") <= 2


async def test_b14_bank_that_a_waiting_request_needs_is_not_evicted_for_the_outgoing_one(
    tmp_path: Path,
) -> None:
    async with store_for(tmp_path, 0.3) as store:
        returning = conversation(1)
        await store.persist(returning.source())
        (lease,) = await store.match(returning.query())  # the waiting request has found it
        outgoing = await store.persist(conversation(2).source())
        assert "quota" in outgoing.detail
        lease.release()
        assert await is_stored(store, returning)
        assert (await store.persist(conversation(2).source())).detail == ""


async def test_b15_shared_head_outlives_large_one_offs_and_goes_in_the_end(tmp_path: Path) -> None:
    head = Turns(head=500).grow(1, 500)
    async with store_for(tmp_path, 5) as store:
        children = [head.grow(10 + seed, 40) for seed in range(20)]
        for turns in children:
            await store.persist(turns.source())
            for lease in await store.match(turns.query()):
                await store.note_use(lease.bank_id, proven=False)
                lease.release()
        (shared,) = [info for info in await store.list_banks() if info.frontier == 500]
        for seed in range(5):
            await store.persist(Turns().grow(50 + seed, 3 * TOKENS).source())
        listed = {info.bank_id for info in await store.list_banks()}
        assert shared.bank_id in listed
        twenty_first = await store.persist(head.grow(31, 40).source())
        assert twenty_first.written_bytes < FILE_BYTES / 4  # it leans on the head
        for seed in range(50):  # nobody asks for the head any more
            await store.persist(Turns().grow(100 + seed, TOKENS // 2).source())
        assert shared.bank_id not in {info.bank_id for info in await store.list_banks()}


@pytest.mark.slow
async def test_b18_cap_holds_for_every_byte_of_two_models_at_every_moment(
    tmp_path: Path, measured: Callable[[str], None]
) -> None:
    """Two owners of one folder write four times its cap, beside files that nobody knows of."""
    quota_bytes = 16 << 20
    sampler = Sampler(tmp_path)
    stray = tmp_path / "somebody" / "left.this"
    stray.parent.mkdir()
    stray.write_bytes(os.urandom(2 << 20))

    def config(fingerprint: bytes) -> StoreConfig:
        return StoreConfig(str(tmp_path), fingerprint, PLAIN, quota_bytes, 16)

    async def fill(store: Store, first: int) -> int:
        written = 0
        for seed in range(first, first + 60):
            written += (await store.persist(conversation(seed).source())).written_bytes
        return written

    with sampler.running():
        async with (
            Store(config(FINGERPRINT), Observed()) as one,
            Store(config(OTHER_FINGERPRINT), Observed()) as two,
        ):
            written = sum(await asyncio.gather(fill(one, 0), fill(two, 100)))
            assert abs(one.disk_bytes - occupied(tmp_path)) <= 0.05 * quota_bytes
            num_stored = [len(await store.list_banks()) for store in (one, two)]
            assert min(num_stored) >= 3, "one model has driven the other out"
    measured(
        f"{written / quota_bytes:.1f} times the cap written; {sampler.num_samples} samples, at most"
        f" {sampler.most_bytes / quota_bytes:.0%} of the cap; banks {num_stored}"
    )
    assert written >= 2 * quota_bytes
    assert sampler.num_samples >= 20
    assert sampler.most_bytes <= quota_bytes


def leave(shard: Path) -> None:
    """Files as crashes and other programs leave them."""
    shard.mkdir(exist_ok=True)
    for number in range(4):
        for name in (f"ab{number:030x}.0.bank.tmp", f"ab{number + 9:030x}.0.bank"):
            (shard / name).write_bytes(os.urandom(FILE_BYTES // 2))


async def test_b18_start_over_leftovers_comes_below_the_cap(tmp_path: Path) -> None:
    async with store_for(tmp_path, 8) as store:
        for seed in range(8):
            await store.persist(conversation(seed).source())
    home = tmp_path / FINGERPRINT.hex()[:16]
    leave(home / "ab")
    began = time.monotonic()
    async with store_for(tmp_path, 5) as store:
        assert time.monotonic() - began < 10
        assert occupied(tmp_path) <= store.quota_bytes
        assert names(tmp_path, "*.tmp") == []
        assert abs(store.disk_bytes - occupied(tmp_path)) <= 0.05 * store.quota_bytes
        listed = await store.list_banks()
        files = {path.name: path for path in home.glob("??/*.bank")}
        assert len(listed) == len(files) >= 3
        assert sum(info.size_bytes for info in listed) == sum(
            path.stat().st_blocks * 512 for path in files.values()
        )
