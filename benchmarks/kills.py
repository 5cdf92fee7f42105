"""`make bench-store NAME=kills`: SIGKILL in the middle of everything, again and again.

A real server with a small model works under load: conversations that grow, deletes, evictions,
compaction, and now and then a catalog that has to be migrated. It is killed with SIGKILL, at a
random moment or, in the cycles that are aimed, before a chosen step of the store. The next start
must need no help; then every bank that was ready is asked for, and

    delivered   its rows come from disk (`disk_tokens` > 0), all of them,
    right       what the model goes on with equals what it says after a cold prefill,
    gone        what was deleted stays deleted,
    clean       no half-written file is left, the catalog and the files name the same banks.

Prints which operation and step each kill hit, and last one JSON object, which `--record` appends to
benchmarks/results/. Exits 1 when anything was wrong, or a step was hit fewer than three times.

    python benchmarks/kills.py [--cycles N] [--seed N] [--folder PATH] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import grpc  # noqa: E402
import torch  # noqa: E402
from client import Client, connect  # noqa: E402
from kills_server import STATUS_BYTES  # noqa: E402
from texts import sentences  # noqa: E402
from tiny import TinyShape, write_tiny  # noqa: E402
from turns import RESULTS, commit, machine  # noqa: E402

from ds4grpc.bank import Trust  # noqa: E402
from ds4grpc.errors import BankCorrupt  # noqa: E402
from ds4grpc.model.checkpoint import load_model, open_checkpoint  # noqa: E402
from ds4grpc.model.fingerprint import fingerprint  # noqa: E402
from ds4grpc.store.files import Files  # noqa: E402
from ds4grpc.store.format import StateForm, file_name  # noqa: E402
from ds4grpc.store.reader import BankFile  # noqa: E402
from ds4grpc.v1 import bank_pb2  # noqa: E402

STEPS = {
    "publish": (
        *("create", "allocate", "write", "sync_data", "rename", "sync_folder"),
        *("insert into", "insert into hashes", "commit"),
    ),
    "delete": ("rename to .dead", "sync_folder", "delete from", "commit", "unlink"),
    "compaction": (
        *("create", "allocate", "write", "sync_data", "rename", "sync_folder"),
        *("insert into", "insert into hashes", "commit", "rename to .dead", "unlink"),
    ),
    "migration": ("create table", "create index", "insert into", "commit"),
}
LEAST_HITS = 3
CAP_MB = 24
SLOTS = 2
MIN_TOKENS = 256  # prompts of ids find shorter banks by chance only
OPTIONS = (
    *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--threads", "1"),
    *("--slots", str(SLOTS), "--kv-cache-min-tokens", str(MIN_TOKENS)),
    *("--kv-disk-space-mb", str(CAP_MB), "--log-level", "info", "--dtype", "float32"),
)
SHAPE = TinyShape(num_layers=6, hidden_dim=128, ffn_dim=256, sliding=(True, True, False) * 2)
MAX_TOKENS = 2600  # then a conversation ends, and another one begins
OTHER = range(100, 100 + MIN_TOKENS)
READY = re.compile(r"ready in \S+ s \| grpc (\S+) \| metrics (\S+)")
START_SECONDS = 60.0
AIM_SECONDS = 12.0  # an aim that is not met until then becomes a random kill
SYSTEMS = [("system", f"House {number}. {sentences(22, 900 + number)}") for number in range(2)]


class Wrong(Exception):
    """Something that must never be."""


@dataclass
class Server:
    """A running server, asked and killed."""

    process: subprocess.Popen[str]  # what forks it
    status: mmap.mmap
    pid: int = 0
    target: str = ""
    metrics_url: str = ""

    def start(self, args: list[str], aim: str, *, wait: bool = True) -> bool:
        """Returns whether it got ready; a server that was to die while it starts does not."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"args": args, "aim": aim}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("child "):
                self.pid = int(line.split()[1])
            elif line.startswith("ended"):
                if wait:
                    raise Wrong("the server did not start")
                return False
            elif found := READY.search(line):
                self.target, self.metrics_url = found[1], found[2]
                return True
        raise Wrong("the process that forks servers has ended")

    def where(self) -> str:
        """The step it was about to take, or had taken, last."""
        return self.status[:STATUS_BYTES].decode().strip()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.until_ended()

    def until_ended(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ended"):
                return


@dataclass
class Conversation:
    """Its messages so far, as a client keeps them."""

    number: int
    messages: list[tuple[str, ...]]
    tokens: int = 0


@dataclass
class Bank:
    """A bank that was ready when the server died."""

    bank_id: str
    base: int
    frontier: int
    is_head: bool
    ids: list[int]


@dataclass
class Script:
    """What the load does, and what it knows for sure."""

    chance: random.Random
    conversations: list[Conversation] = field(default_factory=list)
    next_number: int = 0
    deleted: set[str] = field(default_factory=set)  # confirmed
    doubtful: set[str] = field(default_factory=set)  # a delete was under way
    turns: int = 0
    said: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)  # by bank
    answers: dict[str, list[int]] = field(default_factory=dict)  # what a cold start goes on with

    def conversation(self, slot: int) -> Conversation:
        """The one that a client goes on with; now and then it begins another."""
        while len(self.conversations) <= slot:
            self.conversations.append(self._new())
        if self.conversations[slot].tokens > MAX_TOKENS or self.chance.random() < 0.03:
            self.conversations[slot] = self._new()
        return self.conversations[slot]

    def _new(self) -> Conversation:
        self.next_number += 1
        return Conversation(self.next_number, [self.chance.choice(SYSTEMS)])

    def prompt_for(self, bank: Bank) -> list[tuple[str, ...]] | None:
        """The next turn of its conversation. None for a system prompt, and for a bank of which no
        client knows: of a turn whose end nobody heard."""
        said = self.said.get(bank.bank_id)
        return None if said is None else [*said, ("user", "And then?")]

    async def talk(self, client: Client, slot: int) -> None:
        """One client's turns until the server dies."""
        while True:
            talk = self.conversation(slot)
            text = sentences(self.chance.randint(2, 16), self.chance.randrange(1 << 30))
            messages = [*talk.messages, ("user", text)]
            reply = await client.chat(messages, max_tokens=8, thinking=False)
            talk.messages = [*messages, ("assistant", reply.text)]
            talk.tokens = reply.started.prompt_tokens + len(reply.token_ids)
            self.turns += 1
            self.said[reply.finished.bank_id] = talk.messages
            self.deleted.discard(reply.finished.bank_id)

    async def delete(self, client: Client) -> None:
        """Deletes one bank after the other until the server dies."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.05, 0.4))
            listed = await client.banks.ListBanks(bank_pb2.ListBanksRequest(page_size=200))
            stored = [bank.bank_id for bank in listed.banks if bank.size_bytes]
            if len(stored) < 6:
                continue
            bank_id = self.chance.choice(stored)
            self.doubtful.add(bank_id)
            try:
                await client.banks.DeleteBank(bank_pb2.DeleteBankRequest(bank_id=bank_id))
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    raise
                self.doubtful.discard(bank_id)  # in use, or evicted meanwhile
                continue
            self.doubtful.discard(bank_id)
            if bank_id in self.said:  # a system prompt comes back with the next conversation
                self.deleted.add(bank_id)

    async def load(self, target: str) -> None:
        """Everybody works until the server dies."""
        async with connect(target) as client:
            work = [self.talk(client, slot) for slot in range(2)]
            tasks = [asyncio.create_task(each) for each in (*work, self.delete(client))]
            try:
                await asyncio.gather(*tasks)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise Wrong(f"a request failed: {error.code()} {error.details()}") from error
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


class Disk:
    """The bank folder of the model, looked at while no server runs."""

    def __init__(self, root: Path, form: StateForm) -> None:
        self.path = root / form.fingerprint.hex()[:16]
        self._form = form

    def rows(self) -> dict[str, int]:
        """Base of each bank that the catalog holds ready and visible. Reads a copy: opening the
        catalog would repair it."""
        if not (self.path / "catalog.db").exists():
            return {}
        with tempfile.TemporaryDirectory() as folder:
            for name in ("catalog.db", "catalog.db-wal"):
                with suppress(FileNotFoundError):
                    shutil.copy(self.path / name, folder)
            with closing(sqlite3.connect(Path(folder) / "catalog.db")) as catalog:
                try:
                    found = catalog.execute(
                        "select bank_id, base from banks where not hidden and trust & ? = ?",
                        (int(Trust.DURABLE | Trust.QUARANTINED), int(Trust.DURABLE)),
                    ).fetchall()
                except sqlite3.OperationalError:  # it died before the tables were made
                    return {}
        # A row follows the marker of its bank, which says first that it is deleted.
        return {i: base for i, base in found if not (self.path / i[:2] / f"{i}.hidden").exists()}

    def ready(self) -> list[Bank]:
        """All banks with row and file; a file without its row is one whose delete or publish had
        not been confirmed."""
        banks = []
        for bank_id, base in self.rows().items():
            path = self.path / bank_id[:2] / file_name(bank_id, base)
            if not path.exists() and path.with_name(path.name + ".dead").exists():
                continue  # a delete was under way
            try:
                with BankFile.open(Files(), str(path), self._form) as file:
                    ids = file.read_content().ids.tolist()
                    is_head = file.header.head == len(ids)
            except BankCorrupt as error:
                raise Wrong(f"a row without a whole file: {path.name}: {error}") from error
            banks.append(Bank(bank_id, base, len(ids), is_head, ids))
        return sorted(banks, key=lambda bank: bank.frontier)

    def leftovers(self) -> list[str]:
        return [path.name for path in self.path.glob("*/*") if path.suffix in (".tmp", ".dead")]


async def check(script: Script, server: Server, banks: list[Bank], disk: Disk) -> Counter[str]:
    """What a start after a kill must be like. Raises Wrong."""
    if disk.leftovers():
        raise Wrong(f"left over: {disk.leftovers()}")
    counts: Counter[str] = Counter()
    async with connect(server.target) as client:
        listed = await client.banks.ListBanks(bank_pb2.ListBanksRequest(page_size=1000))
        stored = {bank.bank_id for bank in listed.banks}
        if back := stored & script.deleted:
            raise Wrong(f"deleted banks are back: {sorted(back)}")
        if set(disk.rows()) != stored:
            raise Wrong(f"catalog and listing differ: {sorted(set(disk.rows()) ^ stored)}")
        lost = {bank.bank_id for bank in banks} - stored - script.doubtful
        evicted = sum(v for k, v in _metrics(server).items() if "bank_evictions_total" in k)
        if len(lost) > evicted:
            raise Wrong(f"{len(lost)} banks are lost, {evicted:.0f} were evicted")
        for number, bank in enumerate(bank for bank in banks if bank.bank_id in stored):
            # Other banks take all slots at once, so that nothing of this one is resident.
            others = [[5000 + 4 * number + slot, *OTHER] for slot in range(SLOTS)]
            await asyncio.gather(
                *(client.tokens(ids, max_tokens=1, no_store=True) for ids in others)
            )
            prompt = script.prompt_for(bank)
            if prompt is not None:
                warm = await client.chat(prompt, max_tokens=4, thinking=False, no_store=True)
                counts["asked for by their text"] += 1
            else:
                warm = await client.tokens([*bank.ids, 4000], max_tokens=4, no_store=True)
            started = warm.started
            # By ids alone, a short bank may be one of too many that begin alike.
            least = bank.frontier if prompt is not None or bank.is_head else 1
            if started.pos_base < least or not started.disk_tokens:
                raise Wrong(
                    f"bank {bank.bank_id} of {bank.frontier} tokens: {warm.admission}"
                    f" {warm.miss_reason} pos_base={started.pos_base}"
                    f" disk_tokens={started.disk_tokens}"
                    f" memory_tokens={started.memory_tokens}"
                )
            if bank.bank_id not in script.answers:
                cold = await client.tokens(warm.prompt_ids, max_tokens=4, bypass=True)
                script.answers[bank.bank_id] = cold.token_ids
            if warm.token_ids != script.answers[bank.bank_id]:
                raise Wrong(f"bank {bank.bank_id} goes on differently from a cold start")
            counts["delivered"] += 1
            counts["disk tokens"] += started.disk_tokens
        verified = client.banks.VerifyBanks(bank_pb2.VerifyBanksRequest())
        async for verdict in verified:
            if not verdict.ok:
                raise Wrong(f"bank {verdict.bank_id} is damaged: {verdict.detail}")
            counts["verified"] += 1
    return counts


def _metrics(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as page:
        lines = page.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


@dataclass
class Kills:
    """All cycles and what came of them."""

    script: Script
    server: Server
    disk: Disk
    args: list[str]
    hits: Counter[tuple[str, bool]] = field(default_factory=Counter)  # (step, was it aimed at)
    counts: Counter[str] = field(default_factory=Counter)
    expected: list[Bank] = field(default_factory=list)

    def aim(self, cycle: int) -> str:
        """Every other kill is aimed: at what was hit least."""
        if cycle % 2 == 0:
            return ""
        steps = [f"{name}: {step}" for name, steps in STEPS.items() for step in steps]
        self.script.chance.shuffle(steps)
        return min(steps, key=self.hit)

    def hit(self, step: str) -> int:
        return self.hits[step, True] + self.hits[step, False]

    async def cycle(self, number: int) -> str:
        """Start, check, load, kill; returns a line that tells of it. Raises Wrong."""
        aim = self.aim(number)
        if aim.startswith("migration"):
            for path in self.disk.path.glob("catalog.db*"):
                path.unlink()
        start = asyncio.to_thread(self.server.start, self.args, aim, wait=not aim)
        if not await asyncio.wait_for(start, START_SECONDS):
            self.counts["killed while they started"] += 1
        elif await self._is_checked(aim):
            load = asyncio.create_task(self.script.load(self.server.target))
            try:
                await self._until_dead(aim)
            finally:
                await load
            self.expected = self.disk.ready()
        where = self.server.where()
        self.hits[where, where == aim] += 1
        return f"{'aimed' if where == aim else 'random'} at {where}; {len(self.expected)} banks"

    async def _is_checked(self, aim: str) -> bool:
        """Whether the server has outlived its check: it may come to the step it is to die at."""
        try:
            self.counts += await check(self.script, self.server, self.expected, self.disk)
        except grpc.aio.AioRpcError as error:
            if not aim or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise Wrong(f"a request failed: {error.code()} {error.details()}") from error
            await asyncio.to_thread(self.server.until_ended)
            self.counts["killed while they were checked"] += 1
            return False
        return True

    async def _until_dead(self, aim: str) -> None:
        ended = asyncio.ensure_future(asyncio.to_thread(self.server.until_ended))
        seconds = AIM_SECONDS if aim else self.script.chance.uniform(0.1, 2.5)
        try:
            await asyncio.wait_for(asyncio.shield(ended), seconds)
        except TimeoutError:
            os.kill(self.server.pid, signal.SIGKILL)
            await ended

    def table(self) -> list[str]:
        lines = [f"{'operation: step':40} {'random':>7} {'aimed':>6}"]
        known = [f"{name}: {step}" for name, steps in STEPS.items() for step in steps]
        others = sorted({step for step, _ in self.hits} - set(known))
        lines.extend(
            f"{step:40} {self.hits[step, False]:7} {self.hits[step, True]:6}"
            for step in (*known, *others)
        )
        return lines

    def too_rare(self) -> list[str]:
        known = [f"{name}: {step}" for name, steps in STEPS.items() for step in steps]
        return [step for step in known if self.hit(step) < LEAST_HITS]


def _forking(command: list[str], log: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )


async def run(asked: argparse.Namespace, folder: Path) -> tuple[Kills, str]:
    """All cycles; returns what came of them and what went wrong, if anything did."""
    model = write_tiny(folder / "tiny.gguf", SHAPE)
    loaded = load_model(open_checkpoint(model), device=torch.device("cpu"), dtype=torch.float32)
    name = fingerprint(open_checkpoint(model), loaded.layout, loaded.numeric_mode)
    banks = folder / "banks"
    status_path = folder / "status"
    status_path.write_bytes(bytes(STATUS_BYTES))
    command = [sys.executable, str(ROOT / "benchmarks" / "kills_server.py"), str(status_path)]
    with ExitStack() as stack:
        log = stack.enter_context((folder / "server.log").open("w"))
        status_file = stack.enter_context(status_path.open("r+b"))
        status = mmap.mmap(status_file.fileno(), STATUS_BYTES)
        process = stack.enter_context(_forking(command, log))
        stack.callback(process.kill)
        kills = Kills(
            Script(random.Random(asked.seed)),
            Server(process, status),
            Disk(banks, StateForm(name, loaded.layout)),
            ["--model", str(model), "--kv-disk-dir", str(banks), *OPTIONS],
        )
        try:
            for number in range(asked.cycles):
                told = await kills.cycle(number)
                sys.stdout.write(f"\r\033[K{number + 1:4}/{asked.cycles}  {told}")
                sys.stdout.flush()
            # The last kill is checked, too.
            await asyncio.to_thread(kills.server.start, kills.args, "")
            kills.counts += await check(kills.script, kills.server, kills.expected, kills.disk)
        except Wrong as error:
            return kills, str(error)
        finally:
            sys.stdout.write("\n")
            with suppress(ProcessLookupError):
                os.kill(kills.server.pid, signal.SIGKILL)
        return kills, ""


def main() -> None:
    parser = argparse.ArgumentParser(description="SIGKILL in the middle of everything.")
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="an empty folder to work in, and to keep")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    asked = parser.parse_args()
    began = time.monotonic()
    with ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        kills, wrong = asyncio.run(run(asked, folder))
    sys.stdout.write("\n".join(kills.table()) + "\n\n")
    counts = kills.counts
    sys.stdout.write(
        f"{sum(kills.hits.values())} kills in {time.monotonic() - began:.0f} s,"
        f" {kills.script.turns} turns finished; {counts['delivered']} times a bank that was ready"
        f" was delivered from disk ({counts['disk tokens']:,} tokens), each right;"
        f" {counts['verified']} files verified\n"
    )
    rare = kills.too_rare()
    if rare:
        sys.stdout.write(f"hit fewer than {LEAST_HITS} times: {', '.join(rare)}\n")
    sys.stdout.write(f"WRONG: {wrong}\n" if wrong else "nothing was wrong\n")
    facts: dict[str, Any] = {
        "suite": "kills",
        "kills": sum(kills.hits.values()),
        "wrong": wrong,
        "hits": {step: kills.hit(step) for step in sorted({step for step, _ in kills.hits})},
        **counts,
        "turns": kills.script.turns,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "command": f"make bench-store NAME=kills ARGS='--cycles {asked.cycles}'",
    }
    text = json.dumps(facts)
    if asked.record:
        with (RESULTS / "kills.jsonl").open("a") as file:
            file.write(text + "\n")
    sys.stdout.write(text + "\n")
    sys.exit(1 if wrong or rare else 0)


if __name__ == "__main__":
    main()
