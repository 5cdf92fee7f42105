"""The bank commands against real servers and real files: listed, kept, deleted, swept."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from bankkit import eventually, names
from client import Client, Reply, chat_request, connect, details_of
from process import ServerProcess, server
from texts import preamble, question
from tiny import TinyShape, write_tiny

from ds4grpc import server as serve
from ds4grpc.config import Address, ServeConfig
from ds4grpc.rpc import bank_files
from ds4grpc.v1 import bank_pb2
from ds4grpc.v1 import generation_pb2 as pb

NO_END = {2: -100.0}
OPTIONS = ("--kv-cache-min-tokens", "16", "--dtype", "float32", "--slots", "4")
Messages = list[tuple[str, ...]]
Whom = tuple[str, str]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def running(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests whose tenants are their own."""
    with server(tmp_path_factory.mktemp("shared"), *OPTIONS, model=tiny) as started:
        yield started


async def command(*arguments: str, whom: Whom = ("", ""), code: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of `ds4grpc banks ...`, in a process of its own with nobody to ask.

    `whom` is a server's address and a tenant.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DS4GRPC_")}
    called = ("--server", whom[0], "--tenant", whom[1]) if whom[0] else ()

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ds4grpc", "banks", *arguments, *called],
            capture_output=True,
            check=False,
            env=environ,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=60,
        )

    done = await asyncio.to_thread(run)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


async def say(client: Client, messages: Messages, **options: Any) -> Reply:
    """One more turn of a conversation, stored."""
    messages.append(("user", question(len(messages))))
    options = {"max_tokens": 80, "bias": NO_END, **options}
    reply = await client.chat(messages, **options)
    messages.append(("assistant", reply.text))
    call = client.banks.FlushBanks(bank_pb2.FlushBanksRequest(), metadata=client.metadata)
    assert not [item.detail async for item in call if item.detail]
    return reply


async def listed(client: Client, **query: Any) -> bank_pb2.ListBanksResponse:
    request = bank_pb2.ListBanksRequest(**query)
    page: bank_pb2.ListBanksResponse
    page = await client.banks.ListBanks(request, metadata=client.metadata)
    return page


async def delete(client: Client, bank_id: str) -> bank_pb2.DeleteBankResponse:
    request = bank_pb2.DeleteBankRequest(bank_id=bank_id)
    reply: bank_pb2.DeleteBankResponse
    reply = await client.banks.DeleteBank(request, metadata=client.metadata)
    return reply


async def until_idle(client: Client) -> None:
    """Returns when no generation of the tenant runs any more."""
    request = pb.ListGenerationsRequest(states=[pb.GENERATION_STATE_RUNNING])
    for _ in range(1000):
        found = await client.generation.ListGenerations(request, metadata=client.metadata)
        if not found.generations:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a generation goes on")


async def cold(client: Client, reply: Reply) -> list[int]:
    """What a request that reuses nothing samples after the same effective prompt."""
    count = len(reply.token_ids)
    answer = await client.tokens(reply.prompt_ids, max_tokens=count, bypass=True, bias=NO_END)
    assert answer.admission == "cold"
    return answer.token_ids


async def test_pages_over_a_real_server_hold_while_banks_come_and_go(
    running: ServerProcess,
) -> None:
    async with connect(running.target, "page") as client:
        made = []
        for seed in range(6):
            reply = await say(client, [("system", preamble(4, seed=seed))])
            made.append(reply.finished.bank_id)
        wanted = {bank.bank_id for bank in (await listed(client)).banks}
        assert wanted >= set(made)
        shown: list[str] = []
        token = ""
        for round_number in range(20):
            page = await listed(
                client, page_size=2, page_token=token, order_by="create_time", filter="idle < 1d"
            )
            shown += [bank.bank_id for bank in page.banks]
            token = page.next_page_token
            if not token:
                break
            if round_number < 2:  # one that was just shown goes, another comes
                await delete(client, page.banks[-1].bank_id)
                await say(client, [("system", preamble(4, seed=100 + round_number))])
        assert len(shown) == len(set(shown))
        assert wanted <= set(shown)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            token = (await listed(client, page_size=2)).next_page_token
            await listed(client, page_size=2, page_token=token, order_by="hits")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    out, _ = await command(
        *("ls", "--sort", "size_bytes desc", "--filter", "location = stored"),
        *("--limit", "3", "--json"),
        whom=(running.target, "page"),
    )
    sizes = [int(json.loads(line)["size_bytes"]) for line in out.splitlines()]
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)


