"""`make bench-store NAME=scale`: what the store costs with a hundred thousand banks.

Conversations of 20 kB of key text that share a preamble of 10 kB, as files of the store's own
format: with as many row arrays as the default model's, of one zero byte a token, which are holes
on the disk. Each measurement runs in a process of its own:

    rebuild   a start without a catalog: every file is read
    start     a start with one, after 100 files lost their rows and 100 rows their files
    lookups   `Store.match`: prompts that go on where a key ends (exact), that leave a conversation
              at its first reply, and that share the preamble alone (both partial)

Prints a table, and last one JSON object, which `--record` appends to benchmarks/results/.

    python benchmarks/scale.py [--banks N] [--lookups N] [--folder PATH] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from turns import RESULTS, commit, machine  # noqa: E402

from ds4grpc.bank import PersistReason, Record, RecordKind, Waypoint, bank_id, namespace  # noqa: E402
from ds4grpc.config import MB  # noqa: E402
from ds4grpc.engine.banks import MatchQuery  # noqa: E402
from ds4grpc.errors import BankNotFound  # noqa: E402
from ds4grpc.layout import Rows, StateLayout  # noqa: E402
from ds4grpc.store.content import FileContent  # noqa: E402
from ds4grpc.store.files import Files  # noqa: E402
from ds4grpc.store.folder import Folder  # noqa: E402
from ds4grpc.store.format import Header, StateForm, file_name  # noqa: E402
from ds4grpc.store.pace import Pace  # noqa: E402
from ds4grpc.store.store import Store, StoreConfig  # noqa: E402
from ds4grpc.store.writer import draft_file, write_file  # noqa: E402

NUM_LAYERS = 30  # of SmolLM2
LAYOUT = StateLayout(
    "scale/2", tuple(Rows(f"{side}.{layer}", 1) for layer in range(NUM_LAYERS) for side in "kv")
)
FORM = StateForm(bytes(range(32)), LAYOUT)
SPACE = namespace("scale", b"")
PREAMBLE_BYTES = 10_240
TOKEN_BYTES = 4  # of text
TURN_BYTES = 5_120  # two turns follow the preamble
KEY_BYTES = PREAMBLE_BYTES + 2 * TURN_BYTES
NUM_SMALL = 1_000
NUM_PLANTED = 100
LIMITS = {
    "start_seconds": 5.0,
    "index_mb": 300.0,
    "exact_p99_ms": 5.0,
    "partial_p99_ms": 5.0,
    "exact_ratio": 3.0,
    "partial_ratio": 3.0,
}


class NoSync(Files):
    """Files that need not survive a power failure, to be made quickly; zeros become holes."""

    def allocate(self, descriptor: int, size_bytes: int, path: str) -> None:
        os.ftruncate(descriptor, size_bytes)

    def write(
        self, descriptor: int, data: bytes | bytearray | memoryview, offset: int, path: str
    ) -> None:
        if bytes(data).strip(b"\0"):
            super().write(descriptor, data, offset, path)

    def sync_data(self, descriptor: int, path: str) -> None:
        pass


class Zeros:
    """Rows of which nobody looks at the values (`engine.banks.RowSource`)."""

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        return memoryview(bytes(stop_row - start_row))

    def tail(self, position: int) -> bytes:
        raise AssertionError

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class Conversation:
    """The `number`-th one; 0 is the preamble alone."""

    def __init__(self, number: int) -> None:
        chance = np.random.default_rng(0)
        text, ids = _random(chance, PREAMBLE_BYTES)
        self.head = len(ids)
        self.waypoints: tuple[Waypoint, ...] = ()
        self.anchor = 0
        if number:
            more_text, more_ids = _random(np.random.default_rng(number), 2 * TURN_BYTES)
            text, ids = text + more_text, np.concatenate([ids, more_ids])
            turn = TURN_BYTES // TOKEN_BYTES
            self.waypoints = (
                Waypoint(PREAMBLE_BYTES + TURN_BYTES, self.head + turn),
                Waypoint(KEY_BYTES, self.head + 2 * turn),
            )
            self.anchor = KEY_BYTES - TURN_BYTES // 2
        self.text, self.ids = text, ids
        self.bank_id = bank_id(SPACE, FORM.fingerprint, ids)

    def write(self, folder: Folder, parent_id: str) -> None:
        base = self.head if parent_id else 0
        header = Header(
            bank_id=self.bank_id,
            parent_id=parent_id,
            base=base,
            frontier=len(self.ids),
            head=self.head,
            fingerprint=FORM.fingerprint,
            namespace=SPACE,
            reason=PersistReason.TURN,
            created_at_ms=1_700_000_000_000,
            ttl_seconds=None,
            layout_id=LAYOUT.layout_id,
        )
        record = Record(RecordKind.VISIBLE, self.text, b"r" * 16, self.waypoints, self.anchor)
        records = (record,) if parent_id else ()
        draft = draft_file(header, FileContent(self.ids, records=records), FORM)
        path = folder.temp_path(self.bank_id, base)
        write_file(folder.files, path, draft, Zeros(), Pace())
        folder.files.rename(path, path.removesuffix(".tmp"))

    def query(self, kind: str, chance: np.random.Generator) -> MatchQuery:
        """A prompt of about the length of a key."""
        shared = {
            "exact": KEY_BYTES,
            "first reply": PREAMBLE_BYTES + TURN_BYTES,
            "preamble": PREAMBLE_BYTES,
        }[kind]
        text, ids = _random(chance, max(400, KEY_BYTES - shared))
        return MatchQuery(
            namespace=SPACE,
            text=self.text[:shared] + text,
            marks=tuple(range(PREAMBLE_BYTES, KEY_BYTES + 1, TURN_BYTES // 2)),
            ids=np.concatenate([self.ids[: shared // TOKEN_BYTES], ids]),
            exact=False,
        )


def _random(chance: np.random.Generator, num_bytes: int) -> tuple[bytes, Any]:
    text = chance.integers(97, 123, num_bytes, dtype=np.uint8).tobytes()
    return text, chance.integers(0, 50_000, num_bytes // TOKEN_BYTES, dtype=np.uint32)


def config(folder: Path) -> StoreConfig:
    return StoreConfig(str(folder), FORM.fingerprint, LAYOUT, 1 << 40, 16)


class Unheard:
    """What the store reports (`store.observer.StoreObserver`)."""

    def persisted(self, *_: object) -> None: ...
    def compacted(self, *_: object) -> None: ...
    def persist_failed(self, *_: object) -> None: ...
    def restored(self, *_: object) -> None: ...
    def evicted(self, *_: object) -> None: ...
    def catalog(self, *_: object) -> None: ...
    def catalog_error(self, *_: object) -> None: ...


def write_banks(root: Path, numbers: range) -> None:
    """Files alone: no lock, no rows, nothing synced."""
    folder = Folder(NoSync(), str(root), FORM.fingerprint)
    parent_id = Conversation(0).bank_id
    for number in numbers:
        Conversation(number).write(folder, parent_id if number else "")


def build(root: Path, num_banks: int) -> None:
    """The head and as many conversations, on all cores."""
    folder = Folder(NoSync(), str(root), FORM.fingerprint)
    os.makedirs(folder.path, 0o700, exist_ok=True)
    starts = range(0, num_banks + 1, 1_000)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        ranges = [range(start, min(start + 1_000, num_banks + 1)) for start in starts]
        list(pool.map(write_banks, [root] * len(ranges), ranges))


def plant(root: Path, num_banks: int) -> tuple[list[str], list[str]]:
    """Takes the rows of some banks and the files of others; returns the ids of both."""
    folder = Folder(Files(), str(root), FORM.fingerprint)
    chosen = random.Random(1).sample(range(1, num_banks + 1), 2 * NUM_PLANTED)
    ids = [Conversation(number).bank_id for number in chosen]
    rowless, fileless = ids[:NUM_PLANTED], ids[NUM_PLANTED:]
    with closing(sqlite3.connect(folder.catalog_path)) as catalog, catalog:
        marks = ",".join("?" * len(rowless))
        of_them = f"(select bank_no from banks where bank_id in ({marks}))"
        catalog.execute(f"delete from hashes where bank_no in {of_them}", rowless)
        catalog.execute(f"delete from banks where bank_id in ({marks})", rowless)
    head = len(Conversation(0).ids)
    for each in fileless:
        os.unlink(os.path.join(folder.path, each[:2], file_name(each, head)))
    return rowless, fileless


def memory_bytes(name: str = "VmRSS") -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def _start(root: Path) -> dict[str, Any]:
    gc.collect()
    before = memory_bytes()
    began, worked = time.perf_counter(), time.process_time()
    async with Store(config(root), Unheard()) as store:
        seconds = time.perf_counter() - began
        cpu_seconds = time.process_time() - worked
        gc.collect()
        index_mb = (memory_bytes() - before) / MB
        count = (await store.storage()).num_stored
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,  # what is left of the time on a busy machine
        "index_mb": index_mb,
        "peak_mb": peak_mb / MB,
        "banks": count,
    }


def start(root: Path) -> dict[str, Any]:
    """One start, in this process."""
    return asyncio.run(_start(root))


async def _start_planted(root: Path, rowless: list[str], fileless: list[str]) -> dict[str, Any]:
    facts = await _start(root)
    found = lost = 0
    async with Store(config(root), Unheard()) as store:  # what the start before made of them
        for each in rowless:
            found += (await store.get(each)).bank_id == each
        for each in fileless:
            try:
                await store.get(each)
            except BankNotFound:
                lost += 1
    return facts | {"adopted": found, "dropped": lost}


def start_planted(root: Path, rowless: list[str], fileless: list[str]) -> dict[str, Any]:
    """A start after `plant`."""
    return asyncio.run(_start_planted(root, rowless, fileless))


async def _lookups(root: Path, num_banks: int, num_lookups: int) -> dict[str, list[float]]:
    chance = random.Random(2)
    more = np.random.default_rng(3)
    times: dict[str, list[float]] = {"exact": [], "first reply": [], "preamble": []}
    wanted = {"exact": KEY_BYTES, "first reply": KEY_BYTES, "preamble": PREAMBLE_BYTES}
    async with Store(config(root), Unheard()) as store:
        for number in range(num_lookups + 50):
            for kind, taken in times.items():
                of = Conversation(chance.randrange(1, num_banks + 1))
                query = of.query(kind, more)
                began = time.perf_counter()
                leases = await store.match(query)
                seconds = time.perf_counter() - began
                frontiers = {lease.content.frontier * TOKEN_BYTES for lease in leases}
                ids = {lease.bank_id for lease in leases}
                for lease in leases:
                    lease.release()
                if kind != "preamble" and of.bank_id not in ids:
                    try:
                        await store.get(of.bank_id)
                    except BankNotFound:  # one of those that `plant` has taken
                        continue
                    raise SystemExit(f"bank {of.bank_id} was not found by {kind}")
                assert wanted[kind] in frontiers, (kind, frontiers)
                if number >= 50:  # the first ones find cold caches
                    taken.append(seconds)
    return times


def lookups(root: Path, num_banks: int, num_lookups: int) -> dict[str, dict[str, float]]:
    """Milliseconds by kind of lookup."""
    times = asyncio.run(_lookups(root, num_banks, num_lookups))
    times["partial"] = times["first reply"] + times["preamble"]
    return {
        kind: {f"p{at}": float(np.percentile(taken, at)) * 1e3 for at in (20, 50, 80, 99)}
        for kind, taken in times.items()
    }


def alone(work: Any, *args: Any) -> Any:
    """Runs a measurement in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def prepared(root: Path, num_banks: int, facts: dict[str, Any], name: str) -> None:
    """A folder with so many banks and their catalog; one that is there is taken as it is."""
    if root.exists():
        return
    began = time.perf_counter()
    build(root, num_banks)
    say(f"{num_banks:,} files written in {time.perf_counter() - began:.0f} s")
    rebuilt = alone(start, root)
    say(
        f"{name}: rebuilt from files alone in {rebuilt['seconds']:.1f} s,"
        f" {rebuilt['peak_mb']:.0f} MB at most"
    )
    facts[f"{name}_rebuild_seconds"] = rebuilt["seconds"]
    facts[f"{name}_rebuild_peak_mb"] = rebuilt["peak_mb"]


