"""The bank commands against real servers and real files: listed, kept, deleted, swept."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from client import Client, Reply, chat_request, connect, details_of
from process import ServerProcess, server
from texts import preamble, question
from tiny import write_tiny

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