async def test_show_tells_of_file_chain_and_records_and_of_keys_on_request(
    running: ServerProcess,
) -> None:
    whom = (running.target, "show")
    async with connect(running.target, "show") as client:
        messages: Messages = [("system", preamble(4, seed=1))]
        first = await say(client, messages)
        second = await say(client, messages)
        await delete(client, first.finished.bank_id)
        bank = await client.bank(second.finished.bank_id)
    assert [link.bank_id for link in bank.chain][-2:] == [
        first.finished.bank_id,
        second.finished.bank_id,
    ]
    assert [link.hidden for link in bank.chain][-2:] == [True, False]
    assert bank.chain[0].base == 0
    assert [link.base for link in bank.chain[1:]] == [link.frontier for link in bank.chain[:-1]]
    assert (bank.file.dtype, bank.file.checksum) == ("float32", "xxh3_64")
    sections = {section.name: section.size_bytes for section in bank.file.sections}
    assert sections["ids"] == 4 * bank.frontier
    assert sum(sections.values()) <= bank.size_bytes
    shown, _ = await command("show", bank.bank_id[:10], whom=whom)
    assert f"{first.finished.bank_id}\t{bank.chain[-2].base}" in shown
    assert "record 0: key kind raw" in shown
    assert "House rules" not in shown
    assert "House rules" in (await command("show", bank.bank_id, "--keys", whom=whom))[0]


async def test_rm_of_a_parent_a_pinned_and_a_used_bank_has_a_stated_result(
    running: ServerProcess,
) -> None:
    whom = (running.target, "rm")
    async with connect(running.target, "rm") as client, connect(running.target, "else") as other:
        theirs = (await say(other, [("system", preamble(4, seed=3))])).finished.bank_id
        messages: Messages = [("system", preamble(4, seed=2))]
        parent = (await say(client, messages)).finished.bank_id
        child = (await say(client, messages)).finished.bank_id
        out, _ = await command("rm", parent, whom=whom)
        assert out == f"hid {parent}: other banks still need its rows\n"
        assert parent in (await command("rm", parent, whom=whom, code=1))[1]  # hidden is not there

        await command("pin", child, whom=whom)
        _, err = await command("rm", child, whom=whom, code=1)
        assert "is pinned; `ds4grpc banks unpin` it first" in err
        assert "reason: BANK_PINNED" in err
        out, err = await command("rm", "--all", "--yes", whom=whom)
        assert "pinned banks are kept" in err
        assert child not in out
        await command("unpin", child, whom=whom)

        messages.append(("user", question(9)))
        request = chat_request(messages, max_tokens=3000, bias=NO_END)
        call = client.generation.Generate(request, metadata=client.metadata)
        started = (await call.read()).started
        assert started.bank_id == child
        with pytest.raises(grpc.aio.AioRpcError) as used:
            await delete(client, child)
        assert used.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert details_of(used.value)["ErrorInfo"].reason == "BANK_IN_USE"
        call.cancel()

        _, err = await command("rm", "--older-than", "0s", whom=whom, code=2)
        assert "say --yes" in err
        assert child in {bank.bank_id for bank in (await listed(client)).banks}
        await until_idle(client)
        await command("rm", "--older-than", "0s", "--yes", whom=whom)
        assert (await listed(client)).total_size == 0
        kept = {bank.bank_id for bank in (await listed(other)).banks}
        assert theirs in kept


async def test_gc_removes_planted_leftovers_of_a_running_server(running: ServerProcess) -> None:
    async with connect(running.target, "gc") as client:
        reply = await say(client, [("system", preamble(4, seed=5))])
        bank_id = reply.finished.bank_id
        (file,) = running.folder.glob(f"*/??/{bank_id}.*.bank")
        planted = [
            file.with_name(f"{bank_id[:2]}{'0' * 30}.0.bank.tmp"),
            file.with_name(f"{bank_id[:2]}{'1' * 30}.7.bank.dead"),
            file.with_name(f"{bank_id[:2]}{'2' * 30}.pin"),
        ]
        for path in planted:
            path.write_bytes(b"x" * 5000)
        stray = file.with_name(f"{bank_id[:2]}{'3' * 30}.0.bank")
        stray.write_bytes(b"not a bank")
        dry, _ = await command("gc", "--dry-run", whom=(running.target, ""))
        assert "leftover          3 files   24.0 KiB" in dry
        assert all(path.exists() for path in (*planted, stray))
        done, _ = await command("gc", "--quarantined", "--json", whom=(running.target, ""))
        kinds = {one["kind"]: one["num_files"] for one in json.loads(done)["collected"]}
        assert kinds["GARBAGE_KIND_LEFTOVER"] == 3
        assert kinds["GARBAGE_KIND_ORPHAN"] == 1
        assert not any(path.exists() for path in (*planted, stray))
        assert not list(running.folder.glob("*/quarantine/*"))
        verdicts = client.banks.VerifyBanks(bank_pb2.VerifyBanksRequest(), metadata=client.metadata)
        assert all([verdict.ok async for verdict in verdicts])


