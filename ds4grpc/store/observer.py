"""What the store reports of its work. Knows no metrics library; `metrics.Metrics` fulfils it."""

from __future__ import annotations

from typing import Protocol

from ds4grpc.bank import PersistReason


class StoreObserver(Protocol):
    """What is told of the store's work, for metrics. Called on the event loop; must not block."""

    def persisted(self, reason: PersistReason, seconds: float, written_bytes: int) -> None: ...

    def compacted(self, seconds: float, written_bytes: int) -> None:
        """Files were merged; what was written for it is not among what was persisted."""

    def persist_failed(self, kind: str) -> None:
        """`kind`: quota, no_space, io, moved, catalog or other."""

    def restored(self, result: str, seconds: float, read_bytes: int) -> None:
        """`result`: ok, or the kind of a BankCorrupt."""

    def evicted(self, reason: str) -> None:
        """`reason`: lru, superseded or expired."""

    def catalog(self, op: str, seconds: float) -> None:
        """`op`: lookup, publish, update, delete, list or rescan."""

    def catalog_error(self, kind: str) -> None:
        """`kind`: see `database.CatalogError`."""
