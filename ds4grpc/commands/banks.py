"""`ds4grpc banks`: the banks of a running server, shown and kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ds4grpc.commands.client import connected
from ds4grpc.commands.options import Target, client_options
from ds4grpc.commands.output import age, json_line, printable, size, table, word
from ds4grpc.v1 import bank_pb2 as pb
from ds4grpc.v1 import bank_pb2_grpc

# Of ListBanksRequest, which allows 1,000; smaller pages show the first rows sooner.
PAGE_SIZE = 200
COLUMNS = (
    *("BANK", "WHERE", ">SLOT", ">TOKENS", ">BASE", ">SIZE", "KEYS", "TRUST"),
    *(">HITS", ">USED", "PIN"),
)

bank_ids_argument = click.argument("bank_ids", nargs=-1, required=True, metavar="BANK_ID...")


@click.group()
def banks() -> None:
    """Show, keep, check and delete banks.

    Where a BANK_ID is asked for, a unique beginning of at least 6 digits is enough.
    """


@banks.command("ls")
@click.option("--filter", "terms", default="", metavar="TERMS", help="Such as 'frontier >= 1000'.")
@click.option("--order-by", default="", metavar="FIELD", help="Such as 'size_bytes desc'.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Most rows.")
@client_options
def list_banks(target: Target, terms: str, order_by: str, limit: int) -> None:
    """List banks, the last used first.

    TERMS are joined by AND: location = stored, frontier >= 1000, size_bytes > 1048576,
    pinned = true, trust = proven, hits >= 1.
    """
    found: list[pb.Bank] = []
    page = pb.ListBanksResponse()
    with service(target) as stub:
        while len(found) < limit:
            request = pb.ListBanksRequest(
                page_size=min(PAGE_SIZE, limit - len(found)),
                page_token=page.next_page_token,
                filter=terms,
                order_by=order_by,
            )
            page = stub.ListBanks(request, metadata=target.metadata)
            found += page.banks
            if not page.next_page_token:
                break
        storage = stub.GetStorage(pb.GetStorageRequest(), metadata=target.metadata)
    if target.as_json:
        for bank in found:
            json_line(bank)
        return
    table(COLUMNS, [_row(bank) for bank in found])
    if sys.stdout.isatty():
        click.echo(click.style(_totals(len(found), page.total_size, storage), dim=True))


@banks.command("show")
@click.argument("bank_id")
@click.option("--key", "with_key", is_flag=True, help="Print the text of each key.")
@client_options
def show(target: Target, bank_id: str, with_key: bool) -> None:
    """Show one bank and its records."""
    with service(target) as stub:
        request = pb.GetBankRequest(bank_id=bank_id, include_key_text=with_key)
        bank = stub.GetBank(request, metadata=target.metadata).bank
    if target.as_json:
        json_line(bank)
        return
    where = word(pb.BankLocation.Name(bank.location), "BANK_LOCATION_")
    facts = {
        "bank": bank.bank_id,
        "where": f"{where}, slot {bank.slot}" if bank.HasField("slot") else where,
        "frontier": f"{bank.frontier:,} tokens, {bank.hidden_tokens:,} of hidden reasoning",
        "trust": _trust(bank),
        "pinned": "yes" if bank.pinned else "no",
        "hits": f"{bank.hits:,}",
        "last use": age(bank.last_use_time),
        "created": age(bank.create_time),
        "verified": age(bank.verify_time),
        "written": bank.persist_reason or "no",
        "file": f"{size(bank.size_bytes)}, tokens {bank.base:,} to {bank.frontier:,}"
        if bank.size_bytes
        else "none",
        "parent": bank.parent_bank_id or "none",
    }
    for name, value in facts.items():
        click.echo(f"{name:<9} {printable(value)}")
    for index, record in enumerate(bank.records):
        kind = word(pb.RecordKind.Name(record.kind), "RECORD_KIND_")
        click.echo(
            f"record {index}: key kind {kind}, {record.key_tokens:,} tokens,"
            f" {record.key_bytes:,} bytes, renderer {record.renderer[:12]}"
        )
        marks = ", ".join(f"{w.key_offset_bytes}→{w.token_position}" for w in record.waypoints)
        click.echo(f"  waypoints (key byte → token): {marks or 'none'}")
        if with_key:
            click.echo(printable(record.key_text))


@banks.command("pin")
@bank_ids_argument
@client_options
def pin(target: Target, bank_ids: tuple[str, ...]) -> None:
    """Keep stored banks from eviction."""
    with service(target) as stub:
        for bank_id in _full_ids(stub, target, bank_ids):
            reply = stub.PinBank(pb.PinBankRequest(bank_id=bank_id), metadata=target.metadata)
            _report(target, reply.bank, f"pinned {bank_id}")


@banks.command("unpin")
@bank_ids_argument
@client_options
def unpin(target: Target, bank_ids: tuple[str, ...]) -> None:
    """Allow the eviction of banks again."""
    with service(target) as stub:
        for bank_id in _full_ids(stub, target, bank_ids):
            reply = stub.UnpinBank(pb.UnpinBankRequest(bank_id=bank_id), metadata=target.metadata)
            _report(target, reply.bank, f"unpinned {bank_id}")


@banks.command("rm")
@bank_ids_argument
@client_options
def remove(target: Target, bank_ids: tuple[str, ...]) -> None:
    """Delete banks; pinned ones are refused."""
    with service(target) as stub:
        for bank_id in _full_ids(stub, target, bank_ids):
            request = pb.DeleteBankRequest(bank_id=bank_id)
            reply = stub.DeleteBank(request, metadata=target.metadata)
            done = (
                f"hid {bank_id}: other banks still need its rows"
                if reply.hidden
                else f"deleted {bank_id}: {size(reply.freed_bytes)} free again"
            )
            _report(target, reply, done, bank_id=bank_id)


@banks.command("verify")
@click.argument("bank_ids", nargs=-1, metavar="[BANK_ID]...")
@client_options
def verify(target: Target, bank_ids: tuple[str, ...]) -> None:
    """Read stored banks whole and check them; exit code 1 when one is damaged."""
    num_done = num_bad = num_bytes = 0
    with service(target) as stub:
        request = pb.VerifyBanksRequest(bank_ids=_full_ids(stub, target, bank_ids))
        for verdict in stub.VerifyBanks(request, metadata=target.metadata):
            num_done += 1
            num_bad += not verdict.ok
            num_bytes += verdict.read_bytes
            state = "ok" if verdict.ok else f"quarantined: {verdict.detail}"
            progress = f"{verdict.done}/{verdict.total}"
            _report(target, verdict, f"{progress} {verdict.bank_id} {state}")
    if not target.as_json:
        click.echo(f"{num_done:,} banks, {size(num_bytes)} read, {num_bad:,} damaged")
    if num_bad:
        raise SystemExit(1)


@banks.command("flush")
@client_options
def flush(target: Target) -> None:
    """Write what resident banks hold and files do not."""
    with service(target) as stub:
        for written in stub.FlushBanks(pb.FlushBanksRequest(), metadata=target.metadata):
            wrote = written.detail or f"{size(written.written_bytes)} written"
            _report(target, written, f"{written.bank_id} {written.frontier:,} tokens: {wrote}")


@banks.command("rescan")
@client_options
def rescan(target: Target) -> None:
    """Read the folder again: adopt files without rows, drop rows without files."""
    with service(target) as stub:
        found = stub.RescanBanks(pb.RescanBanksRequest(), metadata=target.metadata)
    seconds = found.duration.ToNanoseconds() / 1e9
    _report(
        target,
        found,
        f"{found.num_banks:,} banks: {found.num_adopted:,} adopted, {found.num_dropped:,} dropped,"
        f" {found.num_quarantined:,} quarantined, in {seconds:.2f} s",
    )


@contextmanager
def service(target: Target) -> Iterator[bank_pb2_grpc.BankServiceStub]:
    """The target's BankService."""
    with connected(target) as channel:
        yield bank_pb2_grpc.BankServiceStub(channel)


