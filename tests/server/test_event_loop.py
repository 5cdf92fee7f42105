"""Nothing computes or waits in the event loop: a whole server in this process's loop, where every
blocking call is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from client import connect
from texts import preamble, question
from tiny import write_tiny

from ds4grpc import server
from ds4grpc.config import Address, ServeConfig
from ds4grpc.v1 import bank_pb2, model_pb2

ANY = Address("127.0.0.1", 0)


@pytest.fixture
def no_blocking_calls() -> Iterator[None]:
    with blockbuster_ctx("ds4grpc"):  # gRPC's own teardown joins a thread
        yield


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    return ServeConfig(
        model=str(write_tiny(tmp_path / "tiny.gguf")),
        listen=ANY,
        metrics_listen=ANY,
        kv_disk_dir=tmp_path / "banks",
        kv_cache_min_tokens=16,
        slots=2,
        threads=1,
    )


async def test_server_never_blocks_its_event_loop(
    config: ServeConfig, no_blocking_calls: None
) -> None:
    options = {"max_tokens": 12, "thinking": True, "thinking_tokens": 4, "replay": "drop"}
    for expected in ("cold", "disk"):
        async with server._start(config) as running:
            async with connect(str(running.address)) as client:
                await client.models.GetModel(model_pb2.GetModelRequest())
                messages = [("system", preamble(8, seed=1)), ("user", question(1))]
                reply = await client.chat(messages, **options, bias={2: -100.0})
                if expected == "cold":
                    assert reply.admission == "cold"
                else:
                    assert reply.started.disk_tokens > 100
                messages += [("assistant", reply.text), ("user", question(2))]
                assert (await client.chat(messages, **options)).admission == "warm"
                for seed in range(3):  # evicts, stages
                    await client.chat([("user", question(50 + seed))], **options)
                await client.banks.ListBanks(bank_pb2.ListBanksRequest())
                async for _ in client.banks.VerifyBanks(bank_pb2.VerifyBanksRequest()):
                    pass
                await client.banks.RescanBanks(bank_pb2.RescanBanksRequest())
                await client.banks.GetStorage(bank_pb2.GetStorageRequest())
            await running.drain(5.0)
