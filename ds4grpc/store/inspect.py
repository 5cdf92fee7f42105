"""What a stored bank is made of, for people who look: header, chain, records.

Frozen values; `store.Store.inspect` fills them in. Blocking where it reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4grpc.store.content import FileContent
from ds4grpc.store.format import Header
from ds4grpc.store.index import Entry, Index
from ds4grpc.store.reader import BankFile


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One file of a chain. `hidden`: its bank is deleted, its rows are still needed."""

    bank_id: str
    base: int
    frontier: int
    size_bytes: int
    hidden: bool


@dataclass(frozen=True, slots=True)
class Inspected:
    """What a bank's own file says, and the files that hold its rows, its own last."""

    header: Header
    content: FileContent
    chain: tuple[ChainLink, ...]


def header_and_content(file: BankFile) -> tuple[Header, FileContent]:
    """Raises BankCorrupt. Blocking."""
    return file.header, file.read_content()


def chain_of(index: Index, entry: Entry) -> tuple[ChainLink, ...]:
    return tuple(
        ChainLink(each.bank_id, each.base, each.frontier, each.size_bytes, each.hidden)
        for each in index.chain(entry)
    )
