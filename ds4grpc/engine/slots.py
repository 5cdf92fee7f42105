"""Slots: the fixed number of resident places, their states, generations and records.

Owns which slot is what and what its bank holds. Knows no scheduling, no text rules, no files.
The engine thread alone changes anything here; other threads read a slot's rows only through
`SlotRows`, which proves afterwards that they did not change.

    FREE ──load──> LOADING ──loaded──> ACTIVE ──retire──> IDLE ──> ACTIVE (continue in place)
      └────────────── activate ──────────┘                  └────> FREE   (victim)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ds4grpc.bank import BankContent, Ids, Record, common_prefix
from ds4grpc.engine.banks import SourceMoved
from ds4grpc.engine.memory import SlotMemory
from ds4grpc.layout import Spans, StateLayout
from ds4grpc.model.interface import State

# Records of earlier turns stay with a growing bank; this many bound what a lookup compares.
MAX_RECORDS = 64


class SlotState(enum.StrEnum):
    FREE = "free"
    LOADING = "loading"
    ACTIVE = "active"
    IDLE = "idle"


@dataclass(slots=True, eq=False)
class Slot:
    """One resident place.

    `ids[:frontier]` are the committed tokens. `readers` counts copies being made from this slot
    in the background. `stored` is how many leading tokens ready bank files hold, `stored_bank`
    the longest such bank. `persisting` is the (generation, frontier) of a write under way.
    """

    index: int
    memory: SlotMemory
    model_state: State  # what the model made of the memory's planes
    ids: Ids  # (max_context,) uint32
    state: SlotState = SlotState.FREE
    frontier: int = 0
    generation: int = 1
    namespace: bytes = b""
    records: tuple[Record, ...] = ()
    hidden: Spans = field(default_factory=Spans)
    held: Spans = field(default_factory=Spans)
    head: int = 0
    readers: int = 0
    stored: int = 0
    stored_bank: str = ""
    persisting: tuple[int, int] | None = None
    keep: bool = True  # whether it may be written to disk (cache.no_store, cache.bypass)
    pinned: bool = False
    ttl_seconds: float | None = None
    last_use: float = 0.0

    def content(self) -> BankContent:
        """A snapshot of what the bank knows of itself; ids are copied."""
        return BankContent(
            namespace=self.namespace,
            ids=self.ids[: self.frontier].copy(),
            records=self.records,
            hidden=self.hidden,
            held=self.held,
            head=self.head,
        )


class Slots:
    """All slots of an engine."""

    def __init__(
        self,
        layout: StateLayout,
        num_slots: int,
        max_context: int,
        new_memory: Callable[[], tuple[SlotMemory, State]],
    ) -> None:
        """`new_memory` makes a slot's memory and what the model binds to it."""
        self._layout = layout
        self._new_memory = new_memory
        self._slots: list[Slot] = []
        for index in range(num_slots):
            memory, state = new_memory()
            ids = np.zeros(max_context, dtype=np.uint32)
            self._slots.append(Slot(index, memory, state, ids))
        self.version = 0  # moves whenever a lookup may find more or less

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def count(self, state: SlotState) -> int:
        return sum(slot.state is state for slot in self._slots)

    @property
    def resident_bytes(self) -> int:
        """Bytes that the committed tokens of all slots take."""
        tokens = sum(slot.frontier for slot in self._slots)
        return int(tokens * self._layout.bytes_per_token)

    # 1) Taking a slot

    def activate(self, slot: Slot, namespace: bytes) -> None:
        """A free slot starts an empty bank; an idle one goes on with the bank it has."""
        assert slot.state in (SlotState.FREE, SlotState.IDLE)
        if slot.state is SlotState.FREE:
            self._reset(slot)
            slot.namespace = namespace
        assert slot.namespace == namespace
        slot.state = SlotState.ACTIVE

    def load(self, slot: Slot, namespace: bytes) -> None:
        """A free slot begins to be filled from a file or another slot."""
        assert slot.state is SlotState.FREE
        self._reset(slot)
        slot.namespace = namespace
        slot.state = SlotState.LOADING

    def loaded(self, slot: Slot, content: BankContent, position: int) -> None:
        """The rows of the first `position` tokens of `content` are in place."""
        assert slot.state is SlotState.LOADING
        slot.generation += 1
        slot.ids[:position] = content.ids[:position]
        slot.frontier = position
        slot.records = _records_upto(content.records, position)
        slot.hidden = content.hidden.clip(0, position)
        slot.held = content.held.clip(0, position)
        slot.head = content.head if content.head <= position else 0
        slot.state = SlotState.ACTIVE
        self.version += 1

    def load_failed(self, slot: Slot) -> None:
        assert slot.state is SlotState.LOADING
        slot.state = SlotState.FREE
        self._reset(slot)

    # 2) Growing and cutting

    def commit(self, slot: Slot, token_ids: Iterable[int]) -> None:
        """Tokens whose rows the model has written at the frontier are now committed."""
        assert slot.state is SlotState.ACTIVE
        new = np.fromiter(token_ids, dtype=np.uint32)
        end = slot.frontier + len(new)
        slot.ids[slot.frontier : end] = new
        if slot.held.pairs and slot.held.pairs[-1][1] == slot.frontier:
            slot.held = Spans((*slot.held.pairs[:-1], (slot.held.pairs[-1][0], end)))
        else:
            slot.held = slot.held | Spans(((slot.frontier, end),))
        slot.frontier = end

    def truncate(self, slot: Slot, cut: int) -> None:
        """Forgets the tokens from `cut` on. Their rows may be overwritten from now on."""
        assert slot.state in (SlotState.ACTIVE, SlotState.IDLE)
        if cut == slot.frontier:
            return
        assert 0 <= cut < slot.frontier
        slot.generation += 1  # before any row changes: a reader checks after it has read
        slot.frontier = cut
        slot.records = _records_upto(slot.records, cut)
        slot.hidden = slot.hidden.clip(0, cut)
        slot.held = slot.held.clip(0, cut)
        slot.head = slot.head if slot.head <= cut else 0
        slot.stored = min(slot.stored, cut)
        if slot.readers == 0:  # a copy under way may still read them
            slot.memory.give_back(cut)
        self.version += 1

    # 3) Letting go

    def retire(self, slot: Slot, records: tuple[Record, ...], now: float) -> None:
        """The sequence has ended; the bank stays, findable by `records` and by its older ones."""
        assert slot.state is SlotState.ACTIVE
        new_keys = {record.key for record in records}
        kept = tuple(record for record in slot.records if record.key not in new_keys)
        slot.records = (records + kept)[:MAX_RECORDS]
        slot.state = SlotState.IDLE
        slot.last_use = now
        self.version += 1
        if slot.frontier == 0:
            self.release(slot)

    def release(self, slot: Slot) -> None:
        """Forgets an idle bank; its slot is free."""
        assert slot.state is SlotState.IDLE and slot.readers == 0
        slot.state = SlotState.FREE
        self._reset(slot)

    def detach(self, slot: Slot) -> SlotMemory:
        """Frees an idle slot but hands its rows out whole, to be written; it gets new memory.

        No row is copied: the slot starts its next life on a fresh map.
        """
        assert slot.state is SlotState.IDLE and slot.readers == 0
        memory = slot.memory
        slot.memory, slot.model_state = self._new_memory()
        slot.state = SlotState.FREE
        self._reset(slot)
        return memory

    def new_memory(self) -> SlotMemory:
        """Memory like a slot's, that belongs to none."""
        return self._new_memory()[0]

    def superseded(self, slot: Slot) -> bool:
        """Whether another resident bank holds all of this one's tokens."""
        return any(
            other is not slot
            and other.state in (SlotState.IDLE, SlotState.ACTIVE)
            and other.namespace == slot.namespace
            and (other.frontier, other.index) > (slot.frontier, slot.index)
            and common_prefix(slot.ids[: slot.frontier], other.ids[: other.frontier])
            == slot.frontier
            for other in self._slots
        )

    def check(self) -> None:
        """Asserts what must hold between any two moves."""
        for slot in self._slots:
            assert 0 <= slot.frontier <= len(slot.ids)
            assert slot.readers >= 0
            assert slot.stored <= slot.frontier
            if slot.state is SlotState.FREE:
                assert slot.frontier == 0 and not slot.records and slot.readers == 0
            for record in slot.records:
                assert all(w.position <= slot.frontier for w in record.waypoints)
            assert all(end <= slot.frontier for _, end in slot.hidden.pairs)
            assert all(end <= slot.frontier for _, end in slot.held.pairs)
        memories = {id(slot.memory) for slot in self._slots}
        assert len(memories) == len(self._slots)

    def _reset(self, slot: Slot) -> None:
        slot.generation += 1
        slot.frontier = 0
        slot.records = ()
        slot.hidden = Spans()
        slot.held = Spans()
        slot.head = 0
        slot.stored = 0
        slot.stored_bank = ""
        slot.persisting = None
        slot.keep = True
        slot.pinned = False
        slot.ttl_seconds = None
        slot.namespace = b""
        slot.memory.give_back(0)
        self.version += 1


