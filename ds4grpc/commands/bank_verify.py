"""`ds4grpc banks verify`: stored banks read whole and checked, with a server or without one.

Main thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from ds4grpc.commands.bank_calls import full_ids, report, service
from ds4grpc.commands.options import Target, client_options
from ds4grpc.commands.output import size
from ds4grpc.config import ServeConfig
from ds4grpc.errors import Ds4grpcError
from ds4grpc.store.offline import FileVerdict, model_folders, verify_file, verify_folder
from ds4grpc.v1 import bank_pb2 as pb

DEFAULT_FOLDER = "-"


@click.command("verify")
@click.argument("bank_ids", nargs=-1, metavar="[BANK_ID]...")
@click.option(
    "--offline",
    is_flag=False,
    flag_value=DEFAULT_FOLDER,
    metavar="[DIR]",
    help="Read the files themselves, without a server: those in DIR, its --kv-disk-dir, or a file"
    " that `export` made.  [DIR: the default of serve]",
)
@client_options
def verify(target: Target, bank_ids: tuple[str, ...], offline: str | None) -> None:
    """Read stored banks whole and check them; the exit code is 1 when one is damaged.

    A running server checks its tenant's banks and quarantines what fails. Offline, the banks of all
    models and tenants are checked, their chains too, and nothing is changed; the folder of a model
    that is being served is refused.
    """
    seen = _Seen(target)
    if offline is None:
        for verdict in _online(target, bank_ids):
            seen.add(verdict, "quarantined")
    else:
        _offline(_place(offline), bank_ids, seen)
    seen.end()


class _Seen:
    """Shows verdicts as they come, and counts them."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._num_done = self._num_bad = self._num_bytes = self._num_refused = 0

    def add(self, verdict: pb.VerifyBanksResponse, failed: str, **more: str) -> None:
        """`failed` is what becomes of a damaged bank; `more` is for programs."""
        self._num_done += 1
        self._num_bad += not verdict.ok
        self._num_bytes += verdict.read_bytes
        state = "ok" if verdict.ok else f"{failed}: {verdict.detail}"
        text = f"{verdict.done}/{verdict.total} {verdict.bank_id or 'no bank'} {state}"
        report(self._target, verdict, text, **more)

    def refuse(self, error: Ds4grpcError) -> None:
        """A folder that could not be looked at; the others are, all the same."""
        self._num_refused += 1
        click.echo(click.style("error: ", fg="red", bold=True) + error.message, err=True)

    def end(self) -> None:
        """Prints the sum; exits with 1 when anything was wrong."""
        if not self._target.as_json:
            click.echo(
                f"{self._num_done:,} banks, {size(self._num_bytes)} read, {self._num_bad:,} damaged"
            )
        if self._num_bad or self._num_refused:
            raise SystemExit(1)


def _online(target: Target, bank_ids: tuple[str, ...]) -> Iterator[pb.VerifyBanksResponse]:
    with service(target) as stub:
        request = pb.VerifyBanksRequest(bank_ids=full_ids(stub, target, bank_ids))
        yield from stub.VerifyBanks(request, metadata=target.metadata)


def _place(offline: str) -> Path:
    place = ServeConfig().bank_folder if offline == DEFAULT_FOLDER else Path(offline)
    if not place.exists():
        raise click.UsageError(f"{place} is not there; name a --kv-disk-dir or an exported file")
    return place


def _offline(place: Path, bank_ids: tuple[str, ...], seen: _Seen) -> None:
    if place.is_file():
        _show(verify_file(str(place)), seen)
        return
    names = model_folders(str(place))
    if not names:
        raise click.UsageError(f"{place} holds no banks; name a --kv-disk-dir")
    missing = set(bank_ids)
    for name in names:
        try:
            for verdict in verify_folder(str(place), name, bank_ids):
                missing -= {start for start in bank_ids if verdict.bank_id.startswith(start)}
                _show(verdict, seen)
        except Ds4grpcError as error:
            seen.refuse(error)
    if missing:
        raise click.UsageError(f"no bank file begins with {', '.join(sorted(missing))}")


def _show(verdict: FileVerdict, seen: _Seen) -> None:
    message = pb.VerifyBanksResponse(
        bank_id=verdict.bank_id,
        ok=not verdict.detail,
        detail=verdict.detail,
        read_bytes=verdict.read_bytes,
        done=verdict.done,
        total=verdict.total,
    )
    seen.add(message, "damaged", model=verdict.model)
