"""What is stored comes back bit for bit, through chains, forks and cuts, on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from bankkit import LAYOUTS, MemorySink, MemorySource, Observed, Turns, config_of

from ds4grpc.layout import StateLayout
from ds4grpc.store.store import Store

each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)


async def restore(store: Store, turns: Turns, position: int) -> int:
    """Loads the bank of `turns` up to a position and compares; returns the bytes read."""
    source = MemorySource(turns.layout, turns.ids)
    leases = await store.match(turns.query())
    lease = next(lease for lease in leases if lease.content.frontier == turns.frontier)
    sink = MemorySink(turns.layout, turns.frontier)
    read_bytes = await lease.load(position, sink)
    assert read_bytes == lease.load_bytes(position)
    sink.assert_holds(source, position, lease.content.held)
    for each in leases:
        each.release()
    return read_bytes


@each_layout
async def test_store_chain_restores_every_position(tmp_path: Path, layout: StateLayout) -> None:
    observed = Observed()
    turns = Turns(layout, head=40)
    async with Store(config_of(tmp_path, layout), observed) as store:
        stages = []
        for turn, count in enumerate((90, 61, 33, 48)):
            turns = turns.grow(turn, count)
            stages.append(turns)
            persisted = await store.persist(turns.source())
            assert (persisted.frontier, persisted.detail) == (turns.frontier, "")
    assert len([e for e in observed.events if e[0] == "persisted"]) == 5  # head and four deltas
    async with Store(config_of(tmp_path, layout), observed) as store:
        for stage in stages:
            content = stage.content
            for cut in (1, 39, 40, 41, 90, 91, 130, 151, 184, 200, 232):
                cut = min(cut, stage.frontier)
                position = layout.replay_base(cut, content.held, content.tails)
                assert position or cut < 90 or layout.alignment > 1
                await restore(store, stage, position)
