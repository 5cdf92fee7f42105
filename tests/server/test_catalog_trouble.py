"""Whatever happens to the catalog of a running server or between two runs, requests go on."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from client import Client, Reply, connect
from process import ServerProcess, server
from texts import preamble, question, sentences
from tiny import TinyShape, write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = bool(os.environ.get("DS4GRPC_LONG"))
LOCK_SECONDS = 60.0 if LONG else 6.0  # longer than a statement waits
CALM_SECONDS = 60.0 if LONG else 4.0
NUM_STREAMS = 16 if LONG else 4
# Plain attention: every turn is written. A tiny model's tokens would come faster than can be told
# from noise, so its numbers are those of the smallest that takes a few milliseconds.
SHAPE = TinyShape(sliding=(False,) * 4)
OPTIONS = ("--kv-cache-min-tokens", "64", "--dtype", "float32", "--slots", str(NUM_STREAMS))
TURN = {"thinking": False, "max_tokens": 24, "bias": {2: -100.0}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", SHAPE))


def catalog_of(folder: Path) -> Path:
    return next(folder.glob("*/catalog.db"))


def num_rows(folder: Path) -> int:
    with closing(sqlite3.connect(catalog_of(folder), timeout=5)) as connection:
        (number,) = connection.execute("select count(*) from banks").fetchone()
        assert isinstance(number, int)
        return number


def logs_of(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*/catalog.db-*")]


def num_files(folder: Path) -> int:
    return len(list(folder.glob("*/??/*.bank")))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Another process's write lock; it may as well be this one's."""
    with closing(sqlite3.connect(catalog_of(folder), timeout=30)) as outside:
        outside.isolation_level = None
        outside.execute("BEGIN EXCLUSIVE")
        yield
        outside.execute("ROLLBACK")


async def converse(client: Client, seed: int, until: Callable[[], bool]) -> list[Reply]:
    """Turns of one conversation, one after the other, until it is time to stop."""
    messages: list[tuple[str, ...]] = [("system", preamble(8, seed=seed))]
    replies: list[Reply] = []
    while not until():
        messages.append(("user", f"{question(len(replies))} {sentences(5, seed)}"))
        if len(messages) > 20:  # within the context
            messages = [messages[0], messages[-1]]
        replies.append(await client.chat(messages, **TURN))
        messages.append(("assistant", replies[-1].text))
    return replies


async def all_converse(client: Client, seconds: float, seed: int) -> list[Reply]:
    end = time.monotonic() + seconds
    done = await asyncio.gather(
        *(converse(client, seed + n, lambda: time.monotonic() > end) for n in range(NUM_STREAMS))
    )
    return [reply for replies in done for reply in replies]


def gaps_ms(replies: list[Reply]) -> list[float]:
    """Sorted times between tokens of one stream."""
    times = [reply.token_times for reply in replies]
    return sorted(
        (after - before) * 1e3
        for each in times
        for before, after in zip(each, each[1:], strict=False)
    )


@pytest.mark.alone
async def test_b46_locked_catalog_fails_no_request_and_delays_no_token(
    tmp_path: Path, tiny: str, measured: Callable[[str], None]
) -> None:
    with server(tmp_path, *OPTIONS, model=tiny) as running:
        async with connect(running.target) as client:
            await all_converse(client, 1.0, seed=100)  # warm up
            calm = await all_converse(client, CALM_SECONDS, seed=200)
            with closing(sqlite3.connect(catalog_of(tmp_path))) as reader:
                reader.isolation_level = None
                reader.execute("BEGIN")  # and an old snapshot beside it
                reader.execute("select count(*) from banks").fetchone()
                with locked(tmp_path):
                    rows, files = num_rows(tmp_path), num_files(tmp_path)
                    loud = await all_converse(client, LOCK_SECONDS, seed=300)
                    assert num_rows(tmp_path) == rows
                    assert num_files(tmp_path) > files  # written all the same
            for _ in range(300):
                if num_rows(tmp_path) == num_files(tmp_path):
                    break
                await asyncio.sleep(0.1)
            assert num_rows(tmp_path) == num_files(tmp_path)
        metrics = running.metrics()
        assert "banks are not written any more" not in running.log
        assert running.stop() == 0
    assert logs_of(tmp_path) == []
    before, after = gaps_ms(calm), gaps_ms(loud)
    for name, taken, replies in (("calm", before, calm), ("locked", after, loud)):
        measured(
            f"{name}: {len(replies)} turns, gaps p50"
            f" {taken[len(taken) // 2]:.1f} p99 {taken[len(taken) * 99 // 100]:.1f}"
            f" max {taken[-1]:.1f} ms"
        )
    assert all(reply.finish_reason == "length" for reply in calm + loud)
    assert after[-1] <= before[-1] + 100
    assert metrics['ds4grpc_catalog_errors_total{kind="locked"}'] >= 1
    assert metrics['ds4grpc_catalog_errors_total{kind="slow"}'] == 0


@pytest.mark.parametrize("damage", ["garbage", "missing"] if LONG else ["garbage"])
async def test_b37_kill_nine_and_a_lost_catalog_lose_no_bank(
    tmp_path: Path, tiny: str, damage: str
) -> None:
    messages: list[tuple[str, ...]] = [("system", preamble(8, seed=1)), ("user", question(1))]
    with server(tmp_path, *OPTIONS, model=tiny) as running:
        async with connect(running.target) as client:
            first = await client.chat(messages, **TURN)
            for _ in range(100):
                if num_files(tmp_path):
                    break
                await asyncio.sleep(0.05)
        running.kill()
    path = catalog_of(tmp_path)
    for each in path.parent.glob("catalog.db*"):
        each.unlink()
    if damage == "garbage":
        path.write_bytes(os.urandom(50_000))
    messages += [("assistant", first.text), ("user", question(2))]
    with server(tmp_path, *OPTIONS, model=tiny) as running:
        async with connect(running.target) as client:
            second = await client.chat(messages, **TURN)
        assert second.admission.startswith("disk")
        assert second.started.disk_tokens >= 64
        warnings = [each for each in running.log.splitlines() if " WARNING " in each]
        assert len(warnings) == 1, warnings
        assert "catalog" in warnings[0]
        assert running.stop() == 0


def test_folder_is_its_servers_until_that_is_killed(tmp_path: Path, tiny: str) -> None:
    with server(tmp_path, *OPTIONS, model=tiny) as owner:
        with pytest.raises(RuntimeError, match="--kv-disk-busy off"):
            ServerProcess(tmp_path, *OPTIONS, model=tiny)
        assert owner.metrics()["ds4grpc_disk_enabled"] == 1
        owner.kill()
        with server(tmp_path, *OPTIONS, model=tiny) as heir:  # the lock died with its owner
            assert heir.metrics()["ds4grpc_disk_enabled"] == 1
            assert heir.stop() == 0
