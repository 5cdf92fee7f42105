"""Placing requests: what of a plan still holds, which bank has to go, and what is staged first."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from ds4grpc.bank import Admission, Ids, PersistReason
from ds4grpc.engine.admission import Placement, Placer
from ds4grpc.engine.memory import HostMemory, SlotMemory
from ds4grpc.engine.messages import WantWrite
from ds4grpc.engine.reuse import Match, Plan, Proposal, ResidentBank
from ds4grpc.engine.slots import Slot, Slots, SlotState
from ds4grpc.layout import Rows, StateLayout
from ds4grpc.model.interface import State

LAYOUT = StateLayout("test", (Rows("k", 8),))
CONTEXT = 256
SPACE, OTHER_SPACE = b"n" * 32, b"o" * 32


def new_memory() -> tuple[SlotMemory, State]:
    memory = HostMemory(LAYOUT, CONTEXT)
    return memory, State(memory.planes)


@dataclass
class Places:
    """Slots, their placer, and what it has done."""

    slots: Slots
    placer: Placer
    written: list[WantWrite] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    clock: float = 0.0

    @staticmethod
    def of(count: int, *, staging_tokens: int = 1000, memory_tokens: int = 100_000) -> Places:
        slots = Slots(LAYOUT, count, CONTEXT, new_memory)
        written: list[WantWrite] = []
        evicted: list[str] = []
        placer = Placer(
            slots,
            min_tokens=50,
            bytes_per_token=8,
            staging_bytes=staging_tokens * 8,
            memory_bytes=memory_tokens * 8,
            writes=True,
            emit=written.append,
            evicted=evicted.append,
        )
        return Places(slots, placer, written, evicted)

    def bank(self, index: int, ids: list[int], *, in_use: bool = False) -> Slot:
        """Fills a free slot; later ones were used later."""
        slot = self.slots[index]
        self.slots.activate(slot, SPACE)
        for row, token_id in enumerate(ids):
            slot.memory.planes[0][row] = token_id % 251
        self.slots.commit(slot, ids)
        self.clock += 1
        if in_use:
            slot.last_use = self.clock
        else:
            self.slots.retire(slot, (), self.clock)
        return slot

    def place(self, *proposals: Proposal, space: bytes = SPACE) -> Placement | None:
        plan = Plan(proposals, None, (), self.slots.version, 0, 0.0)
        placement = self.placer.place(plan, space, now=self.clock)
        self.slots.check()
        return placement


def proposal(slot: Slot, base: int, *, whole: bool = True) -> Proposal:
    """The slot's bank as it is now, reused up to `base`."""
    bank = ResidentBank(
        slot.index,
        slot.generation,
        slot.content(),
        in_use=slot.state is SlotState.ACTIVE,
        pinned=slot.pinned,
        last_use=slot.last_use,
    )
    suffix: Ids = np.array([7], dtype=np.uint32)
    return Proposal(bank, Match(base, base, suffix, (), 0, whole, None))


def rows_of(write: WantWrite, count: int) -> list[int]:
    view = np.frombuffer(write.source.rows.view(0, 0, count), dtype=np.uint8)
    return [int(row[0]) for row in view.reshape(count, 8)]


A, B, C = (list(range(start, start + 100)) for start in (0, 1000, 2000))


def test_bank_whose_whole_is_reused_is_continued_in_place() -> None:
    places = Places.of(2)
    slot = places.bank(0, A)
    placement = places.place(proposal(slot, 100))
    assert placement is not None
    assert (placement.admission, placement.slot) == (Admission.WARM, slot)
    assert slot.state is SlotState.ACTIVE and slot.frontier == 100


@pytest.mark.parametrize("pinned", [False, True])
def test_bank_in_use_or_pinned_is_copied(pinned: bool) -> None:
    places = Places.of(2)
    slot = places.bank(0, A, in_use=not pinned)
    slot.pinned = pinned
    placement = places.place(proposal(slot, 100))
    assert placement is not None
    assert (placement.admission, placement.source) == (Admission.FORK, slot)
    assert placement.slot is not slot and placement.slot.state is SlotState.LOADING
    assert slot.readers == 1, "its rows may be cut off while they are copied"


