"""`ds4grpc bench`: what a client sees of a running server, as a table and one JSON line.

Suite `turns`: a chat with a long system message, thinking on, whose client replays only the
visible answers. Turn 1 pays for everything, later turns should pay for their new message alone.
"""

from __future__ import annotations

import json
import random
import uuid
from typing import Any

import click
import grpc

from ds4grpc.commands import turn
from ds4grpc.commands.client import connected
from ds4grpc.commands.options import Target, Wish, client_options
from ds4grpc.commands.output import table
from ds4grpc.v1 import generation_pb2 as pb
from ds4grpc.v1 import model_pb2, model_pb2_grpc

SUITES = ("turns",)
NUM_TURNS = 3
# Plain words, about a token each in any vocabulary.
WORDS = (
    *("time", "water", "house", "light", "paper", "story", "music", "garden", "river", "table"),
    *("winter", "bridge", "market", "window", "letter", "number", "forest", "engine", "planet"),
)
COLUMNS = (">TURN", "ADMISSION", ">PROMPT", ">CACHED", ">FIRST TOKEN", ">TOKENS", ">TOKENS/S")


@click.command()
@click.argument("suite", type=click.Choice(SUITES), default="turns")
@click.option(
    "--preamble",
    type=click.IntRange(1, 1_000_000),
    default=6000,
    show_default=True,
    metavar="TOKENS",
    help="About how long the system message is.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    metavar="N",
    help="Most tokens of each reply, reasoning included.",
)
@client_options
def bench(target: Target, suite: str, preamble: int, max_tokens: int) -> None:
    """Measure a running server; the last line is one JSON object.

    Suite turns: a thinking chat of three turns, and how much sooner than in the first turn the
    first token comes in the second. It reuses no bank of anybody else.
    """
    with connected(target) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        model = stub.GetModel(model_pb2.GetModelRequest(), metadata=target.metadata).model
        turns = _turns(channel, target, preamble, max_tokens)
    if not target.as_json:
        table(COLUMNS, [_row(index, one) for index, one in enumerate(turns, 1)])
    facts: dict[str, Any] = {
        "suite": suite,
        "model": model.name,
        "dtype": model.dtype,
        "device": model.device,
        "version": model.server_version,
        "first_token_speedup": round(turns[0].first_seconds / turns[1].first_seconds, 1),
        "turns": [_facts(one) for one in turns],
    }
    click.echo(json.dumps(facts))


def _turns(
    channel: grpc.Channel, target: Target, preamble: int, max_tokens: int
) -> list[turn.Turn]:
    words = random.Random(preamble)
    system = " ".join(words.choice(WORDS) for _ in range(preamble))
    wish = Wish(max_tokens=max_tokens, temperature=0, thinking=True, system=system)
    salt = uuid.uuid4().hex
    messages: list[pb.ChatMessage] = []
    turns = []
    for index in range(NUM_TURNS):
        question = f"Question {index + 1}: what do you think about {words.choice(WORDS)}?"
        messages.append(pb.ChatMessage(role=pb.ROLE_USER, content=question))
        asked = turn.chat_request(wish, messages)
        asked.cache.salt = salt
        done = turn.run(channel, target, asked, lambda event: None)
        messages.append(pb.ChatMessage(role=pb.ROLE_ASSISTANT, content=done.text))
        turns.append(done)
    return turns


def _facts(one: turn.Turn) -> dict[str, Any]:
    return {
        "admission": one.admission,
        "prompt_tokens": one.started.prompt_tokens,
        "cached_tokens": one.started.cached_tokens,
        "suffix_tokens": one.started.suffix_tokens,
        "first_token_seconds": round(one.first_seconds, 4),
        "generated_tokens": one.finished.usage.generated_tokens,
        "tokens_per_second": round(one.tokens_per_second, 1),
    }


def _row(index: int, one: turn.Turn) -> list[str]:
    return [
        str(index),
        one.admission,
        f"{one.started.prompt_tokens:,}",
        f"{one.started.cached_tokens:,}",
        f"{one.first_seconds:.3f} s",
        f"{one.finished.usage.generated_tokens:,}",
        f"{one.tokens_per_second:.1f}",
    ]
