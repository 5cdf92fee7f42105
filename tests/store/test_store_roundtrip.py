"""What is stored comes back bit for bit, through chains, forks and cuts, on every layout."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from bankkit import (
    LAYOUTS,
    TAILED,
    WINDOWED,
    MemorySink,
    MemorySource,
    Observed,
    Turns,
    config_of,
)

from ds4grpc.layout import StateLayout
from ds4grpc.store.store import Store

each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)


async def restore(store: Store, turns: Turns, cuts: set[int]) -> None:
    """Loads the bank of `turns` up to each cut and compares."""
    source = MemorySource(turns.layout, turns.ids)
    content = turns.content
    leases = await store.match(turns.query())
    lease = next(lease for lease in leases if lease.content.frontier == turns.frontier)
    stored = lease.content
    assert (content.held - stored.held).pairs == ()
    assert set(content.tails) <= set(stored.tails)
    for cut in cuts:
        position = turns.layout.replay_base(cut, stored.held, stored.tails)
        assert position >= turns.layout.replay_base(cut, content.held, content.tails)
        sink = MemorySink(turns.layout, turns.frontier)
        assert await lease.load(position, sink) == lease.load_bytes(position)
        sink.assert_holds(source, position, stored.held)
        assert not turns.layout.tail_bytes or not position or position in sink.tails
    for each in leases:
        each.release()


@each_layout
async def test_chain_restores_at_every_position(tmp_path: Path, layout: StateLayout) -> None:
    observed = Observed()
    turns = Turns(layout, head=40)
    stages = []
    async with Store(config_of(tmp_path, layout), observed) as store:
        for turn, count in enumerate((90, 61, 33, 48)):
            turns = turns.grow(turn, count)
            stages.append(turns)
            persisted = await store.persist(turns.source())
            assert (persisted.frontier, persisted.detail) == (turns.frontier, "")
    assert len([each for each in observed.events if each[0] == "persisted"]) == 5  # the head too
    async with Store(config_of(tmp_path, layout), observed) as store:
        for stage in stages:
            cuts = {0, 1, 39, 40, 41, 90, 91, 130, 151, 184, 185, 231, stage.frontier}
            await restore(store, stage, {cut for cut in cuts if cut <= stage.frontier})


@each_layout
async def test_branches_restore_each_its_own_rows(tmp_path: Path, layout: StateLayout) -> None:
    async with Store(config_of(tmp_path, layout), Observed()) as store:
        stem = Turns(layout).grow(1, 75).grow(2, 66)
        branches = [stem.grow(3, 50), stem.grow(4, 41), stem.branch_at(75).grow(5, 80)]
        for turns in (stem, *branches):
            await store.persist(turns.source())
        for turns in (stem, *branches):
            await restore(store, turns, {74, 75, 76, 140, 141, turns.frontier})


async def test_window_rows_are_stored_once_in_a_chain(tmp_path: Path) -> None:
    """One window a turn is written: 16 rows of 24 bytes, beside 48 bytes a token."""
    async with Store(config_of(tmp_path, WINDOWED), Observed()) as store:
        turns = Turns(WINDOWED)
        for seed in range(6):
            turns = turns.grow(seed, 100)
            await store.persist(turns.source())
        (lease, *rest) = await store.match(turns.query())
        assert [link.windows.num_tokens for link in lease.links] == [16] * 6
        for each in (lease, *rest):
            each.release()


@pytest.mark.parametrize("layout", [WINDOWED, TAILED], ids=lambda layout: layout.layout_id)
async def test_prefix_that_resumes_nowhere_near_is_written(
    tmp_path: Path, layout: StateLayout
) -> None:
    """All its tokens are in a longer bank, but not the window at its own end."""
    async with Store(config_of(tmp_path, layout), Observed()) as store:
        whole = Turns(layout).grow(1, 400)
        await store.persist(whole.source())
        part = Turns(layout, ids=whole.cut(288)).grow(1, 0)
        persisted = await store.persist(part.source())
        assert persisted.written_bytes > 0
        info = await store.get(persisted.bank_id)
        assert (info.base, info.frontier) == (288, 288)
        await restore(store, part, {288})
        assert (await store.persist(part.source())).written_bytes == 0


async def test_row_of_incomplete_tokens_is_left_out(tmp_path: Path) -> None:
    """A layout of four tokens a row: the row of a frontier that does not fill it comes later."""
    async with Store(config_of(tmp_path, TAILED), Observed()) as store:
        turns = Turns(TAILED).grow(1, 45)
        for seed, count in ((2, 1), (3, 1), (4, 20)):
            await store.persist(turns.source())
            turns = turns.grow(seed, count)
        await store.persist(turns.source())
        await restore(store, turns, {45, 46, 47, 67})
        (lease, *rest) = await store.match(turns.query())
        assert [link.base for link in lease.links] == [0, 44]  # a row's tokens are never split
        for each in (lease, *rest):
            each.release()


async def test_expired_head_serves_the_next_conversation(tmp_path: Path) -> None:
    """Until upkeep it is there, but no lookup offers it: written once more it would be a second
    bank of its name. So it is with one that was deleted and whose last child is evicted."""
    first = Turns(head=40).grow(1, 100)
    async with Store(config_of(tmp_path), Observed()) as store:
        persisted = await store.persist(first.source(ttl_seconds=0.001))
        assert persisted.frontier == 100
        await asyncio.sleep(0.002)
        assert await store.match(first.query()) == []
        other = first.head_only().grow(2, 60)
        assert (await store.persist(other.source())).detail == ""
        await restore(store, other, {100})
        assert not (await store.get(first.head_only().bank_id)).ttl_seconds
