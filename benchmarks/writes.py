"""`make bench-store NAME=writes`: what writing banks costs, on servers of its own.

    (a) bytes that the process writes over forty turns, against the bank that comes of them:
        plain attention (SmolLM2) and sliding windows (a small random model)
    (b) what compaction makes of a chain of forty small files, and what it writes for it
    (c) gaps between the tokens of a running stream while a 200 MB bank is written or read, and
        while those small files are merged
    (d) the average rate of writing under --kv-disk-write-mb-per-s

Prints a table with each limit, and last one JSON object, which `--record` appends to
benchmarks/results/. Bytes are `write_bytes` of /proc/<pid>/io: the folder must be on a real file
system. Takes about eight minutes.

    python benchmarks/writes.py [--turns 40] [--bank 4400] [--rounds 4] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]

from client import Client, Reply, collect, connect, request_options  # noqa: E402
from process import ServerProcess, server  # noqa: E402
from texts import question  # noqa: E402
from tiny import TinyShape, write_tiny  # noqa: E402
from turns import RESULTS, commit, machine  # noqa: E402

from ds4grpc.config import MB  # noqa: E402
from ds4grpc.layout import StateLayout  # noqa: E402
from ds4grpc.model import registry  # noqa: E402
from ds4grpc.model.checkpoint import load_model, open_checkpoint  # noqa: E402
from ds4grpc.v1 import bank_pb2  # noqa: E402

OPTIONS = ("--kv-cache-min-tokens", "64", "--dtype", "float32", "--slots", "2")
REPLY_TOKENS = 64
# One window is as many bytes as some 500 tokens of plain rows.
WINDOWS = TinyShape(
    num_layers=8, window=168, sliding=(True, True, True, False) * 2, max_context=8192
)
RATE_MB = 20
QUIET_SECONDS = 4.0
CHAIN_FILES = 40
CHAIN_TOKENS = 100
WRITE_FACTOR = 1.3
# Rows once more, and what a file takes besides: ids, records, rounding.
COMPACT_FACTOR = 1.1
_PERSISTED = re.compile(r"bank persisted .* bytes=(\d+) .* seconds=([\d.]+)")
_MERGED = re.compile(r"banks merged .* files=(\d+) tokens=(\d+) bytes=(\d+) seconds=([\d.]+)")


@dataclass
class Table:
    """What has been measured, with its limit."""

    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float, limit: float, unit: str, note: str = "") -> None:
        verdict = "reached" if value <= limit else "NOT reached"
        say(f"{name:44} {value:9.2f} {unit:3} at most {limit:9.2f}  {verdict:11}  {note}")
        self.facts[re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")] = value


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def written_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("write_bytes")))


def layout_of(path: Path) -> StateLayout:
    model = load_model(open_checkpoint(path), device=torch.device("cpu"), dtype=torch.float32)
    return model.layout


def random_ids(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(1000, 40_000, count)]


async def until(is_so: Callable[[], Any], seconds: float = 120.0) -> Any:
    """The first true value of `is_so`, looked at often."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (found := is_so()) is not None:
            return found
        await asyncio.sleep(0.01)
    raise SystemExit("waited in vain; run the server by hand to see why")


async def converse(client: Client, num_turns: int) -> None:
    """A conversation of short turns."""
    messages: list[tuple[str, ...]] = [("system", "You are a careful assistant.")]
    for number in range(num_turns):
        messages.append(("user", question(number)))
        reply = await client.chat(
            messages, thinking=False, max_tokens=REPLY_TOKENS, ignore_eos=True
        )
        messages.append(("assistant", reply.text))


async def flush(client: Client) -> None:
    async for _ in client.banks.FlushBanks(bank_pb2.FlushBanksRequest()):
        pass


def persisted_files(running: ServerProcess) -> int:
    samples = running.metrics().items()
    return int(sum(v for k, v in samples if k.startswith("ds4grpc_bank_persists_total")))


