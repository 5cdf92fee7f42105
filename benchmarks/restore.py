"""`make bench-store NAME=restore`: restoring a bank beside reading and copying the same bytes.

A bank of SmolLM2's layout is stored by the real store, as one file and as a chain of deltas. Each
round restores it and runs the plain way in turn, in this process:

    restored   the store's load of a leased bank into the slot's memory: open, header, every
               checksum, every row where the model reads it
    plain      preadv of the files in large pieces into one buffer, and one copy of that into the
               slot's memory; with 1, 2 and 4 threads, of which the fastest counts

with the files in the page cache, and after POSIX_FADV_DONTNEED. Memory of buffer and slot has been
touched before. Prints medians and worst cases, and last one JSON object, which `--record` appends
to benchmarks/results/.

    python benchmarks/restore.py [--tokens N] [--rounds N] [--dtype D] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from scale import Unheard  # noqa: E402
from turns import RESULTS, commit, machine  # noqa: E402
from writes import Table, drop_caches, say  # noqa: E402

from ds4grpc.bank import BankContent, PersistReason, namespace  # noqa: E402
from ds4grpc.config import MB  # noqa: E402
from ds4grpc.engine.banks import BankSource, MatchQuery, StoredBank  # noqa: E402
from ds4grpc.engine.memory import HostMemory  # noqa: E402
from ds4grpc.engine.slots import SlotSink  # noqa: E402
from ds4grpc.layout import StateLayout  # noqa: E402
from ds4grpc.model import registry  # noqa: E402
from ds4grpc.model.checkpoint import open_checkpoint  # noqa: E402
from ds4grpc.model.llama import state_layout  # noqa: E402
from ds4grpc.store.store import Store, StoreConfig  # noqa: E402

SPACE = namespace("restore", b"")
FINGERPRINT = bytes(range(32))
NUM_DELTAS = 6
PIECE_BYTES = 4 << 20
MOST_TIMES = 1.25
THREADS = (1, 2, 4)


class Noise:
    """Rows of random bytes (`engine.banks.RowSource`)."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self._bytes = np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8)

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        size = self._layout.rows[plane].row_bytes
        start = (plane * 7919 + start_row) * size % (32 << 20)
        return memoryview(self._bytes[start : start + (stop_row - start_row) * size]).cast("B")

    def tail(self, position: int) -> bytes:
        raise AssertionError

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


