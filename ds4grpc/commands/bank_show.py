"""`ds4grpc banks show`: one bank, its file, its chain, its records."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ds4grpc.commands.bank_calls import service
from ds4grpc.commands.options import Target, client_options
from ds4grpc.commands.output import age, json_line, printable, size, table, word
from ds4grpc.v1 import bank_pb2 as pb

CHAIN_COLUMNS = ("CHAIN", ">BASE", ">TOKENS", ">SIZE", "HIDDEN")


@click.command("show")
@click.argument("bank_id")
@click.option("--keys", "--key", "with_keys", is_flag=True, help="Print the text of each key.")
@client_options
def show(target: Target, bank_id: str, with_keys: bool) -> None:
    """Show one bank: its file, the chain of files that hold its rows, its records.

    Key texts are prompts and replies in clear; they are printed on request only.
    """
    with service(target) as stub:
        request = pb.GetBankRequest(bank_id=bank_id, include_key_text=with_keys)
        bank = stub.GetBank(request, metadata=target.metadata).bank
    if target.as_json:
        json_line(bank)
        return
    for name, value in _facts(bank):
        click.echo(f"{name:<9} {printable(value)}")
    if bank.chain:
        table(CHAIN_COLUMNS, [_link_row(link) for link in bank.chain])
    for index, record in enumerate(bank.records):
        _show_record(index, record, with_keys)


def trust(bank: pb.Bank) -> str:
    """The names of its flags."""
    flags = [word(pb.TrustFlag.Name(flag), "TRUST_FLAG_") for flag in bank.trust]
    return ",".join(flags) or "none"


def _facts(bank: pb.Bank) -> Iterator[tuple[str, str]]:
    where = word(pb.BankLocation.Name(bank.location), "BANK_LOCATION_")
    yield "bank", bank.bank_id
    yield "where", f"{where}, slot {bank.slot}" if bank.HasField("slot") else where
    yield "frontier", f"{bank.frontier:,} tokens, {bank.hidden_tokens:,} of hidden reasoning"
    yield "trust", trust(bank)
    yield "pinned", "yes" if bank.pinned else "no"
    yield "hits", f"{bank.hits:,}"
    yield "last use", age(bank.last_use_time)
    yield "created", age(bank.create_time)
    yield "verified", age(bank.verify_time)
    yield "written", bank.persist_reason or "no"
    yield "parent", bank.parent_bank_id or "none"
    if not bank.size_bytes:
        yield "file", "none"
        return
    yield "file", f"{size(bank.size_bytes)}, tokens {bank.base:,} to {bank.frontier:,}"
    file = bank.file
    yield "format", f"version {file.format_version}, checksum {file.checksum} of each block"
    yield "model", file.fingerprint
    yield "layout", f"{file.layout_id}, dtype {file.dtype}"
    if file.head:
        yield "head", f"{file.head:,} tokens"
    if file.HasField("ttl"):
        yield "ttl", f"{file.ttl.ToNanoseconds() / 1e9:g} s after its last use"
    parts = [f"{part.name} {size(part.size_bytes)}" for part in file.sections if not _is_rows(part)]
    rows = [part.size_bytes for part in file.sections if _is_rows(part)]
    yield "sections", ", ".join([*parts, f"rows {size(sum(rows))} in {len(rows)} arrays"])


def _is_rows(part: pb.BankSection) -> bool:
    return part.name.startswith("rows/")


def _link_row(link: pb.BankLink) -> tuple[str, ...]:
    return (
        link.bank_id,
        f"{link.base:,}",
        f"{link.frontier:,}",
        size(link.size_bytes),
        "hidden" if link.hidden else "",
    )


def _show_record(index: int, record: pb.BankRecord, with_keys: bool) -> None:
    kind = word(pb.RecordKind.Name(record.kind), "RECORD_KIND_")
    click.echo(
        f"record {index}: key kind {kind}, {record.key_tokens:,} tokens,"
        f" {record.key_bytes:,} bytes, renderer {record.renderer[:12]}"
    )
    marks = ", ".join(f"{w.key_offset_bytes}→{w.token_position}" for w in record.waypoints)
    click.echo(f"  waypoints (key byte → token): {marks or 'none'}")
    if with_keys:
        click.echo(printable(record.key_text))
