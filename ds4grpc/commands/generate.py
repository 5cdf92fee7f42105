"""`ds4grpc generate`: one reply to one prompt."""

from __future__ import annotations

import sys
from typing import Any

import click

from ds4grpc.commands import turn
from ds4grpc.commands.client import connected
from ds4grpc.commands.options import Target, Wish, client_options, generation_options
from ds4grpc.commands.stream import Printer
from ds4grpc.v1 import generation_pb2 as pb


@click.command()
@click.argument("prompt")
@click.option(
    "--chat/--raw",
    default=True,
    help="Take PROMPT as a user's message, or continue it as plain text.  [default: --chat]",
)
@generation_options
@client_options
def generate(target: Target, prompt: str, chat: bool, **wishes: Any) -> None:
    """Print the reply to PROMPT, or to standard input when PROMPT is -.

    On a terminal reasoning is shown dimmed and a status line follows; piped, only the answer is
    printed.
    """
    wish = Wish(**wishes)
    text = sys.stdin.read() if prompt == "-" else prompt
    if chat:
        asked = turn.chat_request(wish, [pb.ChatMessage(role=pb.ROLE_USER, content=text)])
    elif wish.system or wish.thinking is not None:
        raise click.UsageError("--system and --thinking need a chat; they do not go with --raw")
    else:
        asked = turn.request(wish)
        asked.prompt = text
    with connected(target) as channel, Printer(as_json=target.as_json) as printer:
        done = turn.run(channel, target, asked, printer.show)
    if not target.as_json and sys.stderr.isatty():
        click.echo(click.style(done.summary(), dim=True), err=True)
