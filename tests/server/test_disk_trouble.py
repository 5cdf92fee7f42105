"""A disk that is full, cannot be written or is not there: every request is answered, it is said
in log, health and metrics, and writing goes on by itself when it can.

The names carry the ids of the field reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from budgetkit import occupied
from client import Client, Reply, connect
from grpc_health.v1 import health_pb2, health_pb2_grpc
from process import metrics_of, server
from texts import preamble, question
from tiny import TinyShape, write_tiny

from ds4grpc import server as serve
from ds4grpc.config import MB, Address, ServeConfig
from ds4grpc.errors import ConfigError
from ds4grpc.store.files import Files
from ds4grpc.v1 import bank_pb2

LONG = "DS4GRPC_LONG" in os.environ
ANY = Address("127.0.0.1", 0)
OPTIONS: dict[str, Any] = {"max_tokens": 8, "bias": {2: -100.0}}
pytestmark = pytest.mark.timeout(300)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 KiB of rows a token."""
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", TinyShape(window=0))


def config(model: Path, folder: Path, **options: Any) -> ServeConfig:
    small: dict[str, Any] = {"kv_cache_min_tokens": 16, "slots": 4, "threads": 1, **options}
    small.setdefault("dtype", "float32")
    return ServeConfig(
        model=str(model), listen=ANY, metrics_listen=ANY, kv_disk_dir=folder, **small
    )