async def measure_turns(
    table: Table, name: str, running: ServerProcess, layout: StateLayout, num_turns: int
) -> None:
    """(a)"""
    async with connect(running.target) as client:
        before = written_bytes(running.pid)
        await converse(client, num_turns)
        await flush(client)
        merged = running.metrics()["ds4grpc_bank_compacted_bytes_total"]
        written = written_bytes(running.pid) - before - merged
    tokens = max(
        int(each) for each in re.findall(r"bank persisted bank=\S+ tokens=(\d+)", running.log)
    )
    num_files = persisted_files(running)
    rows = tokens * layout.plain_bytes_per_token
    points = num_files * layout.point_bytes
    note = f"{num_turns} turns, {tokens} tokens, {num_files} files, {written / MB:.1f} MB"
    if not written:
        raise SystemExit("write_bytes counts nothing here: TMPDIR must be on a real file system")
    table.add(f"(a) {name}: written / bank", written / (rows + points), WRITE_FACTOR, "x", note)
    if points:
        share = (running.metrics()["ds4grpc_bank_written_bytes_total"] - rows) / written
        table.add(f"(a) {name}: all but rows / written", share, 0.5, "x", "windows, ids, records")


def is_written(running: ServerProcess, num_tokens: int) -> bool:
    return f" tokens={num_tokens} base=" in running.log


async def chain_files(client: Client, bank_id: str) -> int:
    """The files that a load of this bank opens."""
    count = 0
    while bank_id:
        bank_id = (await client.bank(bank_id)).parent_bank_id
        count += 1
    return count


@dataclass
class Stream:
    """A stream that runs beside what is measured."""

    times: list[float] = field(default_factory=list)
    quiet: list[tuple[float, float]] = field(default_factory=list)

    def gaps(self, windows: Iterable[tuple[float, float]]) -> list[float]:
        """Milliseconds between tokens that fall into any of the times."""
        chosen = list(windows)
        return [
            (after - before) * 1e3
            for before, after in pairwise(self.times)
            if any(after >= start and before <= end for start, end in chosen)
        ]

    async def rest(self) -> None:
        """Lets it run alone for a while."""
        await asyncio.sleep(0.5)
        start = time.monotonic()
        await asyncio.sleep(QUIET_SECONDS)
        self.quiet.append((start, time.monotonic()))


@asynccontextmanager
async def stream(client: Client) -> Any:
    request = request_options(max_tokens=8000, ignore_eos=True, no_store=True)
    request.prompt = "Once upon a time"
    call = client.generation.Generate(request)
    running = Stream()

    async def listen() -> None:
        reply = Reply(token_times=running.times)
        with contextlib.suppress(asyncio.CancelledError):  # by us, at the end
            async for response in call:
                collect(reply, response)

    task = asyncio.create_task(listen())
    await until(lambda: True if len(running.times) > 20 else None)
    try:
        yield running
    finally:
        call.cancel()
        await asyncio.wait([task])


