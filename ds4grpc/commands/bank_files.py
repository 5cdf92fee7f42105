"""`ds4grpc banks export` and `import`: one conversation's bank as one file.

A file is written beside its place and gets its name when it is whole. Main thread.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import click

from ds4grpc.commands.bank_calls import report, service
from ds4grpc.commands.options import Target, client_options
from ds4grpc.commands.output import json_line, progress, size
from ds4grpc.v1 import bank_pb2 as pb
from ds4grpc.v1 import bank_pb2_grpc

CHUNK_BYTES = 512 << 10


@click.command("export")
@click.argument("bank_id")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Where to write it; a file that is there stays.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@client_options
def export(target: Target, bank_id: str, output: Path, force: bool) -> None:
    """Write a stored bank with all it needs to one file, for `import` elsewhere.

    The file holds the conversation in clear, and nothing of the tenant or the salt. Only a server
    with the same model and numeric mode can use it.
    """
    if output.exists() and not force:
        raise click.UsageError(f"{output} is there already; choose another name, or --force")
    partial = output.with_name(f".{output.name}.{secrets.token_hex(4)}.partial")
    try:
        with service(target) as stub:
            start, sha256 = _receive(stub, target, bank_id, partial)
        os.replace(partial, output)
    except OSError as error:
        raise click.ClickException(f"{output} could not be written: {error.strerror}") from error
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
    if target.as_json:
        json_line(start, file=str(output), sha256=sha256)
        return
    what = f"{start.frontier:,} tokens, {size(start.size_bytes)}"
    click.echo(f"exported {start.bank_id}: {what}, to {output}")


def _receive(
    stub: bank_pb2_grpc.BankServiceStub, target: Target, bank_id: str, path: Path
) -> tuple[pb.ExportStart, str]:
    """Writes what the server sends, and checks that all of it came as it was sent."""
    calls = stub.ExportBank(pb.ExportBankRequest(bank_id=bank_id), metadata=target.metadata)
    start, sha256, running = pb.ExportStart(), b"", hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        start = next(calls).start
        with progress("exporting", start.size_bytes) as done:
            for message in calls:
                if message.HasField("end"):
                    sha256 = message.end.sha256
                file.write(message.chunk)
                running.update(message.chunk)
                done(len(message.chunk))
        num_bytes = file.tell()
        file.flush()
        os.fsync(file.fileno())
    if (num_bytes, running.digest()) != (start.size_bytes, sha256):
        raise click.ClickException("the file did not come as it was sent; export it again")
    return start, sha256.hex()


@click.command("import")
@click.argument("file", type=click.File("rb"))
@click.option("--salt", default="", metavar="TEXT", help="The salt of the requests it is for.")
@click.option("--pin", is_flag=True, help="Keep it from eviction.")
@client_options
def take(target: Target, file: BinaryIO, salt: str, pin: bool) -> None:
    """Store a file that `export` made as a bank of the tenant.

    It is checked whole before it is used, and gets the id that it has for this tenant and salt.
    """
    num_bytes = os.fstat(file.fileno()).st_size
    options = pb.ImportOptions(size_bytes=num_bytes, salt=salt, pin=pin)

    def messages() -> Iterator[pb.ImportBankRequest]:
        yield pb.ImportBankRequest(options=options)
        running = hashlib.sha256()
        while chunk := file.read(CHUNK_BYTES):
            running.update(chunk)
            yield pb.ImportBankRequest(chunk=chunk)
            done(len(chunk))
        yield pb.ImportBankRequest(end=pb.FileEnd(sha256=running.digest()))

    with progress("importing", num_bytes) as done, service(target) as stub:
        stored = stub.ImportBank(messages(), metadata=target.metadata)
    came = "was stored already" if stored.already_stored else size(stored.size_bytes)
    report(target, stored, f"imported {stored.bank_id}: {stored.frontier:,} tokens, {came}")