async def health_of(client: Client, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(client.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def storage_of(client: Client) -> bank_pb2.GetStorageResponse:
    response: bank_pb2.GetStorageResponse
    response = await client.banks.GetStorage(bank_pb2.GetStorageRequest())
    return response


async def until(is_so: Callable[[], Any], seconds: float = 15.0) -> None:
    """Waits for what a coroutine says, or fails."""
    for _ in range(int(seconds * 20)):
        if await is_so():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not happen")


async def metrics(running: serve.Server) -> dict[str, float]:
    return await asyncio.to_thread(metrics_of, f"http://{running.metrics_address}/metrics")


async def two_turns(client: Client, seed: int, num_sentences: int = 8) -> Reply:
    """A conversation of two turns; the second one is warm, whatever the disk does."""
    messages: list[tuple[str, ...]] = [
        ("system", preamble(num_sentences, seed=seed)),
        ("user", question(seed)),
    ]
    first = await client.chat(messages, **OPTIONS)
    messages += [("assistant", first.text), ("user", question(seed + 1))]
    second = await client.chat(messages, **OPTIONS)
    assert second.started.cached_tokens >= first.started.prompt_tokens
    assert (first.finish_reason, second.finish_reason) == ("length", "length")
    return second


class HookedDisk:
    """Where nobody may mount: a disk that refuses what would be too much, or everything."""

    def __init__(self, size_bytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size_bytes = size_bytes
        self.folder = folder
        self.is_full = False
        monkeypatch.setattr(Files, "before", lambda files, operation, path: self.before(operation))

    def before(self, operation: str) -> None:
        if operation in ("make_folder", "create", "allocate", "write") and (
            self.is_full or occupied(self.folder) > self.size_bytes - 4 * MB
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        self.is_full = True
        yield
        self.is_full = False


class SmallDisk:
    """A tmpfs. While it is `full`, another program takes whatever becomes free."""

    def __init__(self, root: Path) -> None:
        self.ballast = root / "ballast"

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        done = threading.Event()
        taking = threading.Thread(target=self._take, args=(done,))
        taking.start()
        try:
            yield
        finally:
            done.set()
            taking.join()
            self.ballast.unlink()

    def _take(self, done: threading.Event) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            while not done.wait(0.002):
                with contextlib.suppress(OSError):
                    while file.write(bytes(64 << 10)):
                        pass


def mounted(folder: Path, options: str) -> bool:
    """Mounts a tmpfs, where that is allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    return shutil.which("mount") is not None and not subprocess.run(command).returncode


@contextlib.contextmanager
def small_disk(
    folder: Path, size_mb: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HookedDisk | SmallDisk]:
    if not mounted(folder, f"size={size_mb}m"):
        yield HookedDisk(size_mb * MB, folder, monkeypatch)
        return
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(params=["a file in the way", "a read-only disk"])
def unusable(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder of which nothing can be made; mode bits would not stop root."""
    root = tmp_path / "root"
    if request.param == "a file in the way":
        root.write_bytes(b"not a folder")
        yield root / "banks"
        return
    if mounted(root, "ro"):
        yield root / "banks"
        subprocess.run(["umount", str(root)], check=True)
        return

    def refuse(files: Files, operation: str, path: str) -> None:
        if operation == "make_folder":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Files, "before", refuse)
    yield root / "banks"


async def test_b20_unusable_folder_leaves_a_server_that_says_so_and_reuses_what_is_resident(
    tiny: Path, unusable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve._start(config(tiny, unusable)) as running:
        said = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [str(unusable) in record.getMessage() for record in said][-1]
        assert len([record for record in said if record.levelno == logging.ERROR]) == 1
        assert f"banks not stored: the bank folder {unusable}" in running.ready_line(1.0)
        async with connect(str(running.address)) as client:
            await two_turns(client, 1)
            await until(lambda: is_health(client, serve.BANK, NOT_SERVING))
            assert await is_health(client, "", SERVING)
            assert await is_health(client, serve.GENERATION, SERVING)
            storage = await storage_of(client)
            assert not storage.enabled
            assert str(unusable) in storage.detail
            assert (await metrics(running))["ds4grpc_disk_enabled"] == 0
        await running.drain(1)


async def is_health(client: Client, service: str, status: int) -> bool:
    return await health_of(client, service) == status


@pytest.mark.slow
async def test_b20_folder_that_turns_unwritable_hurts_no_request_and_is_seen_until_it_is_well(
    tiny: Path, tmp_path: Path
) -> None:
    """The process may make no file longer: every write to a file fails, as on a read-only disk."""
    options = ("--kv-cache-min-tokens", "16", "--dtype", "float32", "--slots", "2")
    with server(tmp_path, *options, model=str(tiny)) as running:
        async with connect(running.target) as client:

            async def is_enabled(wanted: bool) -> bool:
                found = await asyncio.to_thread(running.metrics)
                return found["ds4grpc_disk_enabled"] == wanted

            await two_turns(client, 1)
            await asyncio.to_thread(running.wait_for_log, "bank persisted")
            assert await is_enabled(True)
            _, hard = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (0, hard))
            for seed in range(10, 14):
                await two_turns(client, seed)
            await until(lambda: is_enabled(False))
            await until(lambda: is_health(client, serve.BANK, NOT_SERVING))
            assert await is_health(client, "", SERVING)
            storage = await storage_of(client)
            assert not storage.enabled
            assert storage.detail
            messages = [("system", preamble(8, seed=1)), ("user", "Who?")]
            again = await client.chat(messages, **OPTIONS)
            assert again.started.disk_tokens > 50, "reading does not go on"
            assert running.log.count("banks are not written any more") == 1
            assert "Traceback" not in running.log
            resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (hard, hard))
            await until(lambda: is_enabled(True))
            await until(lambda: is_health(client, serve.BANK, SERVING))
            assert (await storage_of(client)).enabled
            assert running.log.count("banks are written again") == 1
            before = running.log.count("bank persisted")
            await two_turns(client, 20)
            await until(lambda: is_more(lambda: running.log.count("bank persisted"), before))
        assert running.stop() == 0


async def is_more(count: Callable[[], int], before: int) -> bool:
    return count() > before


async def test_folder_of_another_server_is_refused_or_done_without_as_asked(
    tiny: Path, tmp_path: Path
) -> None:
    async with serve._start(config(tiny, tmp_path)):
        with pytest.raises(ConfigError, match="--kv-disk-busy off"):
            async with serve._start(config(tiny, tmp_path)):
                pass
        async with serve._start(config(tiny, tmp_path, kv_disk_busy="off")) as running:
            assert "banks not stored: another process owns" in running.ready_line(1.0)
            async with connect(str(running.address)) as client:
                await two_turns(client, 1)
                assert "another process owns" in (await storage_of(client)).detail


async def test_default_cap_counts_the_stored_banks_as_free(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is half of what is free, so else each start would evict some."""
    root, caps = tmp_path / "disk", []
    with small_disk(root, 64, monkeypatch):
        for number in range(2):
            async with serve._start(config(tiny, root / "banks")) as running:
                async with connect(str(running.address)) as client:
                    caps.append((await storage_of(client)).quota_bytes)
            (root / "banks" / f"kept.{number}").write_bytes(bytes(24 * MB))
    assert abs(caps[1] - caps[0]) <= MB


@pytest.mark.slow
async def test_full_disk_below_the_cap_loses_writes_but_no_answer_and_recovers(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """50 conversations on 64 MB whose banks take more than that, while the cap is 1 GB."""
    count, size_mb = (50, 64) if LONG else (15, 16)
    caplog.set_level(logging.INFO, "ds4grpc")
    root = tmp_path / "disk"
    options = {"kv_disk_space_mb": 1024, "max_context": 4096}
    with small_disk(root, size_mb, monkeypatch) as disk:
        async with serve._start(config(tiny, root / "banks", **options)) as running:
            async with connect(str(running.address)) as client:

                async def is_enabled(wanted: bool) -> bool:
                    return (await metrics(running))["ds4grpc_disk_enabled"] == wanted

                for seed in range(count):
                    await two_turns(client, 100 * seed, num_sentences=90)
                seen = await metrics(running)
                lost = seen['ds4grpc_bank_persist_failures_total{kind="no_space"}']
                evicted = seen['ds4grpc_bank_evictions_total{reason="lru"}']
                assert lost > 0, "the disk was never full"
                assert evicted > 0, "no room was made"
                listed = await client.banks.ListBanks(bank_pb2.ListBanksRequest())
                assert listed.total_size > 5
                with disk.full():
                    for seed in range(3):
                        await two_turns(client, 7 + 100 * seed, num_sentences=90)
                    await until(lambda: is_enabled(False))
                    await until(lambda: is_health(client, serve.BANK, NOT_SERVING))
                    # Even the last bank may have had to go, and is gone for good.
                    await two_turns(client, 7777, num_sentences=90)
                await until(lambda: is_enabled(True))
                await until(lambda: is_health(client, serve.BANK, SERVING))
                before = (await metrics(running))['ds4grpc_bank_persists_total{reason="turn"}']
                last = await two_turns(client, 9999, num_sentences=90)

                async def is_stored() -> bool:
                    found = await metrics(running)
                    return found['ds4grpc_bank_persists_total{reason="turn"}'] > before

                await until(is_stored)
            await running.drain(1)
        assert not [record for record in caplog.records if record.exc_info], "a bug was logged"
        async with serve._start(config(tiny, root / "banks", **options)) as running:
            async with connect(str(running.address)) as client:
                reply = await client.tokens(last.prompt_ids, **OPTIONS)
                assert reply.started.disk_tokens > 1000
    measured(
        f"{2 * count + 10} answers on {size_mb} MB: {lost:.0f} writes lost, {evicted:.0f} banks"
        f" evicted for others, {listed.total_size} stored when it was full"
    )