async def stored(store: Store, layout: StateLayout, ids: Any, frontiers: Sequence[int]) -> None:
    """One file for each frontier."""
    for frontier in frontiers:
        content = BankContent(SPACE, ids[:frontier])
        source = BankSource(content, Noise(layout), PersistReason.TURN, False, None)
        persisted = await store.persist(source)
        assert persisted.frontier == frontier, persisted.detail


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/??/*.bank"))


class Plain:
    """The least that restoring could be: the same bytes read and copied once."""

    def __init__(self, paths: Sequence[Path], memory: HostMemory) -> None:
        self._paths = paths
        self._size = sum(path.stat().st_size for path in paths)
        self._buffer = np.zeros(self._size, dtype=np.uint8)
        self._target = np.frombuffer(memory._map, dtype=np.uint8)[: self._size]
        assert len(self._target) == self._size

    def run(self, threads: ThreadPoolExecutor) -> None:
        at = 0
        work = []
        files = []
        for path in self._paths:
            size = path.stat().st_size
            files.append(os.open(path, os.O_RDONLY))
            for start in range(0, size, PIECE_BYTES):
                length = min(PIECE_BYTES, size - start)
                work.append(threads.submit(self._piece, files[-1], start, at + start, length))
            at += size
        for piece in work:
            piece.result()
        for file in files:
            os.close(file)

    def _piece(self, file: int, start: int, at: int, length: int) -> None:
        view = memoryview(self._buffer[at : at + length])
        done = 0
        while done < length:
            done += os.preadv(file, [view[done:]], start + done)
        np.copyto(self._target[at : at + length], self._buffer[at : at + length])


async def measure_case(
    table: Table, name: str, layout: StateLayout, frontiers: Sequence[int], asked: Any
) -> None:
    """One way of storing the bank, warm and dropped."""
    ids = np.random.default_rng(2).integers(0, 40_000, asked.tokens, dtype=np.uint32)
    with tempfile.TemporaryDirectory(prefix="ds4grpc-restore-") as root:
        config = StoreConfig(root, FINGERPRINT, layout, 1 << 40, 16)
        async with Store(config, Unheard()) as store:
            await stored(store, layout, ids, frontiers)
            query = MatchQuery(SPACE, b"", (), ids, exact=True)
            leases = await store.match(query)
            lease = max(leases, key=lambda each: each.content.frontier)
            assert lease.content.frontier == asked.tokens
            paths = await asyncio.to_thread(files_of, Path(root))
            assert len(paths) == len(frontiers)
            memory = HostMemory(layout, asked.tokens + 256)
            for cache in ("warm", "dropped"):
                await _rounds(table, f"{name}, {cache}", lease, paths, memory, asked.rounds)
            for each in leases:
                each.release()


async def _rounds(
    table: Table,
    name: str,
    lease: StoredBank,
    paths: Sequence[Path],
    memory: HostMemory,
    num_rounds: int,
) -> None:
    plain = Plain(paths, memory)
    folder = paths[0].parents[2]
    position = lease.content.frontier
    prepare: Callable[[], None] = (
        (lambda: drop_caches(folder)) if name.endswith("dropped") else (lambda: None)
    )
    taken: dict[str, list[float]] = {"restored": []} | {f"plain {n}": [] for n in THREADS}
    size_mb = sum(path.stat().st_size for path in paths) / MB
    pools = {n: ThreadPoolExecutor(n) for n in THREADS}
    for number in range(num_rounds + 1):
        for way, seconds in taken.items():
            prepare()
            began = time.perf_counter()
            if way == "restored":
                await lease.load(position, SlotSink(memory))
            else:
                await asyncio.to_thread(plain.run, pools[int(way.split()[1])])
            if number:  # the first round touches memory and fills caches
                seconds.append(time.perf_counter() - began)
    for pool in pools.values():
        pool.shutdown()
    medians = {way: statistics.median(seconds) for way, seconds in taken.items()}
    best = min((way for way in taken if way != "restored"), key=lambda way: medians[way])
    for way in ("restored", best):
        say(
            f"{name:22} {way:9} median {medians[way] * 1e3:7.1f} ms, max"
            f" {max(taken[way]) * 1e3:7.1f} ms, {size_mb / medians[way] / 1e3:5.2f} GB/s"
        )
    ratio = medians["restored"] / medians[best]
    worst = max(taken["restored"]) / max(taken[best])
    table.facts[f"{name} restored_ms"] = medians["restored"] * 1e3
    table.add(f"{name}: restored / plain", ratio, MOST_TIMES, "x", f"of the maxima {worst:.2f}")


async def measure(asked: Any) -> Table:
    table = Table()
    path = registry.pull("smollm2", lambda done, total: None)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[asked.dtype]
    layout = state_layout(open_checkpoint(path).config, dtype)
    say(
        f"{asked.tokens:,} tokens, {len(layout.rows)} arrays, {asked.dtype},"
        f" {asked.tokens * layout.bytes_per_token / MB:.0f} MB; {asked.rounds} rounds"
    )
    step = asked.tokens // NUM_DELTAS
    chain = [*(step * n for n in range(1, NUM_DELTAS)), asked.tokens]
    await measure_case(table, "one file", layout, [asked.tokens], asked)
    await measure_case(table, f"chain of {NUM_DELTAS}", layout, chain, asked)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="What restoring a bank costs.")
    parser.add_argument("--tokens", type=int, default=6000, help="of the bank (default 6000)")
    parser.add_argument("--rounds", type=int, default=10, help="of each kind (default 10)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    asked = parser.parse_args()
    table = asyncio.run(measure(asked))
    facts = {key.replace(" ", "_").replace(",", ""): value for key, value in table.facts.items()}
    facts |= {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "command": "make bench-store NAME=restore"
        f" ARGS='--tokens {asked.tokens} --rounds {asked.rounds} --dtype {asked.dtype}'",
    }
    text = json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()})
    if asked.record:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / "restore.jsonl").open("a") as file:
            file.write(text + "\n")
    say(text)


if __name__ == "__main__":
    main()
