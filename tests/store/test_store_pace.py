"""`--kv-disk-write-mb-per-s`: what is written in any longer time stays at the average."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

from bankkit import WIDE, Observed, Turns, config_of, eventually, names

from ds4grpc.bank import PersistReason
from ds4grpc.store.pace import Pace
from ds4grpc.store.store import Store

RATE = 8 << 20  # bytes a second


def test_writers_share_one_average() -> None:
    pace = Pace(RATE)

    def write() -> None:
        for _ in range(16):
            pace.wait(RATE // 40)

    began = time.monotonic()
    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert time.monotonic() - began >= 31 / 40


def test_rest_saves_nothing_up() -> None:
    pace = Pace(RATE)
    pace.wait(RATE // 100)
    time.sleep(0.3)
    began = time.monotonic()
    pace.wait(RATE // 4)
    pace.wait(1)
    assert time.monotonic() - began >= 0.25


def test_end_lets_every_writer_go() -> None:
    pace = Pace(1.0)
    pace.wait(3600)
    waits = threading.Thread(target=pace.wait, args=(3600,))
    waits.start()
    pace.end()
    waits.join(5.0)
    assert not waits.is_alive()
    pace.wait(3600)


async def test_banks_and_merges_are_written_no_faster_than_asked(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, WIDE), write_bytes_per_second=RATE)
    observed, turns = Observed(), [Turns(WIDE).grow(1, 90)]
    for seed in range(2, 33):
        turns.append(turns[-1].grow(seed, 8))
    async with Store(config, observed) as store:
        began = time.monotonic()
        for each in turns:
            assert (await store.persist(each.source())).detail == ""
        assert await store.compact() == 1
        seconds = time.monotonic() - began
    num_bytes = observed.written_bytes + observed.compacted_bytes
    rounding = 2 * len(turns) * 3 * 4096  # what rounds sections up is not written
    assert seconds >= (num_bytes - rounding) / RATE
    assert seconds >= 1.0, "too little was written to tell"


async def test_stop_is_not_paced_and_ends_waits_that_have_begun(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, WIDE), write_bytes_per_second=1000.0)
    turns, other = Turns(WIDE).grow(1, 100), Turns(WIDE).grow(2, 100)
    async with Store(config, Observed()) as store:
        slow = asyncio.create_task(store.persist(turns.source()))
        await eventually(lambda: bool(names(tmp_path, "*.tmp")))
        began = time.monotonic()
        assert (await store.persist(other.source(PersistReason.STOP))).detail == ""
        assert (await slow).detail == ""
        assert time.monotonic() - began < 5.0
