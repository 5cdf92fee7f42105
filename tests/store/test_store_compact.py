"""Compaction: chains stay short, banks stay what they are, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bankkit import (
    FINGERPRINT,
    LAYOUTS,
    PLAIN,
    RATIO,
    SPACE,
    WINDOWED,
    DyingFiles,
    MemorySink,
    MemorySource,
    Observed,
    Turns,
    config_of,
    eventually,
    ids_of,
    names,
    stored_names,
)

from ds4grpc.bank import common_prefix
from ds4grpc.engine.banks import MatchQuery
from ds4grpc.layout import StateLayout
from ds4grpc.store.compact import RUN_FILES, RUN_TOKENS
from ds4grpc.store.files import Files
from ds4grpc.store.reader import BankFile
from ds4grpc.store.store import BankInfo, Store

LONG = bool(os.environ.get("DS4GRPC_LONG"))  # `make test-long`: every step, not each fifth
COUNT = 7
STEP = RUN_TOKENS // COUNT + 3  # so that so many turns are worth merging


def conversation(layout: StateLayout = PLAIN, count: int = COUNT, step: int = STEP) -> list[Turns]:
    """A conversation after each of its turns."""
    turns = [Turns(layout)]
    for seed in range(count):
        turns.append(turns[-1].grow(seed, step))
    return turns[1:]


async def persist(store: Store, grown: list[Turns], pinned: int = -1) -> None:
    for number, turns in enumerate(grown):
        persisted = await store.persist(turns.source(pin=number == pinned))
        assert (persisted.detail, persisted.frontier) == ("", turns.frontier)


async def infos(store: Store) -> dict[str, BankInfo]:
    return {info.bank_id: info for info in await store.list_banks()}


async def check_restores(store: Store, turns: Turns) -> None:
    """The bank is found by its key and holds what a conversation of its ids must, bit for bit."""
    leases = await store.match(turns.query())
    lease = next(each for each in leases if each.bank_id == turns.bank_id)
    assert lease.content.records == turns.records
    assert (
        turns.layout.replay_base(turns.frontier, lease.content.held, lease.content.tails)
        == turns.resumes_at
    )
    sink = MemorySink(turns.layout, turns.frontier)
    await lease.load(turns.resumes_at, sink)
    source = MemorySource(turns.layout, turns.ids)
    sink.assert_holds(source, turns.resumes_at, lease.content.held)
    for each in leases:
        each.release()


def path_of(folder: Path, turns: Turns) -> Path:
    (path,) = folder.rglob(f"{turns.bank_id}.*.bank")
    return path


def chain_files(store: Store, turns: Turns) -> int:
    index = store._shelf.index  # the number of files that a load opens
    entry = index.get(turns.bank_id)
    assert entry is not None
    return len(index.chain(entry))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)
async def test_merged_chain_restores_every_bank_bit_for_bit(
    tmp_path: Path, layout: StateLayout
) -> None:
    observed, grown = Observed(), conversation(layout)
    async with Store(config_of(tmp_path, layout), observed) as store:
        await persist(store, grown, pinned=3)
        before = await infos(store)
        assert [chain_files(store, turns) for turns in grown] == list(range(1, COUNT + 1))
        assert await store.compact() == 1
        assert [chain_files(store, turns) for turns in grown] == [*[2] * (COUNT - 1), 1]
        after = await infos(store)
        # Ids, pins, records and rows stay; the files change.
        assert {
            i: (b.frontier, b.pinned, b.record_kinds, b.created_at) for i, b in after.items()
        } == {i: (b.frontier, b.pinned, b.record_kinds, b.created_at) for i, b in before.items()}
        for turns in grown:
            await check_restores(store, turns)
    async with Store(config_of(tmp_path, layout), observed) as store:
        assert len(stored_names(tmp_path)) == COUNT
        for turns in grown:
            await check_restores(store, turns)
        assert all([verdict.ok async for verdict in store.verify()])
    for path in (tmp_path / FINGERPRINT.hex()[:16]).glob("catalog.db*"):
        path.unlink()
    async with Store(config_of(tmp_path, layout), observed) as store:
        assert (await infos(store)).keys() == before.keys()
        for turns in grown:
            await check_restores(store, turns)


async def test_merged_banks_are_found_by_their_text_alone(tmp_path: Path) -> None:
    """By the end of their keys, and where a reply has been cut by the control token ahead of it."""
    grown = []
    for turns in conversation():
        newest, *older = turns.records
        anchored = replace(newest, anchor=len(newest.key) - 8)
        grown.append(replace(turns, records=(anchored, *older)))
    async with Store(config_of(tmp_path), Observed()) as store:
        await persist(store, grown)
        assert await store.compact() == 1
        for turns in grown:
            for mark in (len(turns.text), len(turns.text) - 8):
                text = turns.text[:mark] + b" and then"
                query = MatchQuery(SPACE, text, (mark,), ids_of(mark, 300), exact=False)
                leases = await store.match(query)
                assert turns.bank_id in [lease.bank_id for lease in leases]
                for lease in leases:
                    lease.release()


async def test_merged_banks_are_found_by_their_ids_when_the_newest_is_deleted(
    tmp_path: Path,
) -> None:
    """It holds the rows and the ids' hashes of all; the longest other one stands for it."""
    grown = conversation()
    async with Store(config_of(tmp_path), Observed()) as store:
        await persist(store, grown)
        assert await store.compact() == 1
        await store.delete(grown[-1].bank_id)
        for turns in grown[:-1]:
            ids = np.concatenate([turns.ids, ids_of(99, 50)])
            leases = await store.match(MatchQuery(SPACE, b"", (), ids, exact=True))
            shared = [common_prefix(lease.content.ids, ids) for lease in leases]
            for lease in leases:
                lease.release()
            assert max(shared, default=0) == turns.frontier


