"""Giving slots: in place, by copy, from disk or empty; and choosing which bank has to go.

Owns the choices of the admission cascade that depend on the slots as they are now. Engine thread.
Knows no lookup, no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ds4grpc.bank import Admission, PersistReason
from ds4grpc.engine.banks import BankSource, StoredBank
from ds4grpc.engine.messages import WantWrite
from ds4grpc.engine.reuse import Plan, Proposal, ResidentBank
from ds4grpc.engine.slots import DetachedRows, Slot, Slots, SlotState


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision. `source` is the slot or stored bank that is reused; for WARM and
    PARTIAL_TRUNCATE the slot itself."""

    admission: Admission
    slot: Slot
    proposal: Proposal | None
    source: Slot | StoredBank | None


class Placer:
    """Places requests in slots.

    A bank worth keeping (at least `min_tokens`, with tokens that no ready file holds) is staged
    for writing before its slot is reused: its memory is handed over whole, so nothing waits.
    `staging_bytes` bounds what is handed over and not yet written.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        min_tokens: int,
        bytes_per_token: float,
        staging_bytes: int,
        memory_bytes: int,
        writes: bool,
        emit: Callable[[WantWrite], None],
        evicted: Callable[[str], None],
    ) -> None:
        self._slots = slots
        self._min_tokens = min_tokens
        self._bytes_per_token = bytes_per_token
        self._staging_bytes = staging_bytes
        self._memory_bytes = memory_bytes
        self._writes = writes
        self._emit = emit
        self._evicted = evicted
        self._staged_bytes = 0
        # Sizes of written banks, from the store's threads: appending is atomic, += is not.
        self._returned: deque[int] = deque()

    @property
    def staged_bytes(self) -> int:
        """Bytes of banks that lost their slot and are still being written."""
        while self._returned:
            self._staged_bytes -= self._returned.popleft()
        return self._staged_bytes

    def available(self) -> int:
        """How many requests could be given a slot now."""
        return sum(map(self._takeable, self._slots))

    def place(self, plan: Plan, namespace: bytes, *, now: float) -> Placement | None:
        """Carries out the best proposal that still holds; else an empty slot; None: none is free.

        A proposal whose slot has a new generation, or other ids than the plan saw, is passed over.
        """
        for proposal in plan.proposals:
            placement = (
                self._place_resident(proposal, proposal.bank, namespace, now)
                if isinstance(proposal.bank, ResidentBank)
                else self._place_stored(proposal, proposal.bank, namespace)
            )
            if placement is not None:
                return placement
        slot = self._take()
        if slot is None:
            return None
        self._slots.activate(slot, namespace)
        return Placement(Admission.COLD, slot, None, None)

    def make_room(self, num_bytes: int, promised_bytes: int) -> bool:
        """Whether `num_bytes` more fit under the memory cap, letting idle banks go oldest first.

        `promised_bytes` is what running sequences may grow to. False also while what was let go
        is still being written: ask again.
        """
        idle = sorted(
            (s for s in self._slots if s.state is SlotState.IDLE), key=lambda s: s.last_use
        )
        excess = promised_bytes + num_bytes - self._memory_bytes
        excess += sum(int(s.frontier * self._bytes_per_token) for s in idle)
        for slot in idle:
            if excess <= 0:
                break
            size = int(slot.frontier * self._bytes_per_token)
            if slot.readers == 0 and self._let_go(slot):
                excess -= size
        return excess <= 0 and excess + self.staged_bytes <= 0

    def expire(self, now: float) -> None:
        """Forgets idle banks whose time to live has passed since their last use."""
        for slot in self._slots:
            if (
                slot.state is SlotState.IDLE
                and slot.readers == 0
                and slot.ttl_seconds is not None
                and now - slot.last_use >= slot.ttl_seconds
            ):
                self._evicted("expired")
                self._slots.release(slot)

    def _place_resident(
        self, proposal: Proposal, bank: ResidentBank, namespace: bytes, now: float
    ) -> Placement | None:
        source = self._slots[bank.slot]
        base = proposal.match.base
        if (
            source.generation != bank.generation
            or source.namespace != namespace
            or source.state not in (SlotState.IDLE, SlotState.ACTIVE)
            or source.frontier < base
            or not np.array_equal(source.ids[:base], bank.content.ids[:base])
        ):
            return None
        takeable = source.state is SlotState.IDLE and source.readers == 0
        at_frontier = base == source.frontier
        if takeable and at_frontier and not source.pinned:
            self._slots.activate(source, namespace)
            return Placement(Admission.WARM, source, proposal, source)
        cuttable = takeable and not at_frontier and not source.pinned
        if cuttable and self._cheaper_to_cut(source, base):
            self._stage(source, PersistReason.EVICT, detach=False)
            self._slots.activate(source, namespace)
            self._slots.truncate(source, base)
            return Placement(Admission.PARTIAL_TRUNCATE, source, proposal, source)
        source.last_use = now  # it is being used: not the next victim
        target = self._take(exclude=source)
        if target is None and takeable:  # the only slot left: its file, if any, keeps the rest
            self._slots.activate(source, namespace)
            self._slots.truncate(source, base)
            kind = Admission.WARM if at_frontier else Admission.PARTIAL_TRUNCATE
            return Placement(kind, source, proposal, source)
        if target is None:
            return None
        source.readers += 1
        self._slots.load(target, namespace)
        kind = Admission.FORK if proposal.match.whole else Admission.PARTIAL_FORK
        return Placement(kind, target, proposal, source)

    def _place_stored(
        self, proposal: Proposal, bank: StoredBank, namespace: bytes
    ) -> Placement | None:
        target = self._take()
        if target is None:
            return None
        self._slots.load(target, namespace)
        kind = Admission.DISK if proposal.match.whole else Admission.DISK_PARTIAL
        return Placement(kind, target, proposal, bank)

    def _cheaper_to_cut(self, source: Slot, base: int) -> bool:
        """Whether rewinding `source` in place loses less than taking another slot for a copy."""
        others = [s for s in self._slots if s is not source and self._takeable(s)]
        if any(self._worthless(slot) for slot in others):
            return False
        if not others:
            return True
        oldest = min(others, key=lambda s: s.last_use)
        if source.last_use < oldest.last_use:
            return True
        return source.frontier - base <= oldest.frontier // 2

    def _takeable(self, slot: Slot) -> bool:
        return slot.state is SlotState.FREE or (slot.state is SlotState.IDLE and slot.readers == 0)

    def _worthless(self, slot: Slot) -> bool:
        return (
            slot.state is SlotState.FREE
            or slot.frontier < self._min_tokens
            or self._slots.superseded(slot)
        )

    def _take(self, *, exclude: Slot | None = None) -> Slot | None:
        """Frees a slot: free ones first, then no-value, superseded, least recently used banks."""
        takeable = [s for s in self._slots if s is not exclude and self._takeable(s)]
        for slot in takeable:
            if slot.state is SlotState.FREE:
                return slot
        for slot in takeable:
            if slot.frontier < self._min_tokens:
                self._evicted("no_value")
                self._slots.release(slot)
                return slot
        for slot in takeable:
            if self._slots.superseded(slot):
                self._evicted("superseded")
                self._slots.release(slot)
                return slot
        # A pinned bank keeps its file, so its slot is the last that goes, but it can go.
        takeable.sort(key=lambda s: (s.pinned, s.last_use))
        for slot in takeable:
            if self._let_go(slot):
                return slot
        for slot in takeable:
            self._evicted("dropped")
            self._slots.release(slot)
            return slot
        return None

    def _let_go(self, slot: Slot) -> bool:
        """Frees an idle slot unless its bank is worth keeping and staging has no room."""
        if not self.worth_writing(slot):
            self._evicted("lru")
            self._slots.release(slot)
            return True
        if self._stage(slot, PersistReason.EVICT, detach=True):
            self._evicted("lru")
            return True
        return False

    def worth_writing(self, slot: Slot) -> bool:
        """Whether the bank is long enough and holds tokens that no ready file does."""
        return (
            self._writes
            and slot.keep
            and slot.frontier >= self._min_tokens
            and slot.frontier > slot.stored
        )

    def _stage(self, slot: Slot, reason: PersistReason, *, detach: bool) -> bool:
        """Hands the bank's rows to the store, with the slot's memory (`detach`) or as a copy."""
        if not self.worth_writing(slot):
            return False
        num_bytes = int(slot.frontier * self._bytes_per_token)
        if self.staged_bytes + num_bytes > self._staging_bytes:
            return False
        content, pin, ttl = slot.content(), slot.pinned, slot.ttl_seconds
        if detach:
            memory = self._slots.detach(slot)
        else:
            memory = self._slots.new_memory()
            memory.copy_from(slot.memory, slot.frontier)
        self._staged_bytes += num_bytes

        rows = DetachedRows(memory, lambda: self._returned.append(num_bytes))
        self._emit(WantWrite(BankSource(content, rows, reason, pin, ttl), -1, 0))
        return True