def test_plan_of_an_older_generation_is_passed_over() -> None:
    places = Places.of(2)
    slot = places.bank(0, A)
    old = proposal(slot, 100)
    places.slots.truncate(slot, 10)
    places.slots.activate(slot, SPACE)
    places.slots.commit(slot, A[10:])  # the same ids again, but not the bank that was looked at
    places.slots.retire(slot, (), 0.0)
    placement = places.place(old)
    assert placement is not None
    assert placement.admission is Admission.COLD


def test_plan_with_other_ids_than_the_slot_is_passed_over() -> None:
    places = Places.of(2)
    slot = places.bank(0, A)
    wrong = proposal(slot, 100)
    slot.ids[3] += 1
    placement = places.place(wrong, proposal(slot, 60, whole=False))
    assert placement is not None
    assert placement.admission is not Admission.WARM
    assert placement.proposal is not wrong


def test_bank_of_another_namespace_is_passed_over() -> None:
    places = Places.of(2)
    slot = places.bank(0, A)
    placement = places.place(proposal(slot, 100), space=OTHER_SPACE)
    assert placement is not None
    assert placement.admission is Admission.COLD
    assert placement.slot is not slot


def test_victims_are_worthless_then_superseded_then_the_oldest() -> None:
    places = Places.of(4)
    places.bank(0, A)
    places.bank(1, B[:60])
    places.bank(2, B)
    places.bank(3, C[:20])
    taken = [places.place() for _ in range(4)]
    assert [p.slot.index for p in taken if p is not None] == [3, 1, 0, 2]
    assert places.evicted == ["no_value", "superseded", "lru", "lru"]
    assert places.place() is None, "a slot in use was taken"


def test_pinned_bank_loses_its_slot_last() -> None:
    places = Places.of(2)
    places.bank(0, A).pinned = True
    places.bank(1, B)
    assert [p.slot.index for _ in range(2) if (p := places.place()) is not None] == [1, 0]


def test_bank_that_goes_is_handed_out_whole_before_its_slot_is_used() -> None:
    places = Places.of(1)
    slot = places.bank(0, A)
    places.place()
    (write,) = places.written
    assert write.source.reason is PersistReason.EVICT
    slot.memory.planes[0][:] = 255
    assert write.source.content.ids.tolist() == A
    assert rows_of(write, 100) == [i % 251 for i in A]
    assert places.placer.staged_bytes == 800
    write.source.rows.close()
    assert places.placer.staged_bytes == 0


def test_full_staging_takes_another_victim_or_drops_the_bank() -> None:
    places = Places.of(3, staging_tokens=150)
    places.bank(0, A)
    places.bank(1, B)
    places.bank(2, C[:90]).stored = 90  # on disk already: nothing to stage
    taken = [places.place() for _ in range(3)]
    assert [p.slot.index for p in taken if p is not None] == [0, 2, 1]
    assert places.evicted == ["lru", "lru", "dropped"]
    assert [w.source.content.ids[0] for w in places.written] == [0]


def test_bank_cut_in_place_is_staged_as_a_copy() -> None:
    places = Places.of(1)
    slot = places.bank(0, A)
    placement = places.place(proposal(slot, 40, whole=False))
    assert placement is not None
    assert placement.admission is Admission.PARTIAL_TRUNCATE
    assert slot.frontier == 40
    slot.memory.planes[0][40:] = 255
    (write,) = places.written
    assert rows_of(write, 100) == [i % 251 for i in A]


def test_memory_cap_lets_the_oldest_go_and_waits_for_their_writes() -> None:
    places = Places.of(3, memory_tokens=250)
    places.bank(0, A)
    places.bank(1, B)
    assert places.placer.make_room(50 * 8, 0)
    assert places.evicted == []
    assert not places.placer.make_room(100 * 8, 0), "it counts until it is written"
    assert [w.source.content.ids[0] for w in places.written] == [0]
    places.written[0].source.rows.close()
    assert places.placer.make_room(100 * 8, 0)
    assert not places.placer.make_room(100 * 8, 200 * 8)
