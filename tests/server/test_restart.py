"""What is kept through kill -9 and SIGTERM: every conversation goes on from disk, as from cold."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from client import Client, Reply, connect
from process import ServerProcess, server
from rule import Judge
from texts import preamble, question, sentences

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = bool(os.environ.get("DS4GRPC_LONG"))
SENTENCES = 18 if LONG else 8  # of a system prompt
FLOAT32 = ("--dtype", "float32", "--kv-cache-min-tokens", "64")
# Without its end marker the model always has something to say.
NO_END = {2: -100.0}
THINKING = {
    **{"thinking": True, "thinking_tokens": 8, "replay": "drop", "max_tokens": 24},
    "bias": NO_END,
}
CONVERSATIONS = {
    "thinking": THINKING,
    "plain": {"thinking": False, "max_tokens": 16, "bias": NO_END},
}


async def converse(
    client: Client, messages: list[tuple[str, ...]], seed: int, options: dict[str, object]
) -> Reply:
    """One more turn; the client keeps the visible answer only."""
    # Long enough for a write after the turn: at least 64 new tokens.
    messages.append(("user", f"{question(seed)} {sentences(3, seed)}"))
    reply = await client.chat(messages, **options)
    messages.append(("assistant", reply.text))
    return reply


def is_written(folder: Path, bank_id: str) -> bool:
    return any(folder.glob(f"*/??/{bank_id}.*.bank"))


async def until_written(folder: Path, bank_id: str) -> None:
    for _ in range(600):
        if is_written(folder, bank_id):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the last turn was not written in 30 seconds")


def leftovers(folder: Path) -> list[Path]:
    return [*folder.rglob("*.tmp"), *folder.rglob("*.dead"), *folder.rglob("*-wal")]


async def test_kill_nine_loses_no_finished_turn(
    smollm2_path: Path, tmp_path: Path, cold_server: ServerProcess
) -> None:
    messages: list[tuple[str, ...]] = [("system", preamble(SENTENCES, seed=1))]
    with server(tmp_path, *FLOAT32) as running:
        async with connect(running.target) as client:
            await converse(client, messages, 1, THINKING)
            second = await converse(client, messages, 2, THINKING)
        await until_written(tmp_path, second.finished.bank_id)
        running.kill()
    with server(tmp_path, *FLOAT32) as running:
        async with connect(running.target) as client, connect(cold_server.target) as cold:
            third = await converse(client, messages, 3, THINKING)
            assert third.admission == "disk"
            assert third.started.disk_tokens >= second.started.prompt_tokens
            assert third.started.bank_id == second.finished.bank_id
            judge = Judge(cold, bias=NO_END)
            await judge.check(third, "after kill -9")
            judge.finish()
        assert running.stop() == 0


async def test_sigterm_keeps_every_conversation_to_its_last_token(
    smollm2_path: Path, tmp_path: Path, cold_server: ServerProcess
) -> None:
    conversations: dict[str, list[tuple[str, ...]]] = {
        name: [("system", preamble(SENTENCES, seed=i + 2))] for i, name in enumerate(CONVERSATIONS)
    }
    last: dict[str, Reply] = {}
    with server(tmp_path, *FLOAT32) as running:
        async with connect(running.target) as client:
            for turn in range(2):
                for name, messages in conversations.items():
                    last[name] = await converse(client, messages, turn, CONVERSATIONS[name])
        assert running.stop() == 0  # at once: nothing waited for the writes
        assert not leftovers(tmp_path)
    with server(tmp_path, *FLOAT32) as running:
        async with connect(running.target) as client, connect(cold_server.target) as cold:
            judge = Judge(cold, bias=NO_END)
            for name, messages in conversations.items():
                reply = await converse(client, messages, 7, CONVERSATIONS[name])
                assert reply.admission == "disk", name
                assert reply.started.bank_id == last[name].finished.bank_id
                assert reply.started.disk_tokens >= last[name].started.prompt_tokens
                await judge.check(reply, name)
            judge.finish()


async def test_exact_reuse_after_a_restart_answers_as_an_empty_folder_does(
    smollm2_path: Path, tmp_path: Path, cold_server: ServerProcess
) -> None:
    messages: list[tuple[str, ...]] = [("system", preamble(SENTENCES, seed=9))]
    with server(tmp_path, *FLOAT32) as running:
        async with connect(running.target) as client:
            await converse(client, messages, 1, THINKING)
            await converse(client, messages, 2, THINKING)
        assert running.stop() == 0
    messages.append(("user", question(3)))
    with server(tmp_path, *FLOAT32) as running:
        async with connect(running.target) as client, connect(cold_server.target) as cold:
            exact = await client.chat(messages, **THINKING, exact=True)
            empty = await cold.chat(messages, **THINKING, bypass=True)
            assert exact.admission == "disk_partial"
            assert exact.started.disk_tokens > SENTENCES * 14  # the system prompt and more
            # The effective prompt is the canonical one, not the bank's with hidden reasoning.
            assert exact.prompt_ids == empty.prompt_ids
            assert exact.started.hidden_tokens == 0
            assert (exact.reasoning, exact.text) == (empty.reasoning, empty.text)
