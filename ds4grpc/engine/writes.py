"""When a resident bank is written to disk: after a turn, after a rest, at a stop.

Owns the pace of writes and what is known of their outcome. Knows no files: it hands out sources
and hears what became of them. Engine thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ds4grpc.bank import PersistReason
from ds4grpc.engine.admission import Placer
from ds4grpc.engine.banks import BankSource
from ds4grpc.engine.messages import WantWrite, Wrote
from ds4grpc.engine.slots import Slot, SlotRows, Slots, SlotState
from ds4grpc.layout import StateLayout

# Fewer new tokens are not worth a write after a turn; a rest, an eviction or a stop write them.
_MIN_NEW_TOKENS = 64
# Rows of a write after a turn are this many times the window and tail that go with them: with ids
# and records, too, more than half of what is written are rows.
_ROWS_TO_POINT = 1.25
_REST_SECONDS = 60.0
# A write that failed (full disk, I/O error) is tried again after this long.
_RETRY_SECONDS = 30.0


class Writes:
    """Decides which slots' banks are written, and notes which of their tokens files hold."""

    def __init__(
        self, slots: Slots, placer: Placer, layout: StateLayout, emit: Callable[[WantWrite], None]
    ) -> None:
        self._slots = slots
        self._placer = placer
        self._emit = emit
        self._turn_tokens = max(_MIN_NEW_TOKENS, _point_tokens(layout))
        self._retry_at: dict[int, float] = {}  # slot -> when a failed write is tried again

    def after_turn(self, slot: Slot) -> None:
        """A turn has ended in `slot`: writes it when enough is new, or when it is to be pinned."""
        new_tokens = slot.frontier - slot.stored
        if slot.pinned or (new_tokens >= self._turn_tokens and self._placer.worth_writing(slot)):
            self._write(slot, PersistReason.TURN)

    def after_rest(self, now: float) -> None:
        """Writes whatever is new in banks that have been idle for a while."""
        for slot in self._slots:
            if (
                slot.state is SlotState.IDLE
                and now - slot.last_use >= _REST_SECONDS
                and now >= self._retry_at.get(slot.index, 0.0)
                and self._placer.worth_writing(slot)
            ):
                self._write(slot, PersistReason.REST)

    def everything(self, reason: PersistReason) -> list[WantWrite]:
        """Writes for all idle banks that hold something no file does; the caller sees to them."""
        writes = []
        for slot in self._slots:
            if slot.state is SlotState.IDLE and self._placer.worth_writing(slot):
                slot.persisting = (slot.generation, slot.frontier)
                writes.append(_want(slot, reason))
        return writes

    def wrote(self, message: Wrote) -> None:
        """Notes the outcome, unless the slot has become another bank's meanwhile."""
        slot = self._slots[message.slot]
        if slot.generation != message.generation:
            return
        slot.persisting = None
        persisted = message.persisted
        if persisted.detail:
            self._retry_at[slot.index] = time.monotonic() + _RETRY_SECONDS
        else:
            self._retry_at.pop(slot.index, None)
        if persisted.frontier > slot.stored:
            slot.stored = min(persisted.frontier, slot.frontier)
            slot.stored_bank = persisted.bank_id

    def _write(self, slot: Slot, reason: PersistReason) -> None:
        if slot.persisting != (slot.generation, slot.frontier):
            slot.persisting = (slot.generation, slot.frontier)
            self._emit(_want(slot, reason))


def _want(slot: Slot, reason: PersistReason) -> WantWrite:
    source = BankSource(slot.content(), SlotRows(slot), reason, slot.pinned, slot.ttl_seconds)
    return WantWrite(source, slot.index, slot.generation)


def _point_tokens(layout: StateLayout) -> int:
    """New tokens whose plain rows outweigh one window and tail; 0 without either."""
    if not layout.plain_bytes_per_token:
        return layout.window
    return math.ceil(_ROWS_TO_POINT * layout.point_bytes / layout.plain_bytes_per_token)
