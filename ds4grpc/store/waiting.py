"""Rows that wait while another process holds the catalog's lock; lookups know them meanwhile.

Knows no files and no statements. Event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds4grpc.store.catalog import Hit
from ds4grpc.store.index import Entry
from ds4grpc.store.keys import Mark

MAX_WAITING = 256  # banks: some hundred digests of each are kept in memory

Row = tuple[Entry, Sequence[Mark]]


class WaitingRows:
    """Their files are whole and durable, so a start after a crash finds them all the same."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, bank_id: str) -> bool:
        return bank_id in self._rows

    @property
    def is_full(self) -> bool:
        return len(self._rows) >= MAX_WAITING

    def put(self, entry: Entry, marks: Sequence[Mark]) -> None:
        assert not self.is_full
        self._rows[entry.bank_id] = (entry, marks)

    def all(self) -> list[Row]:
        return list(self._rows.values())

    def written(self, rows: Iterable[Row]) -> None:
        """They wait no more, unless their banks have been written anew meanwhile."""
        for entry, _ in rows:
            if self._rows.get(entry.bank_id, (None,))[0] is entry:
                del self._rows[entry.bank_id]

    def forget(self, bank_ids: Iterable[str]) -> None:
        for bank_id in bank_ids:
            self._rows.pop(bank_id, None)

    def find(self, digests: Iterable[bytes]) -> list[Hit]:
        """What `Catalog.find` would say of them, deepest first."""
        wanted = set(digests)
        hits = []
        for bank_id, (_, marks) in self._rows.items():
            positions = [mark.position for mark in marks if mark.digest in wanted]
            if positions:
                hits.append(Hit(bank_id, max(positions)))
        return sorted(hits, key=lambda hit: hit.position, reverse=True)
