"""Bank files on the wire: the order of their messages, and how long a peer may take.

Knows no files of the store. Event loop; a peer that stalls costs nothing once its time is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from ds4grpc.bank import namespace
from ds4grpc.errors import DeadlineExceeded, InvalidRequest
from ds4grpc.rpc import validate
from ds4grpc.rpc.convert import MAX_SALT_BYTES
from ds4grpc.store.transfer import Transfer
from ds4grpc.v1 import bank_pb2 as pb

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

T = TypeVar("T")

STALL_SECONDS = 30.0  # for one message, of at most 1 MiB
MAX_CHUNK_BYTES = 1 << 20


async def export(transfer: Transfer, bank_id: str, context: Context) -> None:
    """Sends a stored bank as one file. Raises BankNotFound, Overloaded, BankCorrupt,
    DeadlineExceeded."""
    async with transfer.send(bank_id) as outgoing:
        start = pb.ExportStart(
            bank_id=bank_id, frontier=outgoing.frontier, size_bytes=outgoing.size_bytes
        )
        await _in_time(context.write(pb.ExportBankResponse(start=start)), "takes")
        while chunk := await transfer.next_chunk(outgoing):
            await _in_time(context.write(pb.ExportBankResponse(chunk=chunk)), "takes")
        end = pb.FileEnd(sha256=outgoing.sha256)
        await _in_time(context.write(pb.ExportBankResponse(end=end)), "takes")


async def receive(
    transfer: Transfer, tenant: str, requests: AsyncIterator[pb.ImportBankRequest]
) -> pb.ImportBankResponse:
    """Stores a file as a bank of the tenant. Raises what `Transfer.receive` and `Incoming` do,
    InvalidRequest and DeadlineExceeded."""
    first = await _next(requests)
    if first is None or not first.HasField("options"):
        raise _out_of_order("the first message must be `options`")
    options = first.options
    salt = options.salt.encode()
    validate.at_most("options.salt", salt, MAX_SALT_BYTES, "bytes")
    async with transfer.receive(options.size_bytes) as incoming:
        while (message := await _next(requests)) is not None and message.HasField("chunk"):
            validate.at_most("chunk", message.chunk, MAX_CHUNK_BYTES, "bytes")
            await incoming.add(message.chunk)
        if message is None or not message.HasField("end"):
            raise _out_of_order("after the chunks comes `end`, with their SHA-256")
        space = namespace(tenant, salt)
        stored = await incoming.publish(space, message.end.sha256, pin=options.pin)
    return pb.ImportBankResponse(
        bank_id=stored.bank_id,
        frontier=stored.frontier,
        size_bytes=stored.size_bytes,
        already_stored=stored.already_stored,
    )


async def _next(requests: AsyncIterator[pb.ImportBankRequest]) -> pb.ImportBankRequest | None:
    """None at the end of the stream."""
    try:
        return await _in_time(anext(requests), "sends")
    except StopAsyncIteration:
        return None


async def _in_time(work: Awaitable[T], does: str) -> T:
    try:
        return await asyncio.wait_for(work, STALL_SECONDS)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the client {does} no message for {STALL_SECONDS:g} s; start again"
        ) from error


def _out_of_order(wanted: str) -> InvalidRequest:
    return InvalidRequest(f"the messages are out of order: {wanted}", reason="OUT_OF_ORDER")
