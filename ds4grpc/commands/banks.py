"""`ds4grpc banks`: the banks of a running server, shown and kept."""

from __future__ import annotations

import sys

import click

from ds4grpc.commands.bank_calls import bank_ids_argument, full_ids, listed, report, service
from ds4grpc.commands.bank_files import export, take
from ds4grpc.commands.bank_removal import collect, remove
from ds4grpc.commands.bank_show import show, trust
from ds4grpc.commands.bank_verify import verify
from ds4grpc.commands.options import Target, client_options
from ds4grpc.commands.output import age, json_line, size, table, word
from ds4grpc.v1 import bank_pb2 as pb

COLUMNS = (
    *("BANK", "WHERE", ">SLOT", ">TOKENS", ">BASE", ">SIZE", "KEYS", "TRUST"),
    *(">HITS", ">USED", "PIN"),
)


@click.group()
def banks() -> None:
    """Show, keep, check and delete banks.

    Where a BANK_ID is asked for, a unique beginning of at least 6 digits is enough.
    """


for _command in (show, remove, verify, collect, export, take):
    banks.add_command(_command)


@banks.command("ls")
@click.option("--filter", "terms", default="", metavar="TERMS", help="Such as 'frontier >= 1000'.")
@click.option(
    "--sort", "--order-by", "order_by", default="", metavar="FIELD", help="Such as 'hits desc'."
)
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Most rows.")
@client_options
def list_banks(target: Target, terms: str, order_by: str, limit: int) -> None:
    """List banks, the last used first.

    TERMS are joined by AND: location = stored, frontier >= 1000, base = 0, size_bytes > 1048576,
    hits >= 1, pinned = true, trust = proven, idle > 2h (since the last use), age < 7d (since its
    creation), or create_time and last_use_time with a time such as 2026-12-01T08:00:00Z. FIELD is
    last_use_time, create_time, frontier, size_bytes, hits or bank_id, with desc to turn it round.
    """
    with service(target) as stub:
        found, total = listed(stub, target, terms, order_by, limit)
        storage = stub.GetStorage(pb.GetStorageRequest(), metadata=target.metadata)
    if target.as_json:
        for bank in found:
            json_line(bank)
        return
    table(COLUMNS, [_row(bank) for bank in found])
    if sys.stdout.isatty():
        click.echo(click.style(_totals(len(found), total, storage), dim=True))


@banks.command("pin")
@bank_ids_argument
@client_options
def pin(target: Target, bank_ids: tuple[str, ...]) -> None:
    """Keep stored banks from eviction."""
    with service(target) as stub:
        for bank_id in full_ids(stub, target, bank_ids):
            reply = stub.PinBank(pb.PinBankRequest(bank_id=bank_id), metadata=target.metadata)
            report(target, reply.bank, f"pinned {bank_id}")


@banks.command("unpin")
@bank_ids_argument
@client_options
def unpin(target: Target, bank_ids: tuple[str, ...]) -> None:
    """Allow the eviction of banks again."""
    with service(target) as stub:
        for bank_id in full_ids(stub, target, bank_ids):
            reply = stub.UnpinBank(pb.UnpinBankRequest(bank_id=bank_id), metadata=target.metadata)
            report(target, reply.bank, f"unpinned {bank_id}")


@banks.command("flush")
@client_options
def flush(target: Target) -> None:
    """Write what resident banks hold and files do not."""
    is_any = False
    with service(target) as stub:
        for written in stub.FlushBanks(pb.FlushBanksRequest(), metadata=target.metadata):
            wrote = written.detail or f"{size(written.written_bytes)} written"
            report(target, written, f"{written.bank_id} {written.frontier:,} tokens: {wrote}")
            is_any = True
    if not is_any and not target.as_json:
        click.echo("nothing to write; banks under --kv-cache-min-tokens are not stored")


@banks.command("rescan")
@client_options
def rescan(target: Target) -> None:
    """Read the folder again: adopt files without rows, drop rows without files."""
    with service(target) as stub:
        found = stub.RescanBanks(pb.RescanBanksRequest(), metadata=target.metadata)
    seconds = found.duration.ToNanoseconds() / 1e9
    report(
        target,
        found,
        f"{found.num_banks:,} banks: {found.num_adopted:,} adopted, {found.num_dropped:,} dropped,"
        f" {found.num_quarantined:,} quarantined, in {seconds:.2f} s",
    )


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
        trust(bank),
        str(bank.hits),
        age(bank.last_use_time),
        "pinned" if bank.pinned else "",
    ]


def _totals(num_shown: int, num_all: int, storage: pb.GetStorageResponse) -> str:
    disk = "off"
    if storage.enabled:
        disk = f"{size(storage.disk_bytes)} of {size(storage.quota_bytes)} in {storage.folder}"
    memory = f"{size(storage.kv_memory_bytes)} of {size(storage.kv_memory_quota_bytes)}"
    return f"{num_shown:,} of {num_all:,} banks · memory {memory} · disk {disk}"
