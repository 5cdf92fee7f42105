"""The `ds4grpc` program: one group whose commands live in `ds4grpc.commands`, a file each.

Imports click and the options only, and loads a command's file when that command is asked for, so
that `ds4grpc --help` is instant. Main thread.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import click

from ds4grpc import __version__
from ds4grpc.config import check_environment
from ds4grpc.errors import ConfigError, Ds4grpcError

# Each is the attribute of its name in `ds4grpc.commands.<name>`.
COMMANDS = {
    "serve": "Serve a model over gRPC.",
    "generate": "Print the reply to one prompt.",
    "chat": "Talk to the model.",
    "ps": "List running, queued and recent generations.",
    "banks": "Show, keep, check and delete banks.",
    "models": "Fetch, list and remove models; show the served one.",
    "catalog": "Look after the catalogs of stored banks.",
    "bench": "Measure a running server.",
}


class Program(click.Group):
    """A group of `COMMANDS` that shows errors of our tree instead of their tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"ds4grpc.commands.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            check_environment(os.environ)
            return super().invoke(ctx)
        except Ds4grpcError as error:
            click.echo(click.style("error: ", fg="red", bold=True) + error.message, err=True)
            # 2 is what click exits with for a wrong option.
            ctx.exit(2 if isinstance(error, ConfigError) else 1)


@click.group(
    cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, message="ds4grpc %(version)s")
def main() -> None:
    """An LLM inference server over gRPC whose conversations are prefilled once."""
