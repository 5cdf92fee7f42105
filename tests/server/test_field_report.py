"""The report that started the project: thinking turns of a long preamble are prefilled once.

One preamble, three turns, three clients: one that replays only the visible answers, one that
replays the reasoning too, one that does not think. The preamble has about 6,000 tokens in
`make test-long`, 2,400 in `make test`: the cold run that they are compared with is a long prefill.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from client import Reply, connect
from process import ServerProcess, server
from rule import Judge
from texts import preamble, question

from ds4grpc.v1 import bank_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG = "DS4GRPC_LONG" in os.environ
PREAMBLE = preamble(368 if LONG else 148, seed=29)
THINKING_TOKENS, MAX_TOKENS = 16, 36
CLIENTS = {
    # thinking, does the client send reasoning back, the key's kind
    "drops reasoning": (True, False, bank_pb2.RECORD_KIND_VISIBLE),
    "keeps reasoning": (True, True, bank_pb2.RECORD_KIND_RAW),
    "does not think": (False, False, bank_pb2.RECORD_KIND_RAW),
}


@pytest.fixture(scope="module")
def warm_server(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with server(tmp_path_factory.mktemp("field"), "--dtype", "float32") as running:
        yield running


@pytest.mark.parametrize("kind_of_client", CLIENTS)
async def test_b06_later_turns_pay_only_for_the_new_message(
    kind_of_client: str, warm_server: ServerProcess, cold_server: ServerProcess
) -> None:
    thinking, keeps, key_kind = CLIENTS[kind_of_client]
    messages: list[tuple[str, ...]] = [("system", PREAMBLE)]
    turns: list[Reply] = []
    async with connect(warm_server.target) as client, connect(cold_server.target) as cold:
        assert len(await client.encode(PREAMBLE)) > (5500 if LONG else 2200)
        for turn in range(3):
            new = question(100 * turn + len(kind_of_client))
            messages.append(("user", new))
            reply = await client.chat(
                messages,
                thinking=thinking,
                replay="keep" if keeps else "drop",
                thinking_tokens=THINKING_TOKENS if thinking else None,
                max_tokens=MAX_TOKENS,
            )
            turns.append(reply)
            assert thinking or not reply.reasoning
            assert reply.text.strip()
            messages.append(("assistant", reply.text, *([reply.reasoning] if keeps else [])))
            if turn == 0:
                continue
            assert reply.admission in ("warm", "fork")
            assert reply.computed <= len(await client.encode(new)) + 20
            usage = reply.finished.usage
            assert usage.cached_tokens >= usage.prompt_tokens - reply.computed

            bank = await client.bank(reply.finished.bank_id)
            newest = bank.records[0]
            # There may be no reasoning to keep: what hides then is an empty block.
            empty = keeps and not reply.reasoning
            assert newest.kind == (bank_pb2.RECORD_KIND_VISIBLE if empty else key_kind)
            if key_kind == bank_pb2.RECORD_KIND_VISIBLE:
                assert bank.frontier > newest.key_tokens
                assert bank.hidden_tokens > 0
        assert any(reply.reasoning for reply in turns) == thinking
        # What the last turn computed on all that was kept equals a cold run of the same ids. A
        # cold run is a long prefill, so the small count has one.
        if LONG or kind_of_client == "drops reasoning":
            judge = Judge(cold)
            await judge.check(turns[-1], kind_of_client, answer=LONG)
            judge.finish()
