"""What the commands of `ds4grpc banks` share: the service, its lists, full ids, one report a bank.

Knows no command. Main thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ds4grpc.commands.client import connected
from ds4grpc.commands.options import Target
from ds4grpc.commands.output import json_line, printable
from ds4grpc.v1 import bank_pb2 as pb
from ds4grpc.v1 import bank_pb2_grpc

# Of ListBanksRequest, which allows 1,000; smaller pages show the first rows sooner.
PAGE_SIZE = 200
ID_DIGITS = 32

bank_ids_argument = click.argument("bank_ids", nargs=-1, required=True, metavar="BANK_ID...")


@contextmanager
def service(target: Target) -> Iterator[bank_pb2_grpc.BankServiceStub]:
    """The target's BankService."""
    with connected(target) as channel:
        yield bank_pb2_grpc.BankServiceStub(channel)


def listed(
    stub: bank_pb2_grpc.BankServiceStub,
    target: Target,
    terms: str,
    order_by: str = "",
    limit: int | None = None,
) -> tuple[list[pb.Bank], int]:
    """The first `limit` banks (None: all) that match, page by page, and how many there are."""
    found: list[pb.Bank] = []
    page = pb.ListBanksResponse()
    while limit is None or len(found) < limit:
        request = pb.ListBanksRequest(
            page_size=PAGE_SIZE if limit is None else min(PAGE_SIZE, limit - len(found)),
            page_token=page.next_page_token,
            filter=terms,
            order_by=order_by,
        )
        page = stub.ListBanks(request, metadata=target.metadata)
        found += page.banks
        if not page.next_page_token:
            break
    return found, page.total_size


def full_ids(
    stub: bank_pb2_grpc.BankServiceStub, target: Target, bank_ids: tuple[str, ...]
) -> list[str]:
    """Unique beginnings of ids made whole."""
    return [
        bank_id
        if len(bank_id) == ID_DIGITS
        else stub.GetBank(pb.GetBankRequest(bank_id=bank_id), metadata=target.metadata).bank.bank_id
        for bank_id in bank_ids
    ]


def report(target: Target, message: Any, text: str, **more: Any) -> None:
    """One line: the message as JSON when that is asked for, else the text."""
    if target.as_json:
        json_line(message, **more)
    else:
        click.echo(printable(text))
