"""Options that several client commands share, and the value that they become: `Target`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import click

from ds4grpc.config import Address
from ds4grpc.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class AddressType(click.ParamType[Any]):
    """`host:port`."""

    name = "address"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Address:
        if isinstance(value, Address):
            return value
        try:
            return Address.parse(value)
        except ConfigError as error:
            self.fail(error.message, param, ctx)


@dataclass(frozen=True, slots=True)
class Target:
    """The server that a command talks to, who calls, and how output looks."""

    address: Address
    tenant: str = ""
    as_json: bool = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries."""
        return (("ds4grpc-tenant", self.tenant),) if self.tenant else ()


def client_options(command: Callable[..., R]) -> Callable[..., R]:
    """Adds --server, --tenant and --json; the command gets a `Target` first."""

    @click.option(
        "--server",
        type=AddressType(),
        default="127.0.0.1:50051",
        envvar="DS4GRPC_SERVER",
        show_envvar=True,
        show_default=True,
        metavar="ADDRESS",
        help="The server to talk to.",
    )
    @click.option(
        "--tenant",
        default="",
        envvar="DS4GRPC_TENANT",
        show_envvar=True,
        metavar="NAME",
        help="Whose banks to use and see.",
    )
    @click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
    @functools.wraps(command)
    def wrapped(server: Address, tenant: str, as_json: bool, **values: Any) -> R:
        return command(Target(server, tenant, as_json), **values)

    return wrapped


SAMPLING = (
    click.option(
        "--max-tokens",
        type=click.IntRange(0, 2**32 - 1),
        metavar="N",
        help="Most tokens to sample, reasoning included.  [default: what the context has room for]",
    ),
    click.option(
        "--temperature",
        type=float,
        metavar="T",
        help="0 takes the likeliest token.  [default: the model's]",
    ),
    click.option("--top-p", type=float, metavar="P", help="Keep the likeliest tokens up to P."),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**64 - 1),
        metavar="N",
        help="The same seed gives the same text.",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT; repeatable."),
    click.option(
        "--thinking/--no-thinking",
        default=None,
        help="Reason before the answer.  [default: the chat template's]",
    ),
    click.option("--system", default="", metavar="TEXT", help="System message."),
    click.option("--exact", is_flag=True, help="Reuse only what a cold run would compute."),
)


def generation_options(command: Callable[P, R]) -> Callable[P, R]:
    """Adds the options of `Wish`; the command gets them by name."""
    for add in reversed(SAMPLING):
        command = add(command)
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How a reply is to be made, as the command line says it; None leaves it to the server."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    system: str = ""
    exact: bool = False
