"""`ds4grpc chat`: a conversation in the terminal, replaying only the visible answers."""

from __future__ import annotations

import sys
from typing import Any

import click
import grpc

from ds4grpc.commands import turn
from ds4grpc.commands.client import CallFailed, connected
from ds4grpc.commands.options import Target, Wish, client_options, generation_options
from ds4grpc.commands.stream import Printer
from ds4grpc.v1 import generation_pb2 as pb


@click.command()
@generation_options
@client_options
def chat(target: Target, **wishes: Any) -> None:
    """Talk to the model. /quit or Ctrl-D ends; Ctrl-C ends the reply that is running.

    Reasoning is shown dimmed and never sent back. After each turn a line says how it started, how
    much of the prompt was cached and when the first token came. Lines from a pipe are turns too.
    """
    wish = Wish(**wishes)
    messages: list[pb.ChatMessage] = []
    interactive = sys.stdin.isatty()
    while (said := _next_line(interactive=interactive)) is not None:
        if not said.strip():
            continue
        try:
            with connected(target) as channel:
                _take_turn(channel, target, wish, messages, said)
        except CallFailed as failure:
            if not interactive:
                raise
            # The message is not kept, or the next one would fail for the same reason.
            failure.show()


def _next_line(*, interactive: bool) -> str | None:
    """What the user says next; None at the end. Ctrl-C at the prompt drops the line."""
    if interactive:
        import readline  # noqa: F401  (gives input() line editing and history)
    while True:
        try:
            said = input("› " if interactive else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            click.echo("\n/quit or Ctrl-D ends the chat")
            continue
        return None if said.strip() == "/quit" else said


def _take_turn(
    channel: grpc.Channel, target: Target, wish: Wish, messages: list[pb.ChatMessage], said: str
) -> None:
    """Sends the conversation and `said`; keeps both it and the visible answer."""
    user = pb.ChatMessage(role=pb.ROLE_USER, content=said)
    asked = turn.chat_request(wish, [*messages, user])
    with Printer(as_json=target.as_json) as printer:
        done = turn.run(channel, target, asked, printer.show)
    messages += [user, pb.ChatMessage(role=pb.ROLE_ASSISTANT, content=done.text)]
    if not target.as_json:
        click.echo(click.style(done.summary(), dim=True))