def measure(root: Path, num_banks: int, num_lookups: int) -> dict[str, Any]:
    small, large = root / "small", root / "large"
    facts: dict[str, Any] = {"banks": num_banks}
    prepared(small, NUM_SMALL, facts, "small")
    prepared(large, num_banks, facts, "large")
    few = alone(lookups, small, NUM_SMALL, num_lookups)
    many = alone(lookups, large, num_banks, num_lookups)
    for kind in few:
        say(f"{kind:12} {_row(few[kind])}  at {NUM_SMALL:,} banks, ms")
        say(f"{kind:12} {_row(many[kind])}  at {num_banks:,} banks, ms")
    for kind in ("exact", "partial"):
        facts[f"{kind}_small_p99_ms"] = few[kind]["p99"]
        facts[f"{kind}_p50_ms"], facts[f"{kind}_p99_ms"] = many[kind]["p50"], many[kind]["p99"]
        facts[f"{kind}_ratio"] = max(many[kind][p] / few[kind][p] for p in ("p50", "p99"))
    planted = plant(large, num_banks)
    started = alone(start_planted, large, *planted)
    say(
        f"start: {started['seconds']:.2f} s ({started['cpu_seconds']:.2f} s of CPU),"
        f" {started['banks']:,} banks;"
        f" {started['adopted']} of {NUM_PLANTED} files without rows adopted,"
        f" {started['dropped']} of {NUM_PLANTED} rows without files dropped"
    )
    say(f"index: {started['index_mb']:.0f} MB, {started['peak_mb']:.0f} MB at most during start")
    for name in ("index_mb", "peak_mb", "adopted", "dropped"):
        facts[name] = started[name]
    facts["start_seconds"] = started["seconds"]
    facts["start_cpu_seconds"] = started["cpu_seconds"]
    folder = Folder(Files(), str(large), FORM.fingerprint)
    facts["catalog_mb"] = folder.catalog_bytes() / MB
    return facts


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _row(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:6.2f}" for name, value in values.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="What the store costs with many banks.")
    parser.add_argument("--banks", type=int, default=100_000, help="default 100000")
    parser.add_argument("--lookups", type=int, default=1_000, help="of each kind (default 1000)")
    parser.add_argument("--folder", type=Path, help="keeps the banks there and uses them again")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="ds4grpc-scale-"))
    try:
        facts = measure(folder, asked.banks, asked.lookups)
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    for name, limit in LIMITS.items():
        verdict = "reached" if facts[name] <= limit else "NOT reached"
        say(f"{name} {facts[name]:.2f} (at most {limit:g}: {verdict})")
    facts |= {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "command": f"make bench-store NAME=scale ARGS='--banks {asked.banks}'",
    }
    text = json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()})
    if asked.record:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / "scale.jsonl").open("a") as file:
            file.write(text + "\n")
    say(text)


if __name__ == "__main__":
    main()
