"""The store as the engine sees it: finding, loading and keeping stored banks.

Protocols only; `store.store.Store` fulfils them and `server` introduces the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ds4grpc.bank import BankContent, Ids, PersistReason


class SourceMoved(Exception):
    """A slot's generation moved while its rows were being read: drop the write."""


class RowSource(Protocol):
    """Rows of a bank that stay readable while its generation stands. Any one thread."""

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        """Bytes of rows [start_row, stop_row) of `layout.rows[plane]`; at most 1 MiB at a time.

        The bytes are only proven by a later `check()`. Raises SourceMoved.
        """
        ...

    def tail(self, position: int) -> bytes:
        """The tail kept at `position`, `layout.tail_bytes` long."""
        ...

    def check(self) -> None:
        """Raises SourceMoved when what was viewed so far may have changed."""
        ...

    def close(self) -> None:
        """Gives the memory back; idempotent. Called once reading has ended, also in error."""
        ...


class RowSink(Protocol):
    """A slot being filled. Any one thread."""

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        """Writable bytes for rows [start_row, stop_row) of `layout.rows[plane]`."""
        ...

    def done(self, plane: int, start_row: int, stop_row: int) -> None:
        """The viewed bytes are filled (a device copies them now)."""
        ...

    def put_tail(self, position: int, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class MatchQuery:
    """What a request looks for. `text`, `marks`, `ids` and `head` as in `chat.prompt.Prompt`.

    `exact` asks for banks that share canonical ids only (no keys, no waypoints).
    """

    namespace: bytes
    text: bytes
    marks: tuple[int, ...]
    ids: Ids
    exact: bool = False
    head: int = 0


class StoredBank(Protocol):
    """A lease on a stored bank: its files stay until `release`."""

    @property
    def bank_id(self) -> str: ...

    @property
    def content(self) -> BankContent:
        """Ids, this file's records, hidden spans; `held` and `tails` of the whole chain."""
        ...

    def load_bytes(self, position: int) -> int:
        """Bytes that `load(position)` would read."""
        ...

    async def load(self, position: int, sink: RowSink) -> int:
        """Fills `sink` with the rows for tokens [0, position) and the window rows and tails at
        or below it; returns the bytes read.

        `position` is a value of `layout.replay_base`. Every block read is checked.
        Raises BankCorrupt (the bank is quarantined before it is raised).
        """
        ...

    def release(self) -> None:
        """Ends the lease; idempotent, any thread."""
        ...


@dataclass(frozen=True, slots=True)
class BankSource:
    """A bank to be written. The store closes `rows` on every path."""

    content: BankContent
    rows: RowSource
    reason: PersistReason
    pin: bool = False
    ttl_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Persisted:
    """What became of a write. `frontier`: tokens of the source that ready files now hold."""

    bank_id: str
    frontier: int
    written_bytes: int
    detail: str = ""  # why nothing was written; "" when something was or nothing was new


class BankStore(Protocol):
    """All coroutines run on the event loop; their statements and file work do not."""

    @property
    def version(self) -> int:
        """Moves whenever a later `match` may find more or less."""
        ...

    async def match(self, query: MatchQuery) -> Sequence[StoredBank]:
        """At most four leased candidates, likely best first; never raises for a bad bank.

        The caller releases each. Rows of the catalog only suggest: a candidate's `content` is
        read from its file and checked.
        """
        ...

    async def persist(self, source: BankSource) -> Persisted:
        """Writes what no ready file holds. Never raises for a full or failing disk."""
        ...

    async def note_use(self, bank_id: str, *, proven: bool) -> None:
        """A request continues from the bank: one hit; once more, `proven`, when it finished."""
        ...

    async def quarantine(self, bank_id: str, detail: str) -> None:
        """Never serve this bank again: what was loaded from it failed a check."""
        ...
