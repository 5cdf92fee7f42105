"""`ds4grpc banks rm` and `gc`: what goes because somebody says so, and what is of no use anyway."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

import click
import grpc

from ds4grpc.commands.bank_calls import full_ids, listed, report, service
from ds4grpc.commands.client import CallFailed
from ds4grpc.commands.options import Target, client_options
from ds4grpc.commands.output import age, json_line, size, word
from ds4grpc.v1 import bank_pb2 as pb
from ds4grpc.v1 import bank_pb2_grpc

MAX_SHOWN = 50  # banks that are listed before a question
_AGE = re.compile(r"\d{1,9}(\.\d{1,9})?[smhd]")


@click.command("rm")
@click.argument("bank_ids", nargs=-1, metavar="[BANK_ID]...")
@click.option(
    "--older-than", metavar="AGE", help="Banks not used for AGE, such as 90m, 12h or 30d."
)
@click.option("--filter", "terms", default="", metavar="TERMS", help="Banks as `ls --filter` has.")
@click.option("--all", "everything", is_flag=True, help="All banks of the tenant.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@client_options
def remove(
    target: Target,
    bank_ids: tuple[str, ...],
    older_than: str | None,
    terms: str,
    everything: bool,
    yes: bool,
) -> None:
    """Delete the named banks, or those of the tenant that the options choose.

    Chosen banks are listed first, and a question asked; without a terminal that takes --yes. Pinned
    ones are not chosen. A named bank that is pinned is refused: unpin it first. One that is in use
    is refused: cancel its generation, or retry later. A parent whose rows other banks need is
    hidden at once; its bytes go with the last of them. The exit code is 1 when any was refused.
    """
    choosing = [terms] if terms else []
    if older_than is not None:
        if _AGE.fullmatch(older_than) is None:
            raise click.UsageError(f"--older-than {older_than!r} is no age such as 90m, 12h or 30d")
        choosing.append(f"idle > {older_than}")
    if bool(bank_ids) == bool(choosing or everything):
        raise click.UsageError(
            "name banks, or choose them with --older-than, --filter or --all; not both"
        )
    with service(target) as stub:
        if bank_ids:
            chosen = full_ids(stub, target, bank_ids)
        else:
            chosen = _chosen(stub, target, " AND ".join(choosing), yes=yes)
        is_named = bool(bank_ids)
        num_refused = sum(
            not _delete(stub, target, bank_id, is_named=is_named) for bank_id in chosen
        )
    if num_refused:
        raise SystemExit(1)


def _chosen(
    stub: bank_pb2_grpc.BankServiceStub, target: Target, terms: str, *, yes: bool
) -> list[str]:
    """The ids of banks to delete, children before their parents, once the user agrees."""
    banks, _ = listed(stub, target, terms, "bank_id")
    kept = [bank for bank in banks if bank.pinned]
    banks = sorted((bank for bank in banks if not bank.pinned), key=lambda bank: -bank.base)
    if kept:
        click.echo(f"{len(kept):,} pinned banks are kept", err=True)
    if not banks:
        click.echo("no bank is to be deleted", err=True)
        return []
    if not yes:
        _ask(banks)
    return [bank.bank_id for bank in banks]


def _ask(banks: Sequence[pb.Bank]) -> None:
    """Returns when the user agrees; what is shown goes to stderr, and stdout stays the results'."""
    for bank in banks[:MAX_SHOWN]:
        where = word(pb.BankLocation.Name(bank.location), "BANK_LOCATION_")
        click.echo(
            f"  {bank.bank_id} {where:<8} {bank.frontier:>7,} tokens {size(bank.size_bytes):>10}"
            f"  used {age(bank.last_use_time)} ago",
            err=True,
        )
    if len(banks) > MAX_SHOWN:
        click.echo(f"  and {len(banks) - MAX_SHOWN:,} more", err=True)
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"{len(banks):,} banks would be deleted; there is no terminal to ask on: say --yes"
        )
    num_bytes = size(sum(bank.size_bytes for bank in banks))
    click.confirm(f"Delete {len(banks):,} banks, {num_bytes}?", abort=True, err=True)


def _delete(
    stub: bank_pb2_grpc.BankServiceStub, target: Target, bank_id: str, *, is_named: bool
) -> bool:
    """Deletes one and reports it; False when it was refused. That a chosen one has gone by itself
    meanwhile is no refusal."""
    try:
        request = pb.DeleteBankRequest(bank_id=bank_id)
        reply = stub.DeleteBank(request, metadata=target.metadata)
    except grpc.RpcError as error:
        failed = CallFailed(error, target)
        if failed.code is grpc.StatusCode.NOT_FOUND and not is_named:
            return True
        if failed.code not in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND):
            raise
        if target.as_json:
            click.echo(json.dumps({"bank_id": bank_id, "error": failed.facts()}))
        else:
            failed.show()
        return False
    done = (
        f"hid {bank_id}: other banks still need its rows"
        if reply.hidden
        else f"deleted {bank_id}: {size(reply.freed_bytes)} free again"
    )
    report(target, reply, done, bank_id=bank_id)
    return True


@click.command("gc")
@click.option("--quarantined", is_flag=True, help="Remove files that failed a check, too.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@client_options
def collect(target: Target, quarantined: bool, dry_run: bool) -> None:
    """Remove what nobody can use any more.

    Expired banks, deleted ones whose rows nobody needs, files that merging has replaced, leftovers
    of writes that were cut short. Bank files without a bank are looked into: good ones are banks
    again, others go into quarantine.
    """
    with service(target) as stub:
        request = pb.CollectGarbageRequest(include_quarantined=quarantined, validate_only=dry_run)
        reply = stub.CollectGarbage(request, metadata=target.metadata)
    if target.as_json:
        json_line(reply)
        return
    for found in reply.collected:
        kind = word(pb.GarbageKind.Name(found.kind), "GARBAGE_KIND_")
        click.echo(f"{kind:<11} {found.num_files:>7,} files {size(found.size_bytes):>10}")
    click.echo(f"{size(reply.freed_bytes)} {'would be free' if dry_run else 'free'} again")
