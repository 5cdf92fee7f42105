"""What the store knows of bank files and garbage, as messages. Pure functions of values."""

from __future__ import annotations

from collections.abc import Iterable

from ds4grpc.rpc import convert
from ds4grpc.store.format import VERSION, Header
from ds4grpc.store.garbage import Garbage, Piece
from ds4grpc.store.inspect import ChainLink
from ds4grpc.v1 import bank_pb2 as pb

CHECKSUM = "xxh3_64"  # of store.format

_KINDS = {
    Garbage.EXPIRED: pb.GARBAGE_KIND_EXPIRED,
    Garbage.DELETED: pb.GARBAGE_KIND_DELETED,
    Garbage.RETIRED: pb.GARBAGE_KIND_RETIRED,
    Garbage.LEFTOVER: pb.GARBAGE_KIND_LEFTOVER,
    Garbage.ORPHAN: pb.GARBAGE_KIND_ORPHAN,
    Garbage.QUARANTINED: pb.GARBAGE_KIND_QUARANTINED,
}


def file_of(header: Header, dtype: str) -> pb.BankFile:
    """A bank file's header; `dtype` is the served model's, whose file it is."""
    message = pb.BankFile(
        format_version=VERSION,
        fingerprint=header.fingerprint.hex(),
        layout_id=header.layout_id,
        dtype=dtype,
        checksum=CHECKSUM,
        sections=[
            pb.BankSection(
                name=section.name, size_bytes=section.length, num_blocks=section.num_blocks
            )
            for section in header.sections
        ],
        head=header.head,
    )
    if header.ttl_seconds is not None:
        message.ttl.CopyFrom(convert.duration(header.ttl_seconds))
    return message


def link_of(link: ChainLink) -> pb.BankLink:
    return pb.BankLink(
        bank_id=link.bank_id,
        base=link.base,
        frontier=link.frontier,
        size_bytes=link.size_bytes,
        hidden=link.hidden,
    )


def collected(pieces: Iterable[Piece]) -> pb.CollectGarbageResponse:
    """Garbage by kind."""
    by_kind = {kind: pb.CollectedGarbage(kind=number) for kind, number in _KINDS.items()}
    freed_bytes = 0
    for piece in pieces:
        found = by_kind[piece.kind]
        found.num_files += 1
        found.size_bytes += piece.size_bytes
        freed_bytes += piece.size_bytes if piece.kind is not Garbage.ORPHAN else 0
    return pb.CollectGarbageResponse(collected=by_kind.values(), freed_bytes=freed_bytes)