async def test_exported_conversation_goes_on_elsewhere_as_if_it_were_there(
    running: ServerProcess, tiny: str, tmp_path: Path
) -> None:
    file = tmp_path / "talk.bank"
    messages: Messages = [("system", preamble(6, seed=6))]
    async with connect(running.target, "anna") as anna:
        for _ in range(3):
            last = await say(anna, messages)
        bank_id = last.finished.bank_id
        assert len((await anna.bank(bank_id)).chain) > 1
        anna_there = (running.target, "anna")
        short = await anna.tokens(range(1000, 1008), max_tokens=2, bias={2: -100.0})
        _, err = await command(
            *("export", short.finished.bank_id, "-o", str(file)), whom=anna_there, code=1
        )
        assert "of 9 tokens is resident only; those of fewer than 16 are not stored" in err
        assert "--kv-cache-min-tokens" in err
        out, _ = await command("flush", whom=(running.target, "nobody"))
        assert "nothing to write" in out
        out, _ = await command("export", bank_id[:12], "-o", str(file), whom=anna_there)
        assert out.startswith(f"exported {bank_id}: ")
        assert file.stat().st_mode & 0o777 == 0o600
        _, err = await command("export", bank_id, "-o", str(file), whom=anna_there, code=2)
        assert "--force" in err
        _, err = await command(
            *("export", bank_id, "-o", str(tmp_path / "bert")),
            whom=(running.target, "bert"),
            code=1,
        )
        assert "BANK_NOT_FOUND" in err
    assert names(tmp_path, "*") == ["talk.bank"]  # nothing half-written
    with server(tmp_path / "b", *OPTIONS, model=tiny) as other:
        there = (other.target, "carl")
        out, _ = await command("import", str(file), "--json", whom=there)
        imported = json.loads(out)
        assert (imported["already_stored"], imported["bank_id"] == bank_id) == (False, False)
        again, _ = await command("import", str(file), whom=there)
        assert "was stored already" in again
        wrong = bytearray(file.read_bytes())
        wrong[len(wrong) // 2] ^= 1
        file.with_name("wrong.bank").write_bytes(wrong)
        _, err = await command("import", str(tmp_path / "wrong.bank"), whom=there, code=1)
        assert "reason: BANK_FILE_DAMAGED" in err
        messages.append(("user", question(77)))
        asking: dict[str, Any] = {"max_tokens": 24, "bias": NO_END}
        async with connect(other.target, "carl") as carl, connect(other.target, "anna") as anna:
            # Not even the tenant that it came from finds it here: it is carl's.
            assert (await listed(anna)).total_size == 0
            assert (await anna.chat(messages, no_store=True, **asking)).started.disk_tokens == 0
            assert (await carl.chat(messages, salt="other", **asking)).started.disk_tokens == 0
            reply = await carl.chat(messages, **asking)
            assert reply.admission == "disk"
            assert reply.started.disk_tokens >= last.started.prompt_tokens
            assert reply.started.bank_id == imported["bank_id"]
            assert reply.token_ids == await cold(carl, reply)
            trust = (await carl.bank(imported["bank_id"])).trust
            assert bank_pb2.TRUST_FLAG_PROVEN in trust  # now


async def test_file_of_another_model_is_refused_with_both_fingerprints(
    running: ServerProcess, tmp_path: Path
) -> None:
    async with connect(running.target, "model") as client:
        reply = await say(client, [("system", preamble(4, seed=7))])
        whom = (running.target, "model")
        file = str(tmp_path / "talk.bank")
        await command("export", reply.finished.bank_id, "-o", file, whom=whom)
        ours = (await client.bank(reply.finished.bank_id)).file.fingerprint
    model = write_tiny(tmp_path / "other.gguf", TinyShape(num_layers=2, sliding=(True, False)))
    with server(tmp_path / "other", *OPTIONS, model=str(model)) as other:
        _, err = await command("import", file, whom=(other.target, ""), code=1)
        assert "reason: OTHER_MODEL" in err
        assert ours in err
        assert other.stop() == 0
    assert not list((tmp_path / "other").rglob("*.bank"))
    assert not list((tmp_path / "other").rglob("incoming/*"))


def incoming(folder: Path) -> list[Path]:
    """Files that are being received."""
    return list(folder.glob("*/incoming/*"))


async def until_deleted(client: Client, bank_id: str) -> None:
    """Deletes a bank as soon as nobody uses it."""
    for _ in range(1000):
        try:
            await delete(client, bank_id)
            return
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        await asyncio.sleep(0.01)
    raise AssertionError("the bank is in use still")


async def test_client_that_stalls_or_leaves_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny(tmp_path / "flat.gguf", TinyShape(window=0))
    monkeypatch.setattr(bank_files, "STALL_SECONDS", 0.5)
    config = ServeConfig(
        model=str(model),
        listen=Address("127.0.0.1", 0),
        metrics_listen=Address("127.0.0.1", 0),
        threads=1,
        dtype="float32",
        kv_disk_dir=tmp_path,
        kv_cache_min_tokens=16,
        slots=2,
    )
    async with serve._start(config) as here, connect(str(here.address)) as client:
        # Long enough that it does not fit into what gRPC takes ahead of a reader.
        reply = await say(client, [("system", preamble(180, seed=8))], max_tokens=8)
        request = bank_pb2.ExportBankRequest(bank_id=reply.finished.bank_id)
        call = client.banks.ExportBank(request)
        assert (await call.read()).start.size_bytes > 2 << 20
        with pytest.raises(grpc.aio.AioRpcError) as used:
            await delete(client, request.bank_id)
        assert details_of(used.value)["ErrorInfo"].reason == "BANK_IN_USE"
        try:
            await until_deleted(client, request.bank_id)  # though the client is there still
        finally:
            call.cancel()

        options = bank_pb2.ImportBankRequest(options=bank_pb2.ImportOptions())
        sending = client.banks.ImportBank(timeout=20)
        await sending.write(options)
        await sending.write(bank_pb2.ImportBankRequest(chunk=b"x" * 5000))
        with pytest.raises(grpc.aio.AioRpcError) as stalled:
            await sending
        assert "the client sends no message for 0.5 s" in (stalled.value.details() or "")
        assert not incoming(tmp_path)
        leaving = client.banks.ImportBank()
        await leaving.write(options)
        await leaving.write(bank_pb2.ImportBankRequest(chunk=b"x" * 5000))
        await eventually(lambda: bool(incoming(tmp_path)))
        leaving.cancel()
        await eventually(lambda: not incoming(tmp_path))
        await here.drain(1)


async def test_verify_works_with_the_server_and_without_it(tiny: str, tmp_path: Path) -> None:
    banks = tmp_path / "banks"
    with server(banks, *OPTIONS, model=tiny) as running:
        whom = (running.target, "v")
        async with connect(running.target, "v") as client:
            messages: Messages = [("system", preamble(4, seed=9))]
            parent = (await say(client, messages)).finished.bank_id
            child = (await say(client, messages)).finished.bank_id
        online, _ = await command("verify", whom=whom)
        total = len(online.splitlines()) - 1
        assert online.splitlines()[0].startswith(f"1/{total} ")
        assert f"{total} banks, " in online
        assert "0 damaged" in online
        _, err = await command("verify", "--offline", str(banks), code=1)
        assert "a running server owns the bank folder" in err
        assert "Traceback" not in err
        await command("export", child, "-o", str(tmp_path / "talk"), whom=whom)
        assert await asyncio.to_thread(running.stop) == 0
    assert " ok\n" in (await command("verify", "--offline", str(tmp_path / "talk")))[0]
    offline, _ = await command("verify", "--offline", str(banks))
    assert len(offline.splitlines()) - 1 >= total  # a stop may write more
    assert "0 damaged" in offline
    (file,) = banks.glob(f"*/??/{parent}.*.bank")
    data = bytearray(file.read_bytes())
    data[4096 * 3] ^= 1
    file.write_bytes(data)
    out, _ = await command("verify", "--offline", str(banks), "--json", code=1)
    verdicts = {one["bank_id"]: one for one in map(json.loads, out.splitlines())}
    assert verdicts[parent]["detail"]
    assert verdicts[child]["detail"] == f"it needs bank {parent}, which is damaged"
    assert file.read_bytes() == data
    only, _ = await command("verify", child[:12], "--offline", str(banks), code=0)
    assert only.splitlines()[0] == f"1/1 {child} ok"