class SlotRows:
    """Rows of a slot for the store (`engine.banks.RowSource`), read while it goes on living."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._memory = slot.memory
        self._generation = slot.generation

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        self.check()
        return self._memory.view(plane, start_row, stop_row)

    def tail(self, position: int) -> bytes:
        raise SourceMoved(f"no tail is kept at {position}")

    def check(self) -> None:
        if self._slot.generation != self._generation or self._slot.memory is not self._memory:
            raise SourceMoved(f"slot {self._slot.index} has a new generation")

    def close(self) -> None:
        pass


class DetachedRows:
    """Rows of a bank that lost its slot, kept alive until they are written."""

    def __init__(self, memory: SlotMemory, closed: Callable[[], None]) -> None:
        self._memory: SlotMemory | None = memory
        self._closed = closed

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        if self._memory is None:
            raise SourceMoved("the detached rows were given back")
        return self._memory.view(plane, start_row, stop_row)

    def tail(self, position: int) -> bytes:
        raise SourceMoved(f"no tail is kept at {position}")

    def check(self) -> None:
        if self._memory is None:
            raise SourceMoved("the detached rows were given back")

    def close(self) -> None:
        if self._memory is not None:
            self._memory = None
            self._closed()


class SlotSink:
    """A LOADING slot for the store (`engine.banks.RowSink`)."""

    def __init__(self, memory: SlotMemory) -> None:
        self._memory = memory

    def view(self, plane: int, start_row: int, stop_row: int) -> memoryview:
        return self._memory.fill(plane, start_row, stop_row)

    def done(self, plane: int, start_row: int, stop_row: int) -> None:
        self._memory.filled(plane, start_row, stop_row)

    def put_tail(self, position: int, data: bytes) -> None:
        raise ValueError(f"a layout without tails got one of {len(data)} bytes at {position}")


def _records_upto(records: tuple[Record, ...], position: int) -> tuple[Record, ...]:
    """Records of a bank cut at `position`: those left without a waypoint say nothing any more."""
    cut = (record.upto(position) for record in records)
    return tuple(record for record in cut if record.waypoints)