async def measure_streams(
    table: Table, running: ServerProcess, folder: Path, bank_tokens: int, rounds: int
) -> None:
    """(b) and (c): merges, writes and reads beside a stream."""
    token_bytes = float(table.facts["kv_bytes_per_token"])
    seen = len(_MERGED.findall(running.log))
    async with connect(running.target) as client, stream(client) as beside:
        ids = random_ids(55, CHAIN_FILES * CHAIN_TOKENS)
        for number in range(1, CHAIN_FILES + 1):
            reply = await client.tokens(ids[: number * CHAIN_TOKENS], max_tokens=1)
        tip = reply.finished.bank_id
        await until(lambda: "stored" if is_written(running, len(ids)) else None)
        files_before = await chain_files(client, tip)
        await until(lambda: len(_MERGED.findall(running.log)) > seen or None)
        end = time.monotonic()
        merges = list(_MERGED.finditer(running.log))[seen:]
        merging = [(end - float(each[4]), end) for each in merges[-1:]]
        await beside.rest()
        files_after = await chain_files(client, tip)
        rows = sum(int(each[2]) for each in merges) * token_bytes
        table.add(
            "(b) files of the chain after merging", files_after, 4, "", f"{files_before} before"
        )
        merged = sum(int(each[3]) for each in merges)
        note = f"{sum(int(each[1]) for each in merges)} files, {merged / MB:.1f} MB"
        table.add("(b) written by merging / its rows", merged / rows, COMPACT_FACTOR, "x", note)

        writing, reading = [], []
        for number in range(rounds):
            files = len(_PERSISTED.findall(running.log))
            await client.tokens(random_ids(number, bank_tokens), max_tokens=1)
            start = time.monotonic()
            await until(lambda: len(_PERSISTED.findall(running.log)) > files or None)  # noqa: B023
            writing.append((start, time.monotonic()))
            await beside.rest()
        for number in range(rounds):
            drop_caches(folder)
            ids = random_ids(number, bank_tokens) + random_ids(100 + number, 8)
            start = time.monotonic()
            reply = await client.tokens(ids, max_tokens=1)
            if reply.admission != "disk":
                raise SystemExit(f"round {number} was {reply.admission}, not restored")
            timings = reply.finished.timings
            prefill = timings.prefill.ToTimedelta().total_seconds()
            decode = timings.decode.ToTimedelta().total_seconds()
            reading.append((start, time.monotonic() - prefill - decode))
            await beside.rest()
    quiet = beside.gaps(beside.quiet)
    step, p99 = float(np.median(quiet)), float(np.percentile(quiet, 99))
    say(f"a step takes {step:.1f} ms; quiet p99 {p99:.1f} ms over {len(quiet)} gaps")
    table.facts |= {"step_ms": step, "quiet_p99_ms": p99}
    size = bank_tokens * token_bytes / MB
    for what, windows in (("written", writing), ("read", reading), ("merged", merging)):
        gaps = beside.gaps(windows)
        seconds = sum(end - start for start, end in windows)
        note = f"{len(gaps)} gaps in {seconds:.1f} s"
        note += f", {len(windows)} x {size:.0f} MB" if what != "merged" else ""
        growth = float(np.percentile(gaps, 99)) - p99
        table.add(f"(c) p99 gap grows while {what}", growth, step, "ms", note)


def drop_caches(folder: Path) -> None:
    """Makes the next reads come from the disk."""
    for path in folder.rglob("*.bank"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


async def measure_rate(table: Table, running: ServerProcess, bank_tokens: int) -> None:
    """(d)"""
    async with connect(running.target) as client:
        await client.tokens(random_ids(77, bank_tokens), max_tokens=1)
        start, before = time.monotonic(), written_bytes(running.pid)
        found = await until(lambda: _PERSISTED.search(running.log))
        seconds = time.monotonic() - start
        written = written_bytes(running.pid) - before
    note = f"{written / MB:.0f} MB in {seconds:.1f} s; the store says {float(found[2]):.1f} s"
    table.add(
        f"(d) average under --kv-disk-write-mb-per-s {RATE_MB}",
        written / MB / seconds,
        RATE_MB,
        "MB/s",
        note,
    )


async def measure(root: Path, num_turns: int, bank_tokens: int, rounds: int) -> Table:
    table = Table()
    smollm2 = registry.pull("smollm2", lambda done, total: None)
    layout = layout_of(smollm2)
    table.facts["kv_bytes_per_token"] = layout.bytes_per_token
    with server(root / "plain", *OPTIONS) as running:
        await measure_turns(table, "plain attention", running, layout, num_turns)
        await measure_streams(table, running, root / "plain", bank_tokens, rounds)
        running.stop()
    path = write_tiny(root / "windows.gguf", WINDOWS)
    with server(root / "windows", *OPTIONS, model=str(path)) as running:
        await measure_turns(table, "sliding windows", running, layout_of(path), num_turns)
        running.stop()
    with server(root / "rate", *OPTIONS, "--kv-disk-write-mb-per-s", str(RATE_MB)) as running:
        await measure_rate(table, running, bank_tokens)
        running.stop()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="What writing banks costs.")
    parser.add_argument("--turns", type=int, default=40, help="of (a) (default 40)")
    parser.add_argument("--bank", type=int, default=4400, help="tokens of (c), (d) (default 4400)")
    parser.add_argument("--rounds", type=int, default=4, help="of (c), at least 2 (default 4)")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ds4grpc-writes-") as folder:
        table = asyncio.run(measure(Path(folder), asked.turns, asked.bank, asked.rounds))
    facts = table.facts | {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "command": f"make bench-store NAME=writes ARGS='--turns {asked.turns} --bank {asked.bank}'",
    }
    text = json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()})
    if asked.record:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / "writes.jsonl").open("a") as file:
            file.write(text + "\n")
    say(text)


if __name__ == "__main__":
    main()
