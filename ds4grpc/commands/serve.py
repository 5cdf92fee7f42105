"""`ds4grpc serve`: its options are the fields of ServeConfig, nothing is listed twice."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import click

from ds4grpc.commands.options import AddressType
from ds4grpc.config import Address, ServeConfig, flag, spec, variable

TYPES: dict[str, click.ParamType[Any]] = {
    "str": click.STRING,
    "int": click.INT,
    "float": click.FLOAT,
    "Path": click.Path(path_type=Path),
    "Address": AddressType(),
}


def _option(item: dataclasses.Field[Any]) -> click.Option:
    limits, default = spec(item), item.default
    shown = default is not None and not isinstance(default, bool)
    facts: dict[str, Any] = {
        "help": limits.text,
        "envvar": variable(item.name),
        "show_envvar": True,
        "default": str(default) if isinstance(default, Address) else default,
        "show_default": shown,
    }
    if item.type == "bool":
        facts["is_flag"] = True
    elif limits.choices:
        facts["type"] = click.Choice(limits.choices)
    else:
        facts["type"] = TYPES[str(item.type).removesuffix(" | None")]
        facts["metavar"] = limits.metavar
    return click.Option([flag(item.name)], **facts)


def _run(**values: Any) -> None:
    config = ServeConfig(**values)
    # Idle OpenMP threads that spin take the cores from everything else in this process and on
    # this machine. libgomp reads this once: when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from ds4grpc import server

    raise SystemExit(server.run(config))


serve = click.Command(
    "serve",
    help="Serve a model over gRPC until SIGTERM or Ctrl-C; a second one stops at once.",
    params=[_option(item) for item in dataclasses.fields(ServeConfig)],
    callback=_run,
)
