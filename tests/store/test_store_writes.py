"""What a conversation's files cost to write, turn by turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from bankkit import Observed, Turns, config_of

from ds4grpc.bank import PersistReason
from ds4grpc.engine.banks import BankSource
from ds4grpc.layout import Rows, StateLayout
from ds4grpc.store.store import Store

NUM_TURNS = 40
TURN_TOKENS = 70
HEAVY = StateLayout("heavy/1", (Rows("kv", 8192),))
# One window is as many bytes as 690 tokens of plain rows; a turn of 70 tokens lies within it.
NEAR = StateLayout("near/1", (Rows("kv", 512), Rows("near", 1536, window=230)))
LATE = StateLayout("late/1", (Rows("kv", 1024, 4), Rows("near", 1536, window=64)), tail_bytes=9000)


class Blank:
    """Rows and tails of which nobody looks at the values (`engine.banks.RowSource`)."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        return memoryview(bytes((stop_row - start_row) * self._layout.rows[plane].row_bytes))

    def tail(self, position: int) -> bytes:
        return bytes(self._layout.tail_bytes)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


async def converse(store: Store, layout: StateLayout, turns_a_write: int = 1) -> tuple[int, int]:
    """Forty turns; returns the tokens of the last bank and the number of files written."""
    turns, num_files = Turns(layout), 0
    for seed in range(NUM_TURNS):
        turns = turns.grow(seed, TURN_TOKENS)
        if (seed + 1) % turns_a_write == 0 or seed + 1 == NUM_TURNS:
            source = BankSource(turns.content, Blank(layout), PersistReason.TURN, False, None)
            persisted = await store.persist(source)
            assert (persisted.detail, persisted.frontier) == ("", turns.frontier)
            num_files += 1
    return turns.frontier, num_files


def process_bytes() -> int:
    """What this process has made the kernel write so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("write_bytes")))


async def test_ds4_39_forty_turns_write_each_row_once(tmp_path: Path) -> None:
    """Bytes of the process, catalog and log included."""
    async with Store(config_of(tmp_path, HEAVY), Observed()) as store:
        before = process_bytes()
        tokens, _ = await converse(store, HEAVY)
        written = process_bytes() - before
        if not written:
            pytest.skip("the kernel counts no writes to this file system")
        final = tokens * HEAVY.bytes_per_token
        assert final <= written <= 1.3 * final


@pytest.mark.parametrize("layout", [NEAR, LATE], ids=lambda layout: layout.layout_id)
async def test_windows_and_tails_are_written_once_a_frontier(
    tmp_path: Path, layout: StateLayout
) -> None:
    """Forty waypoints lie in a conversation, but not forty windows."""
    observed = Observed()
    async with Store(config_of(tmp_path, layout), observed) as store:
        tokens, num_files = await converse(store, layout, turns_a_write=10)
    rows = tokens * layout.plain_bytes_per_token
    assert observed.written_bytes <= 1.3 * (rows + num_files * layout.point_bytes)
    assert observed.written_bytes <= 2.1 * rows, "windows are most of it"


async def test_newest_turn_of_a_long_write_can_be_cut_off_again(tmp_path: Path) -> None:
    """Rows enough: the position before the newest turn is kept too, so that a regenerated reply
    replays nothing."""
    turns = Turns(NEAR).grow(1, 4000).grow(2, TURN_TOKENS)
    async with Store(config_of(tmp_path, NEAR), Observed()) as store:
        source = BankSource(turns.content, Blank(NEAR), PersistReason.TURN, False, None)
        await store.persist(source)
        leases = await store.match(turns.query())
        held = leases[0].content.held
        assert NEAR.replay_base(4000, held) == 4000
        assert NEAR.replay_base(4050, held) == 4050  # between the two windows' ends is no gap
        for lease in leases:
            lease.release()
