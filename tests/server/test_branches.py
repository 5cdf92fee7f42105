"""Thinking on, reasoning dropped: conversations that go back, branch, shrink and overflow.

Each is reused up to its waypoint (and past it, as far as tokens agree) and equals a cold run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client import Client, Reply, connect
from process import ServerProcess, server
from rule import Judge
from texts import preamble, question

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Without its end marker the model always has something to say.
NO_END = {2: -100.0}
THINKING = {
    **{"thinking": True, "thinking_tokens": 8, "replay": "drop", "max_tokens": 18},
    "bias": NO_END,
}
Messages = list[tuple[str, ...]]


@pytest.fixture(scope="module")
def warm_server(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    options = ("--dtype", "float32", "--slots", "6", "--kv-cache-min-tokens", "64")
    with server(tmp_path_factory.mktemp("branches"), *options) as running:
        yield running


async def turns(client: Client, count: int, seed: int) -> tuple[Messages, list[Reply]]:
    messages: Messages = [("system", preamble(8, seed=seed))]
    replies = []
    for turn in range(count):
        messages.append(("user", question(10 * seed + turn)))
        reply = await client.chat(messages, **THINKING)
        messages.append(("assistant", reply.text))
        replies.append(reply)
    return messages, replies


def frontier_of(reply: Reply) -> int:
    """Tokens of the bank when the reply's prompt had been prefilled."""
    return reply.started.pos_base + reply.started.suffix_tokens


async def checked(cold_server: ServerProcess, reply: Reply, what: str, at_least: int = 1) -> None:
    async with connect(cold_server.target) as cold:
        judge = Judge(cold, bias=NO_END)
        await judge.check(reply, what)
        judge.finish(at_least)


async def test_regenerate_recomputes_one_token(
    warm_server: ServerProcess, cold_server: ServerProcess
) -> None:
    async with connect(warm_server.target) as client:
        messages, replies = await turns(client, 3, seed=1)
        again = await client.chat(messages[:-1], **THINKING)
    assert again.started.pos_base == frontier_of(replies[2]) - 1
    assert again.computed == 1
    assert again.started.hidden_tokens > 0
    assert again.token_ids == replies[2].token_ids
    await checked(cold_server, again, "regenerate")


async def test_edited_last_message_keeps_all_before_it(
    warm_server: ServerProcess, cold_server: ServerProcess
) -> None:
    async with connect(warm_server.target) as client:
        messages, replies = await turns(client, 3, seed=2)
        edited = await client.chat([*messages[:-2], ("user", "Something else?")], **THINKING)
    assert replies[2].admission == "warm"  # so it started at the end of the second turn
    assert edited.started.pos_base >= replies[2].started.pos_base
    await checked(cold_server, edited, "edit")


async def test_two_branches_share_their_trunk(
    warm_server: ServerProcess, cold_server: ServerProcess
) -> None:
    async with connect(warm_server.target) as client:
        messages, replies = await turns(client, 2, seed=3)
        trunk = (await client.bank(replies[1].finished.bank_id)).frontier
        left = await client.chat([*messages, ("user", "Go left.")], **THINKING)
        right = await client.chat([*messages, ("user", "And right?")], **THINKING)
        again = await client.chat(
            [*messages, ("user", "Go left."), ("assistant", left.text), ("user", "On?")],
            **THINKING,
        )
    for branch in (left, right):
        assert branch.started.pos_base >= trunk
    # Its slot may have been cut back for the other branch: then it comes from disk.
    assert again.admission in ("warm", "fork", "disk")
    assert again.started.pos_base > trunk
    await checked(cold_server, right, "right branch")
    await checked(cold_server, again, "left branch's next turn")


async def test_shorter_prompt_is_cut_back_to_its_turn(
    warm_server: ServerProcess, cold_server: ServerProcess
) -> None:
    async with connect(warm_server.target) as client:
        messages, replies = await turns(client, 3, seed=4)
        shorter = await client.chat(messages[:4], **THINKING)
        first = await client.chat(messages[:2], **THINKING)
    assert messages[3][0] == "user"
    assert shorter.started.pos_base == frontier_of(replies[1]) - 1
    assert first.started.pos_base == frontier_of(replies[0]) - 1
    await checked(cold_server, shorter, "shorter")
    await checked(cold_server, first, "first turn")


async def test_hidden_reasoning_never_overflows_the_context(
    smollm2_path: Path, tmp_path: Path, cold_server: ServerProcess
) -> None:
    # The reply is capped so that the visible conversation fits where the bank does not.
    long_thoughts = {**THINKING, "thinking_tokens": 36, "max_tokens": 46}
    options = ("--dtype", "float32", "--max-context", "384", "--kv-cache-min-tokens", "64")
    with server(tmp_path, *options) as running:
        async with connect(running.target) as client:
            messages: Messages = [("system", preamble(6, seed=5))]
            replies = []
            for turn in range(3):
                messages.append(("user", question(50 + turn)))
                reply = await client.chat(messages, **long_thoughts)
                messages.append(("assistant", reply.text))
                replies.append(reply)
            messages.append(("user", question(59)))
            rendered = await client.render(messages, thinking=True, replay="drop")
            hidden = frontier_of(replies[2]) - replies[2].started.prompt_tokens
            room = 384 - rendered.prompt_tokens - hidden
            assert room > 4, "the conversation is too long for this test"
            last = await client.chat(messages, **{**THINKING, "max_tokens": room + 20})
    assert last.miss_reason == "hidden_overflow"
    assert last.started.hidden_tokens < hidden
    assert last.started.pos_base > replies[0].started.prompt_tokens
    used = last.started.pos_base + last.started.suffix_tokens + room + 20
    assert used <= 384
    assert last.finish_reason != "length" or last.finished.usage.generated_tokens == room + 20
    await checked(cold_server, last, "overflow")


async def test_prompt_of_the_whole_context_is_answered_once(
    smollm2_path: Path, tmp_path: Path
) -> None:
    options = ("--max-context", "128", "--no-kv-disk")
    with server(tmp_path, *options) as running:
        async with connect(running.target) as client:
            ids = await client.encode(preamble(20, seed=6))
            full = await client.tokens(ids[:128], max_tokens=5, ignore_eos=True)
            assert full.finish_reason == "length"
            assert full.finished.usage.generated_tokens == 1
            almost = await client.tokens(ids[:120], ignore_eos=True)
            assert almost.finished.usage.generated_tokens == 9