def _full_ids(
    stub: bank_pb2_grpc.BankServiceStub, target: Target, bank_ids: tuple[str, ...]
) -> list[str]:
    return [
        bank_id
        if len(bank_id) == 32
        else stub.GetBank(pb.GetBankRequest(bank_id=bank_id), metadata=target.metadata).bank.bank_id
        for bank_id in bank_ids
    ]


def _report(target: Target, message: Any, text: str, **more: str) -> None:
    if target.as_json:
        json_line(message, **more)
    else:
        click.echo(printable(text))


def _row(bank: pb.Bank) -> list[str]:
    kinds = dict.fromkeys(word(pb.RecordKind.Name(k), "RECORD_KIND_") for k in bank.record_kinds)
    return [
        bank.bank_id[:12],
        word(pb.BankLocation.Name(bank.location), "BANK_LOCATION_"),
        str(bank.slot) if bank.HasField("slot") else "-",
        f"{bank.frontier:,}",
        f"{bank.base:,}",
        size(bank.size_bytes) if bank.size_bytes else "-",
        ",".join(kinds) or "-",
        _trust(bank),
        str(bank.hits),
        age(bank.last_use_time),
        "pinned" if bank.pinned else "",
    ]


def _trust(bank: pb.Bank) -> str:
    flags = [word(pb.TrustFlag.Name(flag), "TRUST_FLAG_") for flag in bank.trust]
    return ",".join(flags) or "none"


def _totals(num_shown: int, num_all: int, storage: pb.GetStorageResponse) -> str:
    disk = "off"
    if storage.enabled:
        disk = f"{size(storage.disk_bytes)} of {size(storage.quota_bytes)} in {storage.folder}"
    memory = f"{size(storage.kv_memory_bytes)} of {size(storage.kv_memory_quota_bytes)}"
    return f"{num_shown:,} of {num_all:,} banks · memory {memory} · disk {disk}"
