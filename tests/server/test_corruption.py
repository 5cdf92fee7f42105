"""Bank files that are wrong, under a server that was stopped and under one that runs: the answer is
that of a cold start, the reason is counted, the file is put aside and not tried again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from client import Client, Reply, connect
from damage import DAMAGES, Parsed
from process import ServerProcess, server
from texts import preamble, question
from tiny import TinyShape, write_tiny

from ds4grpc.v1 import bank_pb2

# No conversation is resident any more when it is gone on with.
OPTIONS = ("--kv-cache-min-tokens", "16", "--slots", "1", "--threads", "1", "--dtype", "float32")
NO_END = {2: -100.0}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", TinyShape(window=0)))


@dataclass
class Conversation:
    """One turn that was stored, and its file."""

    messages: list[tuple[str, ...]]
    frontier: int
    path: Path

    async def turn(self, client: Client) -> Reply:
        return await client.chat(self.messages, max_tokens=6, bias=NO_END, thinking=False)


async def conversation(client: Client, folder: Path, seed: int) -> Conversation:
    """A stored bank of its own: nothing is shared with another conversation but the template."""
    messages: list[tuple[str, ...]] = [
        ("system", preamble(20, seed=seed)),
        ("user", question(seed)),
    ]
    reply = await client.chat(messages, max_tokens=8, bias=NO_END, thinking=False)
    bank = await stored(client, reply)
    (path,) = [folder / name for name in found(folder, f"*/??/{bank.bank_id}.*.bank")]
    more = [*messages, ("assistant", reply.text), ("user", question(seed + 1000))]
    return Conversation(more, bank.frontier, path)


def found(folder: Path, pattern: str) -> list[str]:
    """Names of what matches, below `folder`."""
    return [str(path.relative_to(folder)) for path in folder.glob(pattern)]


def refused(running: ServerProcess) -> dict[str, float]:
    """How many files failed a check so far, by kind."""
    name = 'ds4grpc_bank_restores_total{result="'
    return {
        text.removeprefix(name).removesuffix('"}'): value
        for text, value in running.metrics().items()
        if text.startswith(name) and '"ok"' not in text and value
    }


def more_than(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    return {kind: now[kind] - before.get(kind, 0) for kind in now if now[kind] != before.get(kind)}


async def equal_to_cold(client: Client, reply: Reply) -> None:
    answer = await client.tokens(
        reply.prompt_ids, max_tokens=len(reply.token_ids), bypass=True, bias=NO_END
    )
    assert answer.token_ids == reply.token_ids


async def stored(client: Client, reply: Reply) -> bank_pb2.Bank:
    """What the reply ended as, once it is a file."""
    for _ in range(200):
        async for written in client.banks.FlushBanks(bank_pb2.FlushBanksRequest()):
            assert not written.detail
        try:
            bank = await client.bank(reply.finished.bank_id)
        except grpc.aio.AioRpcError as error:  # it has left its slot and is being written
            assert error.code() is grpc.StatusCode.NOT_FOUND
        else:
            if bank.size_bytes:
                return bank
        await asyncio.sleep(0.05)
    raise AssertionError("the bank was not stored")


async def displaced(client: Client) -> None:
    """Fills the slot with another conversation, which is not stored."""
    await client.chat([("user", question(9000))], max_tokens=2, no_store=True, bypass=True)


async def is_survived(
    running: ServerProcess,
    client: Client,
    talk: Conversation,
    kinds: set[str],
    seen: dict[str, float],
) -> tuple[Reply, dict[str, float]]:
    """The next turn after the damage; returns it and what was refused, `seen` by the start."""
    before = refused(running)
    await displaced(client)
    reply = await talk.turn(client)
    assert reply.finish_reason == "length"
    assert reply.started.cached_tokens < talk.frontier
    await equal_to_cold(client, reply)
    counted = more_than(before, refused(running))
    assert sum(counted.values()) <= 2
    assert set(counted) <= kinds and (counted or set(seen) & kinds), (counted, seen)
    # The second round does not meet the file again.
    before = refused(running)
    await stored(client, reply)
    await displaced(client)
    again = await talk.turn(client)
    await equal_to_cold(client, again)
    assert again.started.cached_tokens > talk.frontier
    assert refused(running) == before
    return reply, counted


def say_another_question(path: Path, seed: int) -> None:
    """Makes the file claim, right in itself, that its tokens are those of another prompt."""
    parsed = Parsed(path)
    old = question(seed).encode()
    at = parsed.data.index(old, *parsed.place("records"))
    parsed.data[at : at + len(old)] = old[::-1]
    parsed.seal()


def is_well(running: ServerProcess) -> None:
    assert "Traceback" not in running.log and running.process.poll() is None


async def test_damage_under_a_running_server_is_a_miss_once(
    tiny: str, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    draw = random.Random(2)
    with server(tmp_path, *OPTIONS, model=tiny) as running:
        async with connect(running.target) as client:
            for number, (name, (damage, kinds)) in enumerate(DAMAGES.items()):
                talk = await conversation(client, tmp_path, number)
                good = talk.path.read_bytes()
                if name == "ids beyond the vocabulary":  # under another name: nobody looks for it
                    continue
                damage(talk.path, draw)
                reply, counted = await is_survived(running, client, talk, kinds, {})
                (aside,) = found(tmp_path, f"*/quarantine/{talk.path.name}")
                assert (tmp_path / aside).read_bytes() != good
                measured(f"{name}: {counted}, then {reply.admission}")
            swapped = [await conversation(client, tmp_path, seed) for seed in (101, 102)]
            first, second = (talk.path for talk in swapped)
            data = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(data)
            for talk in swapped:
                reply, counted = await is_survived(running, client, talk, {"identity"}, {})
                measured(f"swapped: {counted}, then {reply.admission}")
        is_well(running)
        assert running.stop() == 0
    assert not found(tmp_path, "**/unpickled")


async def test_damage_under_a_stopped_server_is_a_miss_once(
    tiny: str, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    draw = random.Random(3)
    with server(tmp_path, *OPTIONS, model=tiny) as running:
        async with connect(running.target) as client:
            talks = [await conversation(client, tmp_path, seed) for seed in range(len(DAMAGES))]
            lying = await conversation(client, tmp_path, 100)
        assert running.stop() == 0
    for talk, (damage, _) in zip(talks, DAMAGES.values(), strict=True):
        damage(talk.path, draw)
    say_another_question(lying.path, 100)
    with server(tmp_path, *OPTIONS, model=tiny) as running:
        at_start = refused(running)
        async with connect(running.target) as client:
            for talk, (name, (_, kinds)) in zip(talks, DAMAGES.items(), strict=True):
                reply, counted = await is_survived(running, client, talk, kinds, at_start)
                measured(f"{name}: {counted}, then {reply.admission}")
            lie = [lying.messages[0], ("user", question(100)[::-1])]
            reply = await client.chat(lie, max_tokens=6, bias=NO_END, thinking=False)
            await equal_to_cold(client, reply)
            shown = await client.decode(reply.prompt_ids)
            assert question(100)[::-1] in shown and question(100) not in shown
            storage = await client.banks.GetStorage(bank_pb2.GetStorageRequest())
            assert storage.num_quarantined == len(DAMAGES)
        is_well(running)
        assert sum(refused(running).values()) == len(DAMAGES)
        assert running.stop() == 0
    assert not found(tmp_path, "**/unpickled")
