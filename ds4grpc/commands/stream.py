"""Prints a stream's events as they come: the answer plain, reasoning dimmed, calls marked."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

import click

from ds4grpc.commands.output import json_line, printable
from ds4grpc.v1 import generation_pb2 as pb


class Printer:
    """Writes to stdout; reasoning only on a terminal, so that a pipe gets the answer alone.

    Leaving it (`with`) ends the line that is open.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._on_terminal = sys.stdout.isatty()
        self._channel = pb.CHANNEL_UNSPECIFIED
        self._at_line_start = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_line()

    def show(self, event: pb.GenerateResponse) -> None:
        """Prints a delta's text, or as JSON any event."""
        if self._as_json:
            json_line(event)
        elif event.WhichOneof("event") == "delta":
            self._write(event.delta)

    def _write(self, delta: pb.GenerationDelta) -> None:
        text = delta.text
        if delta.channel == pb.CHANNEL_TOOL_CALL:
            name = f"\n{delta.tool_call.name} " if delta.tool_call.name else ""
            text = name + delta.tool_call.arguments_json
        if delta.channel == pb.CHANNEL_REASONING and not self._on_terminal:
            return
        if self._channel == pb.CHANNEL_REASONING and delta.channel != self._channel:
            # The template's white space after reasoning is the answer's beginning.
            self._end_line()
            text = text.lstrip("\n")
        if not text:
            return
        self._channel = delta.channel
        shown = printable(text)
        if delta.channel != pb.CHANNEL_TEXT:
            shown = click.style(shown, dim=True)
        click.echo(shown, nl=False)
        self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            click.echo()
        self._at_line_start = True
