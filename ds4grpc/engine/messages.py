"""What crosses between the event loop and the engine thread, both ways.

Frozen values. Down: into `Core.post`, from any thread. Up: one list a step, to the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds4grpc.bank import BankContent, Record, Waypoint
from ds4grpc.chat.prompt import Prompt, Reply
from ds4grpc.engine.banks import BankSource, Persisted, RowSink, StoredBank
from ds4grpc.engine.memory import SlotMemory
from ds4grpc.engine.request import Event, GenerationRequest, RequestKey
from ds4grpc.engine.reuse import Plan, Rates, ResidentBank
from ds4grpc.errors import Ds4grpcError

# Down: to the engine thread.


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Planned:
    """The lookup for `request` has ended. `error` when it failed for this request alone."""

    request: GenerationRequest
    plan: Plan | None
    error: Ds4grpcError | None = None

    @property
    def key(self) -> RequestKey:
        return self.request.key


@dataclass(frozen=True, slots=True)
class Loaded:
    """A slot's rows are in place, or are not (`error`)."""

    key: RequestKey
    read_bytes: int
    seconds: float
    error: Ds4grpcError | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """A finished turn's records. `outcome` is `built`, `prompt`, `unsound` or `failed`."""

    key: RequestKey
    records: tuple[Record, ...]
    outcome: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a sequence. `gone`: nobody reads its stream; else it gets finished{CANCELLED}."""

    key: RequestKey
    gone: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """A slow reader's buffer is full (or has room again)."""

    key: RequestKey
    paused: bool


@dataclass(frozen=True, slots=True)
class Wrote:
    """What became of a slot's write."""

    slot: int
    generation: int
    persisted: Persisted


@dataclass(frozen=True, slots=True)
class Ask:
    """Runs `call` on the engine thread and hands its result (or exception) to `done` there."""

    call: Callable[[], Any]
    done: Callable[[Any, BaseException | None], None]


@dataclass(frozen=True, slots=True)
class WhenQuiet:
    """Calls `done` on the engine thread once no sequence is left."""

    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the thread."""


Down = Submit | Planned | Loaded | Built | Cancel | Pause | Wrote | Ask | WhenQuiet | Stop

# Up: to the event loop.


@dataclass(frozen=True, slots=True)
class Emit:
    """An event for a request's stream."""

    key: RequestKey
    event: Event


@dataclass(frozen=True, slots=True)
class End:
    """A request's stream ends here, with `error` or well."""

    key: RequestKey
    error: Ds4grpcError | None = None


@dataclass(frozen=True, slots=True)
class WantPlan:
    """Look for banks for this request, resident ones as in this snapshot."""

    request: GenerationRequest
    resident: tuple[ResidentBank, ...]
    resident_version: int
    reply_tokens: int
    rates: Rates
    use_store: bool


@dataclass(frozen=True, slots=True)
class WantLoad:
    """Fill a slot with the rows of a stored bank."""

    key: RequestKey
    bank: StoredBank
    position: int
    sink: RowSink


@dataclass(frozen=True, slots=True)
class WantCopy:
    """Fill a slot with the rows of another slot."""

    key: RequestKey
    source: SlotMemory
    target: SlotMemory
    num_tokens: int


@dataclass(frozen=True, slots=True)
class WantRecords:
    """Build the records of a finished turn, whose bank is `content`.

    `waypoints` are inherited from the match, with offsets in the prompt's text.
    """

    key: RequestKey
    prompt: Prompt
    reply: Reply
    content: BankContent
    waypoints: tuple[Waypoint, ...]


@dataclass(frozen=True, slots=True)
class WantWrite:
    """Write a bank. `slot` -1: its rows are detached, nobody waits for the outcome."""

    source: BankSource
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class NoteUse:
    """A stored bank served a request (`proven`: to its end)."""

    bank_id: str
    proven: bool


@dataclass(frozen=True, slots=True)
class Distrust:
    """What was restored from a stored bank failed: never serve it again."""

    bank_id: str
    detail: str


Up = Emit | End | WantPlan | WantLoad | WantCopy | WantRecords | WantWrite | NoteUse | Distrust
