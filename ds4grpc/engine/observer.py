"""What the engine tells whoever counts; `metrics.Metrics` fulfils it."""

from __future__ import annotations

from typing import Literal, Protocol

from ds4grpc.bank import RecordKind


class EngineObserver(Protocol):
    """Each method is cheap, never raises, and is called on the engine thread."""

    def stage(self, stage: Literal["lookup", "load", "compute"], seconds: float) -> None:
        """An admission spent `seconds` in a stage."""
        ...

    def prefilled(self, num_tokens: int) -> None: ...

    def generated(self, num_tokens: int) -> None: ...

    def inter_token(self, seconds: float) -> None:
        """The gap between two tokens of one stream."""
        ...

    def record(self, kind: RecordKind, outcome: str, *, thinking: bool) -> None:
        """A turn finished; outcome is `built`, `prompt`, `unsound` or `failed`."""
        ...

    def evicted(self, reason: str) -> None:
        """A resident bank lost its slot: `no_value`, `superseded`, `lru` or `dropped`."""
        ...
