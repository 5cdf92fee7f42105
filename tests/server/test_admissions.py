"""Every kind of admission, once each: as `started` says, as the metric counts, equal to cold."""

from __future__ import annotations

from pathlib import Path

import pytest
from client import Reply, chat_request, collect, connect
from process import ServerProcess, server
from rule import Judge
from texts import preamble, question, sentences

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

SYSTEM = ("system", preamble(24, seed=5))
NO_END = {2: -100.0}  # without its end marker the model always has something to say
OPTIONS = {
    **{"max_tokens": 16, "thinking": True, "thinking_tokens": 6, "replay": "drop"},
    "bias": NO_END,
}
FLOAT32 = ("--dtype", "float32", "--kv-cache-min-tokens", "64")


async def test_all_seven_admissions_are_told_counted_and_equal_to_cold(
    smollm2_path: Path, tmp_path: Path, cold_server: ServerProcess
) -> None:
    seen: dict[str, Reply] = {}
    messages: list[tuple[str, ...]] = [SYSTEM]

    def user(seed: int) -> tuple[str, str]:
        # Long enough for a write after the turn: at least 64 new tokens.
        return ("user", f"{question(seed)} {sentences(3, seed)}")

    def told(reply: Reply, kind: str) -> Reply:
        assert reply.admission == kind, (reply.admission, reply.miss_reason)
        seen[kind] = reply
        return reply

    def said(reply: Reply) -> None:
        messages.append(("assistant", reply.text))

    with server(tmp_path / "banks", "--slots", "3", *FLOAT32) as running:
        async with connect(running.target) as client:
            messages.append(user(1))
            said(told(await client.chat(messages, **OPTIONS), "cold"))
            messages.append(user(2))
            said(told(await client.chat(messages, **OPTIONS), "warm"))
            # A branch while the conversation goes on: its slot is in use, so it is copied.
            long = chat_request(
                [*messages, user(3)],
                **{**OPTIONS, "max_tokens": 200},
                ignore_eos=True,
            )
            call = client.generation.Generate(long)
            trunk = Reply()
            async for response in call:
                collect(trunk, response)
                if trunk.token_ids:
                    break
            fork = told(await client.chat([*messages, user(4)], **OPTIONS), "fork")
            call.cancel()
            assert fork.started.miss_reason == 0
            # An edit of the last message.
            edited = [*messages[:-2], user(9)]
            told(await client.chat(edited, **OPTIONS), "partial_fork")
        counted = admissions(running)
        assert {k: v for k, v in counted.items() if v} == {
            "cold": 1,
            "warm": 2,
            "fork": 1,
            "partial_fork": 1,
        }
        assert running.stop() == 0

    with server(tmp_path / "banks", "--slots", "1", *FLOAT32) as running:
        async with connect(running.target) as client:
            following = [*messages, user(5)]
            told(await client.chat(following, **OPTIONS), "disk")
            # The only slot is the bank's own: cut back in place.
            told(
                await client.chat([*messages, user(6)], **OPTIONS),
                "partial_truncate",
            )
            # Another conversation takes the slot. A changed end of the system prompt: no bank
            # ends where it parts, so one is restored up to there.
            await client.chat([("system", preamble(24, seed=6)), ("user", "Hello?")], **OPTIONS)
            changed = ("system", SYSTEM[1][:-200] + " The rest is up to you.")
            told(await client.chat([changed, user(19)], **OPTIONS), "disk_partial")
        counted = admissions(running)
        assert {k: v for k, v in counted.items() if v} == {
            "disk": 1,
            "partial_truncate": 1,
            "cold": 1,
            "disk_partial": 1,
        }
        assert running.stop() == 0

    async with connect(cold_server.target) as cold:
        judge = Judge(cold, bias=NO_END)
        for kind, reply in seen.items():
            await judge.check(reply, kind)
        judge.finish(at_least=40)


def admissions(running: ServerProcess) -> dict[str, float]:
    prefix = 'ds4grpc_admissions_total{admission="'
    return {
        name.removeprefix(prefix).removesuffix('"}'): value
        for name, value in running.metrics().items()
        if name.startswith(prefix)
    }