async def test_chain_stays_short_and_no_row_is_merged_twice(tmp_path: Path) -> None:
    observed = Observed()
    async with Store(config_of(tmp_path), observed) as store:
        grown = conversation(count=4 * RUN_FILES if LONG else 2 * RUN_FILES, step=16)
        for number, turns in enumerate(grown):
            await persist(store, [turns])
            await store.compact()
            whole_runs = number // RUN_FILES + 1
            assert chain_files(store, turns) <= whole_runs + RUN_FILES
        assert observed.count("compacted", "") == len(grown) // RUN_FILES
        # Its rows once more, and what each file takes besides: ids, records, rounding.
        rows = grown[-1].frontier * 128
        besides = (len(grown) + 2 * len(grown) // RUN_FILES) * 6 * 4096
        assert observed.compacted_bytes < rows + besides + sum(len(t.ids) * 20 for t in grown)
        for turns in (grown[0], grown[RUN_FILES - 1], grown[RUN_FILES], grown[-1]):
            await check_restores(store, turns)


async def test_hidden_parents_go_when_their_only_child_is_merged(tmp_path: Path) -> None:
    grown = conversation(WINDOWED)
    async with Store(config_of(tmp_path, WINDOWED), Observed()) as store:
        await persist(store, grown)
        for turns in grown[1:4]:
            await store.delete(turns.bank_id)
        assert len(stored_names(tmp_path)) == COUNT
        disk_bytes = store.disk_bytes
        assert await store.compact() == 1
        assert len(stored_names(tmp_path)) == COUNT - 3
        assert names(tmp_path, "*.hidden") == []
        assert store.disk_bytes < disk_bytes
        for turns in (grown[0], *grown[4:]):
            await check_restores(store, turns)
        # The deleted ones are gone, and when one comes back the bank that took its rows serves it.
        assert grown[2].bank_id not in await infos(store)
        persisted = await store.persist(grown[2].source())
        assert (persisted.detail, persisted.written_bytes) == ("", 0)
        assert persisted.bank_id == grown[-1].bank_id


async def test_run_ends_where_another_bank_branches_off(tmp_path: Path) -> None:
    grown = conversation()
    branch = grown[2].grow(99, 500)
    async with Store(config_of(tmp_path), Observed()) as store:
        await persist(store, [*grown[:3], branch, *grown[3:]])
        assert await store.compact() == 0  # either side is short of a run
        longer = grown[-1].grow(98, RUN_TOKENS // 2)
        await persist(store, [longer])
        assert await store.compact() == 1
        assert chain_files(store, longer) == 4  # the three that both need, and one
        for turns in (*grown, branch, longer):
            await check_restores(store, turns)


async def test_head_that_conversations_share_is_not_merged(tmp_path: Path) -> None:
    first = Turns(head=100).grow(1, 300)
    async with Store(config_of(tmp_path), Observed()) as store:
        await persist(store, [first, first.grow(2, 950), first.grow(2, 950).grow(3, 950)])
        assert await store.compact() == 1
        head = first.head_only()
        assert chain_files(store, head) == 1
        index = store._shelf.index
        entry = index.get(head.bank_id)
        assert entry is not None
        assert (entry.base, entry.frontier) == (0, 100)


async def test_load_begun_before_a_merge_reads_its_own_files_to_the_end(tmp_path: Path) -> None:
    grown = conversation(WINDOWED)
    last = grown[-1]
    async with Store(config_of(tmp_path, WINDOWED), Observed()) as store:
        await persist(store, grown)
        leases = await store.match(last.query())
        assert await store.compact() == 1
        assert len(stored_names(tmp_path)) == 2 * COUNT
        await store.rescan()
        lease = next(each for each in leases if each.bank_id == last.bank_id)
        sink = MemorySink(WINDOWED, last.frontier)
        await lease.load(last.resumes_at, sink)
        sink.assert_holds(MemorySource(WINDOWED, last.ids), last.resumes_at, lease.content.held)
        for each in leases:
            each.release()
        await store.rescan()
        assert len(stored_names(tmp_path)) == COUNT
        for turns in grown:
            await check_restores(store, turns)


class SlowFiles(Files):
    """Writes of the merged file take a while each, once armed."""

    seconds = 0.0

    def before(self, operation: str, path: str) -> None:
        if operation == "write" and self.seconds and path.endswith(".0.bank.tmp"):
            time.sleep(self.seconds)


async def test_store_serves_while_a_chain_is_merged(tmp_path: Path) -> None:
    grown, files, other = conversation(), SlowFiles(), Turns().grow(77, 40)
    async with Store(config_of(tmp_path), Observed(), files) as store:
        await persist(store, grown)
        files.seconds = 0.2
        merging = asyncio.create_task(store.compact())
        await eventually(lambda: bool(names(tmp_path, "*.tmp")))
        await check_restores(store, grown[-1])
        next_turn = grown[-1].grow(98, 40)
        await persist(store, [next_turn])  # leans on the bank that is being merged
        assert not merging.done()
        assert await merging == 1
        assert (await store.persist(other.source())).detail == ""
        for turns in (*grown, next_turn):
            await check_restores(store, turns)
        assert chain_files(store, next_turn) == 2


async def test_bank_that_branches_off_meanwhile_stops_the_merge(tmp_path: Path) -> None:
    grown, files = conversation(), SlowFiles()
    async with Store(config_of(tmp_path), Observed(), files) as store:
        await persist(store, grown)
        files.seconds = 0.2
        merging = asyncio.create_task(store.compact())
        await eventually(lambda: bool(names(tmp_path, "*.tmp")))
        branch = grown[2].grow(99, 50)
        await persist(store, [branch])
        assert await merging == 0
        assert names(tmp_path, "*.tmp") == []
        for turns in (*grown, branch):
            await check_restores(store, turns)


async def test_closing_does_not_wait_for_a_merge(tmp_path: Path) -> None:
    grown, files = conversation(), SlowFiles()
    async with Store(config_of(tmp_path), Observed(), files) as store:
        await persist(store, grown)
        files.seconds = 0.3
        merging = asyncio.create_task(store.compact())
        await eventually(lambda: bool(names(tmp_path, "*.tmp")))
    assert merging.done() and merging.result() == 0
    assert names(tmp_path, "*.tmp") == []
    assert len(stored_names(tmp_path)) == COUNT


async def test_damage_found_by_a_merge_quarantines_the_damaged_bank(tmp_path: Path) -> None:
    grown = conversation()
    async with Store(config_of(tmp_path), Observed()) as store:
        await persist(store, grown)
        path = path_of(tmp_path, grown[3])
        with path.open("r+b") as file:
            file.seek(-5000, os.SEEK_END)
            byte = file.read(1)
            file.seek(-5000, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        assert await store.compact() == 0
        assert (await infos(store)).keys() == {turns.bank_id for turns in grown[:3]}
        await check_restores(store, grown[2])


async def test_merge_that_has_no_room_evicts_nothing(tmp_path: Path) -> None:
    observed, grown = Observed(), conversation()
    quota_bytes = grown[-1].frontier * 128 + (1 << 20)
    async with Store(config_of(tmp_path, quota_bytes=quota_bytes), observed) as store:
        await persist(store, grown)
        other = Turns().grow(5, 2500)
        await persist(store, [other])
        assert await store.compact() == 0
        assert len(await infos(store)) == COUNT + 1
        assert observed.count("evicted", "lru") == 0


async def life(folder: Path, files: DyingFiles, deadline: int) -> None:
    grown = conversation(WINDOWED)
    async with Store(config_of(folder, WINDOWED), Observed(), files) as store:
        await persist(store, grown, pinned=4)
        await store.delete(grown[2].bank_id)
        if deadline:
            files.arm(deadline)
        first = len(files.operations)
        assert await store.compact() == 1
        del files.operations[:first]
        if deadline:
            os._exit(0)


@pytest.mark.slow
def test_process_that_dies_at_any_step_of_a_merge_loses_nothing(tmp_path: Path) -> None:
    """Each bank is whole after the next start, with the catalog and without it."""
    files = DyingFiles()
    asyncio.run(life(tmp_path / "whole", files, 0))
    num_steps = len(files.operations)
    assert {"create", "write", "sync_data", "rename", "sync_folder", "unlink"} <= set(
        files.operations
    )
    for deadline in range(1, num_steps + 1, 1 if LONG else 11):
        folder = tmp_path / str(deadline)
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(life(folder, DyingFiles(), deadline))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 9, f"step {deadline} was not reached"
        without = tmp_path / f"{deadline}-without"
        shutil.copytree(folder, without)
        for path in (without / FINGERPRINT.hex()[:16]).glob("catalog.db*"):
            path.unlink()
        asyncio.run(check_all(folder))
        asyncio.run(check_all(without))


async def check_all(folder: Path) -> None:
    grown = conversation(WINDOWED)
    kept = [turns for number, turns in enumerate(grown) if number != 2]
    observed = Observed()
    async with Store(config_of(folder, WINDOWED), observed) as store:
        assert names(folder, "*.tmp") + names(folder, "*.dead") == []
        found = await infos(store)
        assert found.keys() == {turns.bank_id for turns in kept}
        assert [bank_id for bank_id, info in found.items() if info.pinned] == [grown[4].bank_id]
        for turns in kept:
            await check_restores(store, turns)
        assert store.banks_by_trust["quarantined"] == 0
        await persist(store, [grown[-1].grow(98, 60)])
        await store.compact()
        for turns in kept:
            await check_restores(store, turns)
    with closing(sqlite3.connect(folder / FINGERPRINT.hex()[:16] / "catalog.db")) as rows:
        named = {f"{i}.{base}.bank" for i, base in rows.execute("select bank_id, base from banks")}
    assert named == stored_names(folder)


async def test_pieces_of_a_merge_are_of_ratio_layouts_too(tmp_path: Path) -> None:
    """A bank that ends between two rows keeps those tokens' rows in its own file."""
    grown = conversation(RATIO, step=STEP + 2)
    assert any(turns.frontier % RATIO.alignment for turns in grown)
    async with Store(config_of(tmp_path, RATIO), Observed()) as store:
        await persist(store, grown)
        assert await store.compact() == 1
        for turns in grown[:-1]:
            path = path_of(tmp_path, turns)
            with BankFile.open(Files(), str(path), store._form) as file:
                assert file.header.frontier - file.header.base == turns.frontier % 4


async def test_deleted_bank_does_not_come_back_from_the_file_it_had_before(tmp_path: Path) -> None:
    """Somebody read the old files when they were merged, so they stay until the next upkeep."""
    grown = conversation()
    async with Store(config_of(tmp_path / "banks"), Observed()) as store:
        await persist(store, grown)
        leases = await store.match(grown[-1].query())
        assert await store.compact() == 1
        for lease in leases:
            lease.release()
        assert len(stored_names(tmp_path / "banks")) > len(grown)
        await store.delete(grown[0].bank_id)
        # Killed now.
        await asyncio.to_thread(shutil.copytree, tmp_path / "banks", tmp_path / "left")
    async with Store(config_of(tmp_path / "left"), Observed()) as store:
        assert grown[0].bank_id not in await infos(store)
        assert (await store.storage()).num_quarantined == 0
        for turns in (grown[1], grown[-1]):
            await check_restores(store, turns)
