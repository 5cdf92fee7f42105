"""Faults of the disk tier that users of other servers reported, against real servers.

The names carry the ids of docs/field-reports.md. The model is small: what it says is noise, but the
same noise each time.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from bankkit import stored_names
from client import Client, Reply, chat_request, collect, connect
from process import ServerProcess, server
from texts import preamble, question, sentences
from tiny import TinyShape, write_tiny

from ds4grpc.v1 import bank_pb2
from ds4grpc.v1 import generation_pb2 as pb

LONG = "DS4GRPC_LONG" in os.environ
OPTIONS = ("--kv-cache-min-tokens", "16", "--threads", "1", "--dtype", "float32")
NO_END = {2: -100.0}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 if LONG else 120)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("model") / "t.gguf", TinyShape(window=0)))


async def cold(client: Client, reply: Reply) -> list[int]:
    """What a request that reuses nothing samples after the same effective prompt."""
    answer = await client.tokens(
        reply.prompt_ids, max_tokens=len(reply.token_ids), bypass=True, bias=NO_END
    )
    assert answer.admission == "cold"
    return answer.token_ids


async def stored_ids(client: Client) -> set[str]:
    listed = await client.banks.ListBanks(bank_pb2.ListBanksRequest(page_size=1000))
    return {bank.bank_id for bank in listed.banks if bank.size_bytes}


async def test_b02_keys_are_the_same_in_every_process(tiny: str, tmp_path: Path) -> None:
    messages = [("system", preamble(20, seed=2)), ("user", sentences(8, seed=3))]
    names: list[set[str]] = []
    for seed in ("1", "2", ""):
        env = {"PYTHONHASHSEED": seed} if seed else {}
        with server(tmp_path, *OPTIONS, model=tiny, **env) as running:
            async with connect(running.target) as client:
                reply = await client.chat(messages, max_tokens=8, bias=NO_END, thinking=False)
                assert (reply.started.disk_tokens > 0) == bool(names)
                if names:
                    assert reply.started.disk_tokens >= reply.started.prompt_tokens - 1
                assert reply.token_ids == await cold(client, reply)
            assert running.stop() == 0
        names.append(stored_names(tmp_path))
    assert names[0] == names[1] == names[2] != set()


async def test_b26_bank_that_is_written_or_evicted_is_never_half_read(
    tiny: str, tmp_path: Path
) -> None:
    """Copies of one prompt come while its bank is being written, slowly, and others are evicted."""
    rounds = 100 if LONG else 2
    options = ("--kv-disk-space-mb", "6", "--kv-disk-write-mb-per-s", "2", "--slots", "3")
    draw = random.Random(26)
    with server(tmp_path, *OPTIONS, *options, model=tiny) as running:
        async with connect(running.target) as client:
            for number in range(rounds):
                prompt = [("user", f"{number}. {sentences(30, seed=number)}")]
                asking: dict[str, Any] = {"max_tokens": 6, "bias": NO_END, "thinking": False}
                first = await client.chat(prompt, **asking)
                wanted = await cold(client, first)

                async def again(prompt: Any, asking: dict[str, Any]) -> Reply:
                    await asyncio.sleep(draw.uniform(0, 0.3))
                    return await client.chat(prompt, **asking)

                others = [
                    client.chat([("user", sentences(40, seed=1000 * number + other))], **asking)
                    for other in range(4)
                ]
                replies = await asyncio.gather(*(again(prompt, asking) for _ in range(8)), *others)
                assert [reply.token_ids for reply in replies[:8]] == [wanted] * 8
            counts = running.metrics()
            verdicts = client.banks.VerifyBanks(bank_pb2.VerifyBanksRequest())
            assert all([verdict.ok async for verdict in verdicts])
        bad = [k for k, v in counts.items() if "restores_total" in k and v and '"ok"' not in k]
        assert bad == []


async def test_b28_copies_of_a_warm_prompt_all_end_and_leave_no_ghost(
    tiny: str, tmp_path: Path
) -> None:
    draw = random.Random(28)
    with server(tmp_path, *OPTIONS, "--slots", "3", model=tiny) as running:
        async with connect(running.target) as client:
            warm = [("user", sentences(20, seed=28))]
            await client.chat(warm, max_tokens=8, bias=NO_END)

            async def copy() -> None:
                call = client.generation.Generate(chat_request(warm, max_tokens=8, bias=NO_END))
                events = draw.choice((0, 1, 3, 1000))
                async for _ in call:
                    events -= 1
                    if events < 0:
                        call.cancel()
                        return

            for _ in range(100 if LONG else 2):
                for copies in (2, 4, 8):
                    began = time.monotonic()
                    tasks = [asyncio.create_task(copy()) for _ in range(copies)]
                    ended = await asyncio.gather(*tasks, return_exceptions=True)
                    assert [e for e in ended if isinstance(e, grpc.aio.AioRpcError)] == []
                    assert time.monotonic() - began < 5.0
            states = [pb.GENERATION_STATE_QUEUED, pb.GENERATION_STATE_RUNNING]
            request = pb.ListGenerationsRequest(states=states)
            for _ in range(200):
                if not (await client.generation.ListGenerations(request)).generations:
                    break
                await asyncio.sleep(0.02)
            assert not (await client.generation.ListGenerations(request)).generations
            after = await client.chat(warm, max_tokens=8, bias=NO_END)
            assert after.finish_reason == "length"


async def test_b28_requests_while_the_model_loads_end_ok_or_unavailable(
    tiny: str, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{free.getsockname()[1]}"
    starting = asyncio.create_task(
        asyncio.to_thread(ServerProcess, tmp_path, *OPTIONS, "--listen", target, model=tiny)
    )
    outcomes: list[str] = []
    async with connect(target) as client:
        while len(outcomes) < 20 or not starting.done():
            try:
                reply = await client.chat([("user", "Hi")], max_tokens=2, bias=NO_END)
                outcomes.append(reply.finish_reason)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                outcomes.append("unavailable")
                await asyncio.sleep(0.1)
        running = await starting
        try:
            # Before it tries to connect again, gRPC's channel waits for a while.
            request = chat_request([("user", "Hi")], max_tokens=2, bias=NO_END)
            after = Reply()
            async for response in client.generation.Generate(request, wait_for_ready=True):
                collect(after, response)
            assert after.finish_reason == "length"
        finally:
            running.kill()
    assert set(outcomes) <= {"length", "unavailable"}


@pytest.mark.parametrize("swapped", [False, True], ids=["A then B", "B then A"])
async def test_b36_both_conversations_of_a_process_are_found_after_sigterm(
    tiny: str, tmp_path: Path, swapped: bool
) -> None:
    """One plain, one with tools and thinking whose reasoning the client leaves out."""
    tool = pb.Tool(name="look_up", description="Looks a word up.")
    kinds: dict[str, dict[str, Any]] = {
        "A": {"thinking": False},
        "B": {"thinking": True, "thinking_tokens": 6, "replay": "drop", "tools": [tool]},
    }
    order = ["B", "A"] if swapped else ["A", "B"]
    talks: dict[str, list[tuple[str, ...]]] = {}
    stored: dict[str, int] = {}
    with server(tmp_path, *OPTIONS, model=tiny) as running:
        async with connect(running.target) as client:
            for name in order:
                talk: list[tuple[str, ...]] = [("system", preamble(12, seed=ord(name)))]
                for turn in range(8 if LONG else 4):
                    talk.append(("user", question(100 * ord(name) + turn)))
                    reply = await client.chat(talk, max_tokens=20, bias=NO_END, **kinds[name])
                    assert bool(reply.reasoning) == (name == "B")
                    talk.append(("assistant", reply.text))
                talks[name] = talk
                stored[name] = reply.started.prompt_tokens
        assert running.stop() == 0
    with server(tmp_path, *OPTIONS, model=tiny) as running:
        async with connect(running.target) as client:
            for name in order:
                talk = [*talks[name], ("user", question(7))]
                reply = await client.chat(talk, max_tokens=20, bias=NO_END, **kinds[name])
                assert reply.admission == "disk", (name, reply.admission, reply.miss_reason)
                assert reply.started.disk_tokens >= stored[name]
                sampled = reply.token_ids[:6] if name == "B" else reply.token_ids
                again = await client.tokens(
                    reply.prompt_ids, max_tokens=len(sampled), bypass=True, bias=NO_END
                )
                assert again.token_ids == sampled


async def test_b38_two_signals_while_banks_are_saved_lose_no_ready_bank(
    tiny: str, tmp_path: Path
) -> None:
    """Twice: SIGTERM with streams open, and again while the save is slow; each start is whole."""
    slow = ("--kv-disk-write-mb-per-s", "1", "--grace-seconds", "20")
    ready: set[str] = set()
    for cycle in range(2):
        with server(tmp_path, *OPTIONS, *slow, model=tiny) as running:
            async with connect(running.target) as client:
                assert await stored_ids(client) >= ready
                verdicts = client.banks.VerifyBanks(bank_pb2.VerifyBanksRequest())
                assert all([verdict.ok async for verdict in verdicts])
                for number in range(3):
                    text = sentences(20, seed=10 * cycle + number)
                    await client.chat([("user", text)], max_tokens=8, bias=NO_END)
                ready = await stored_ids(client)
                calls = [
                    client.generation.Generate(
                        chat_request(
                            [("user", sentences(20, seed=50 + 10 * cycle + number))],
                            max_tokens=120,
                            bias=NO_END,
                        )
                    )
                    for number in range(3)
                ]
                replies = [Reply() for _ in calls]
                streams = [aiter(call) for call in calls]
                for stream, reply in zip(streams, replies, strict=True):
                    collect(reply, await anext(stream))
                running.terminate()
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    for _ in range(100):
                        await client.chat([("user", "Too late?")], max_tokens=1)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                for stream, reply in zip(streams, replies, strict=True):
                    async for response in stream:
                        collect(reply, response)
                assert [reply.finish_reason for reply in replies] == ["length"] * 3
            began = time.monotonic()
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(running.wait)
            assert code in (0, 130)
            assert time.monotonic() - began < 10
    with server(tmp_path, *OPTIONS, model=tiny) as running:
        async with connect(running.target) as client:
            assert await stored_ids(client) >= ready
            prompt = [("user", sentences(20, seed=0))]
            reply = await client.chat(prompt, max_tokens=8, bias=NO_END)
            assert reply.started.disk_tokens > 0
            assert reply.token_ids == await cold(client, reply)
