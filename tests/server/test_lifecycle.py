"""From start to end of a server: tools without proto files, health, memory, drain, signals."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from client import chat_request, connect, details_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from process import ServerProcess, server
from texts import preamble, question

from ds4grpc.v1 import bank_pb2, model_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

GRPCURL = Path(sys.executable).with_name("grpcurl")
MIB = 2**20


async def grpcurl(*arguments: str) -> str:
    """stdout and stderr of a grpcurl that has no proto files at hand."""
    done = await asyncio.to_thread(
        subprocess.run,
        [str(GRPCURL), "-plaintext", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    return done.stdout + done.stderr


def stored_files(folder: Path) -> list[Path]:
    return list(folder.glob("*/??/*.bank"))


async def test_grpcurl_lists_generates_and_prints_error_info_in_words(
    smollm2_server: ServerProcess,
) -> None:
    target = smollm2_server.target
    listed = await grpcurl(target, "list")
    for service in ("GenerationService", "BankService", "ModelService"):
        assert f"ds4grpc.v1.{service}" in listed
    assert "grpc.health.v1.Health" in listed
    assert "grpc.reflection.v1.ServerReflection" in listed
    generated = await grpcurl(
        "-d",
        '{"chat": {"messages": [{"role": "ROLE_USER", "content": "Hi"}]},'
        ' "stopping": {"max_tokens": 3}, "sampling": {"temperature": 0}}',
        target,
        "ds4grpc.v1.GenerationService/Generate",
    )
    assert '"admission": "ADMISSION_' in generated
    assert '"FINISH_REASON_' in generated
    refused = await grpcurl(
        "-d",
        '{"prompt": "Hi", "sampling": {"temperature": -1}}',
        target,
        "ds4grpc.v1.GenerationService/Generate",
    )
    assert "InvalidArgument" in refused
    assert '"@type":"type.googleapis.com/google.rpc.ErrorInfo"' in refused.replace(": ", ":")
    assert "OUT_OF_RANGE" in refused
    assert "ds4grpc" in refused


@pytest.mark.alone
async def test_idle_server_is_ready_soon_and_small(smollm2_path: Path, tmp_path: Path) -> None:
    with server(tmp_path, "--dtype", "float32") as running:
        assert "smollm2 float32 cpu" in running.ready_line
        assert "8 slots x 8,192 tokens" in running.ready_line
        assert str(tmp_path) in running.ready_line
        async with connect(running.target) as client:
            model = (await client.models.GetModel(model_pb2.GetModelRequest())).model
            weights = model.num_parameters * 4
            await asyncio.sleep(1)
            idle = running.memory_bytes()
            assert idle - weights <= 700 * MIB, f"{(idle - weights) / MIB:.0f} MiB"
            # A slot costs what it holds: rows of 600 tokens, and what a step needs.
            reply = await client.chat([("user", preamble(36, seed=3))], max_tokens=2)
            rows = reply.started.prompt_tokens * model.kv_bytes_per_token
            grown = running.memory_bytes() - idle
            assert grown <= rows + 100 * MIB, f"{grown / MIB:.0f} MiB for {rows / MIB:.0f}"


@pytest.mark.alone
async def test_sigterm_drains_not_serving_first_and_ends_streams_within_the_grace(
    smollm2_path: Path, tmp_path: Path
) -> None:
    with server(tmp_path, "--grace-seconds", "30", "--kv-cache-min-tokens", "16") as running:
        async with connect(running.target) as client:
            health = health_pb2_grpc.HealthStub(client.channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            task = asyncio.create_task(
                client.chat([("user", question(1))], max_tokens=60, bias={2: -100.0})
            )
            await running.until_generating()
            running.terminate()
            sent = time.monotonic()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert time.monotonic() - sent < 1.0
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.chat([("user", "Too late?")], max_tokens=1)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "RetryInfo" in details_of(refused.value)
            reply = await task
            assert reply.finish_reason == "length"
            assert reply.finished.usage.generated_tokens == 60
        assert await asyncio.to_thread(running.wait) == 0
    assert stored_files(tmp_path), "the drained turn was not stored"


async def test_streams_past_the_grace_end_unavailable_and_their_banks_are_kept(
    smollm2_path: Path, tmp_path: Path
) -> None:
    with server(tmp_path, "--grace-seconds", "0.5", "--kv-cache-min-tokens", "16") as running:
        async with connect(running.target) as client:
            task = asyncio.create_task(client.chat([("user", question(2))], bias={2: -100.0}))
            await running.until_generating()
            running.terminate()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await task
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "RetryInfo" in details_of(ended.value)
        assert await asyncio.to_thread(running.wait) == 0
    assert stored_files(tmp_path)


@pytest.mark.alone
async def test_second_signal_exits_at_once(smollm2_path: Path, tmp_path: Path) -> None:
    with server(tmp_path, "--grace-seconds", "60") as running:
        async with connect(running.target) as client:
            call = client.generation.Generate(
                chat_request([("user", question(3))], bias={2: -100.0})
            )
            await call.read()
            running.terminate()
            await asyncio.sleep(0.5)
            assert running.process.poll() is None
            began = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(running.wait)
            assert time.monotonic() - began < 1.0
            assert code == 130
            call.cancel()


async def test_taken_port_and_owned_folder_are_clear_errors(
    smollm2_server: ServerProcess, tmp_path: Path
) -> None:
    def serve(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ds4grpc", "serve", "--metrics-listen", "127.0.0.1:0"]
        command += ["--dtype", "float32"]  # as the other server's: banks of others are apart
        return subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)

    taken = await asyncio.to_thread(
        serve, "--listen", smollm2_server.target, "--kv-disk-dir", str(tmp_path)
    )
    assert taken.returncode == 2
    assert f"--listen {smollm2_server.target} cannot be bound" in taken.stderr
    owned = await asyncio.to_thread(
        serve, "--listen", "127.0.0.1:0", "--kv-disk-dir", str(smollm2_server.folder)
    )
    assert owned.returncode == 2
    assert "--kv-disk-dir" in owned.stderr
    assert "--no-kv-disk" in owned.stderr
    assert "Traceback" not in taken.stderr + owned.stderr


async def test_bank_service_shows_keeps_verifies_and_deletes_one_tenants_banks(
    smollm2_path: Path, tmp_path: Path
) -> None:
    with server(tmp_path, "--kv-cache-min-tokens", "16") as running:
        async with (
            connect(running.target, "alice") as alice,
            connect(running.target, "bob") as bob,
        ):
            messages = [("user", question(4))]
            reply = await alice.chat(messages, max_tokens=4, bias={2: -100.0})
            bank_id = reply.finished.bank_id
            assert (await bob.chat(messages, max_tokens=4)).started.pos_base == 0
            flushed = alice.banks.FlushBanks(bank_pb2.FlushBanksRequest(), metadata=alice.metadata)
            assert not [item.detail async for item in flushed if item.detail]
            shown = await alice.bank(bank_id[:8], key_text=True)
            assert shown.location == bank_pb2.BANK_LOCATION_BOTH
            assert question(4) in shown.records[0].key_text
            with pytest.raises(grpc.aio.AioRpcError) as hidden:
                await bob.bank(bank_id)
            assert hidden.value.code() is grpc.StatusCode.NOT_FOUND
            pinned = await alice.banks.PinBank(
                bank_pb2.PinBankRequest(bank_id=bank_id), metadata=alice.metadata
            )
            assert pinned.bank.pinned
            with pytest.raises(grpc.aio.AioRpcError) as kept:
                await alice.banks.DeleteBank(
                    bank_pb2.DeleteBankRequest(bank_id=bank_id), metadata=alice.metadata
                )
            assert kept.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            await alice.banks.UnpinBank(
                bank_pb2.UnpinBankRequest(bank_id=bank_id), metadata=alice.metadata
            )
            verdicts = alice.banks.VerifyBanks(
                bank_pb2.VerifyBanksRequest(), metadata=alice.metadata
            )
            assert [v.ok async for v in verdicts] == [True]
            await alice.banks.DeleteBank(
                bank_pb2.DeleteBankRequest(bank_id=bank_id), metadata=alice.metadata
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await alice.bank(bank_id)
            again = await alice.chat(messages, max_tokens=1)
            assert again.admission == "cold"
            listed = await alice.banks.ListBanks(
                bank_pb2.ListBanksRequest(filter="location = stored AND frontier >= 1"),
                metadata=alice.metadata,
            )
            assert listed.total_size == 0
