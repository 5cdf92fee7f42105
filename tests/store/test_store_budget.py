"""The cap holds, and what is evicted is what should be."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from bankkit import MemorySink, Observed, Turns, eventually, stored_names
from budgetkit import FILE_BYTES, TOKENS, conversation, is_stored, occupied, store_for

from ds4grpc.store.files import Files
from ds4grpc.store.store import Store


class MeasuredFiles(Files):
    """Looks at the real bytes before and after every change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most_bytes = 0

    def before(self, operation: str, path: str) -> None:
        if operation not in ("read", "open_read", "scan"):
            self.most_bytes = max(self.most_bytes, occupied(self.folder))


class RefusingFiles(Files):
    """A disk that takes nothing more while `error` is set."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def before(self, operation: str, path: str) -> None:
        if self.error and operation in ("make_folder", "create", "allocate", "write", "rename"):
            raise OSError(self.error, os.strerror(self.error))


class FullFiles(Files):
    """A disk that has room for that many bank files, whatever the cap says."""

    def __init__(self, folder: Path, num_files: int) -> None:
        self.folder = folder
        self.num_files = num_files

    def before(self, operation: str, path: str) -> None:
        if operation == "allocate" and len(stored_names(self.folder)) >= self.num_files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def frontiers(store: Store) -> list[int]:
    return sorted(info.frontier for info in await store.list_banks())


async def test_cap_holds_at_every_step(tmp_path: Path) -> None:
    observed, files = Observed(), MeasuredFiles(tmp_path)
    async with store_for(tmp_path, 6, observed, files) as store:
        for seed in range(24):
            assert (await store.persist(conversation(seed).source())).detail == ""
        assert observed.count("evicted", "lru") >= 15
        assert files.most_bytes <= store.quota_bytes
        # The folder of the fingerprint itself is not in disk_bytes.
        assert abs(store.disk_bytes - occupied(tmp_path)) <= 0.05 * store.quota_bytes


async def test_cap_is_kept_by_the_next_start(tmp_path: Path) -> None:
    async with store_for(tmp_path, 8) as store:
        for seed in range(8):
            await store.persist(conversation(seed).source())
    async with store_for(tmp_path, 3) as store:
        assert occupied(tmp_path) <= store.quota_bytes
        assert 1 <= len(await store.list_banks()) <= 4


async def test_newest_bank_stays_and_the_oldest_goes(tmp_path: Path) -> None:
    async with store_for(tmp_path, 3) as store:
        banks = [conversation(seed) for seed in range(5)]
        for turns in banks:
            await store.persist(turns.source())
            assert await is_stored(store, turns)
        assert not await is_stored(store, banks[0])


async def test_used_bank_outlives_newer_ones(tmp_path: Path) -> None:
    async with store_for(tmp_path, 3) as store:
        favourite = conversation(0)
        bank_id = (await store.persist(favourite.source())).bank_id
        for _ in range(4):
            await store.note_use(bank_id, proven=False)
        for seed in range(1, 9):
            await store.persist(conversation(seed).source())
        assert await is_stored(store, favourite)


async def test_pinned_bank_is_never_evicted(tmp_path: Path) -> None:
    async with store_for(tmp_path, 3) as store:
        kept = conversation(0)
        await store.persist(kept.source(pin=True))
        for seed in range(1, 8):
            await store.persist(conversation(seed).source())
        assert await is_stored(store, kept)
    async with store_for(tmp_path, 2) as store:  # the pin is a file: it survives
        for seed in range(8, 12):
            await store.persist(conversation(seed).source())
        assert await is_stored(store, kept)


async def test_leased_bank_is_never_evicted(tmp_path: Path) -> None:
    async with store_for(tmp_path, 3) as store:
        kept = conversation(0)
        await store.persist(kept.source())
        (lease,) = await store.match(kept.query())
        for seed in range(1, 8):
            await store.persist(conversation(seed).source())
        sink = MemorySink(kept.layout, kept.frontier)
        assert await lease.load(kept.frontier, sink) > 0
        lease.release()
        for seed in range(8, 12):
            await store.persist(conversation(seed).source())
        assert not await is_stored(store, kept)


async def test_parent_goes_after_its_children(tmp_path: Path) -> None:
    async with store_for(tmp_path, 4) as store:
        first = conversation(0)
        second = first.grow(1, TOKENS)
        await store.persist(first.source())
        await store.persist(second.source())
        for seed in range(2, 20):
            assert await is_stored(store, first)
            if not await is_stored(store, second):
                return
            await store.persist(conversation(seed).source())
        pytest.fail("nothing was evicted")


async def test_bank_larger_than_the_cap_evicts_nothing(tmp_path: Path) -> None:
    observed = Observed()
    async with store_for(tmp_path, 3, observed) as store:
        for seed in range(3):
            await store.persist(conversation(seed).source())
        before = await frontiers(store)
        persisted = await store.persist(Turns().grow(9, 5 * TOKENS).source())
        assert persisted.frontier == 0
        assert "--kv-disk-space-mb" in persisted.detail
        assert observed.count("persist_failed", "quota") == 1
        assert await frontiers(store) == before
        assert (await store.persist(conversation(10).source())).detail == ""


async def test_growing_conversation_never_evicts_its_own_parent(tmp_path: Path) -> None:
    async with store_for(tmp_path, 3) as store:
        turns = conversation(0)
        await store.persist(turns.source())
        for seed in range(1, 3):
            turns = turns.grow(seed, TOKENS)
            persisted = await store.persist(turns.source())
            assert persisted.detail == ""
        persisted = await store.persist(turns.grow(3, TOKENS).source())
        assert (persisted.frontier, persisted.detail[:5]) == (turns.frontier, "quota")
        assert await is_stored(store, turns)


async def test_time_to_live_counts_from_the_last_use(tmp_path: Path) -> None:
    observed = Observed()
    async with store_for(tmp_path, 9, observed) as store:
        brief, used, lasting = conversation(1), conversation(2), conversation(3)
        await store.persist(brief.source(ttl_seconds=0.3))
        used_id = (await store.persist(used.source(ttl_seconds=0.3))).bank_id
        await store.persist(lasting.source())
        for _ in range(5):
            await asyncio.sleep(0.1)
            await store.note_use(used_id, proven=False)
        assert [await is_stored(store, turns) for turns in (brief, used, lasting)] == [
            *(False, True, True)
        ]
        # Upkeep removes the file some time after.
        await eventually(lambda: store.banks_by_trust["reusable"] < 3)
        assert observed.count("evicted", "expired") >= 1


async def test_other_models_bytes_count(tmp_path: Path) -> None:
    other = tmp_path / ("f" * 16) / "ab"
    other.mkdir(parents=True)
    (other / "some.bank").write_bytes(b"x" * (3 * FILE_BYTES))
    async with store_for(tmp_path, 6) as store:
        assert store.disk_bytes >= 3 * FILE_BYTES
        for seed in range(8):
            await store.persist(conversation(seed).source())
        assert occupied(tmp_path) <= store.quota_bytes


async def test_quarantined_files_go_before_banks(tmp_path: Path) -> None:
    async with store_for(tmp_path, 3) as store:
        banks = [conversation(seed) for seed in range(9)]
        ids = [(await store.persist(turns.source())).bank_id for turns in banks[:3]]
        await store.quarantine(ids[1], "a check failed")
        assert store.banks_by_trust == {"reusable": 2, "untrusted": 0, "quarantined": 1}
        for turns in banks[3:]:
            assert await is_stored(store, banks[0])
            await store.persist(turns.source())
            if store.banks_by_trust["quarantined"] == 0:
                break
        assert store.banks_by_trust["quarantined"] == 0
        assert await is_stored(store, banks[0])


async def test_disk_that_refuses_is_told_of_at_once_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observed, files = Observed(), RefusingFiles()
    async with store_for(tmp_path, 9, observed, files) as store:
        kept = conversation(0)
        await store.persist(kept.source())
        assert store.trouble == ""
        files.error = errno.EROFS
        for seed in range(1, 4):
            assert "Read-only" in (await store.persist(conversation(seed).source())).detail
            assert "Read-only" in store.trouble
        assert await is_stored(store, kept)  # reading goes on
        files.error = 0
        await eventually(lambda: not store.trouble)  # with no bank to write
        assert (await store.persist(conversation(4).source())).detail == ""
        assert observed.count("persist_failed", "io") == 3
    told = [record.getMessage() for record in caplog.records if "any more" in record.getMessage()]
    assert len(told) == 1


async def test_full_disk_below_the_cap_gets_room_for_the_next_bank(tmp_path: Path) -> None:
    observed = Observed()
    async with store_for(tmp_path, 20, observed, FullFiles(tmp_path, 3)) as store:
        lost = []
        for seed in range(9):
            turns = conversation(seed)
            persisted = await store.persist(turns.source())
            assert await is_stored(store, turns) == (persisted.detail == "")
            lost.append(persisted.detail.partition(":")[0])
        # One write is lost for each that is too much; the next one finds the room made by then.
        assert lost == [*[""] * 3, *["no_space", ""] * 3]
        assert observed.count("evicted", "lru") == 3
