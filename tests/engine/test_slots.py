"""Slots: a random walk over every move, with `check()` after each."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ds4grpc.bank import Record, RecordKind, Waypoint
from ds4grpc.engine.banks import SourceMoved
from ds4grpc.engine.memory import HostMemory, SlotMemory
from ds4grpc.engine.slots import DetachedRows, Slot, SlotRows, Slots, SlotState
from ds4grpc.layout import Rows, Spans, StateLayout
from ds4grpc.model.interface import State

LAYOUT = StateLayout("test", (Rows("k", 8), Rows("c", 16, tokens_per_row=4), Rows("w", 8, 1, 16)))
CONTEXT = 256
SPACE = b"n" * 32


def new_memory() -> tuple[SlotMemory, State]:
    memory = HostMemory(LAYOUT, CONTEXT)
    return memory, State(memory.planes)


def new_slots(count: int = 3) -> Slots:
    return Slots(LAYOUT, count, CONTEXT, new_memory)


def record(position: int) -> Record:
    key = b"x" * (position * 2)
    return Record(RecordKind.RAW, key, b"r" * 16, (Waypoint(len(key), position),))


def fill(slot: Slot, ids: list[int]) -> None:
    """Writes the rows of `ids` at the frontier as a model would."""
    for offset, token_id in enumerate(ids):
        slot.memory.planes[0][slot.frontier + offset] = token_id % 251


@pytest.mark.parametrize("seed", range(20))
def test_slots_random_moves_keep_every_invariant(seed: int) -> None:
    draw = random.Random(seed)
    slots = new_slots(4)
    for step in range(200):
        slot = slots[draw.randrange(4)]
        before = (slot.generation, slot.frontier)
        match slot.state:
            case SlotState.FREE:
                if draw.random() < 0.5:
                    slots.activate(slot, SPACE)
                else:
                    sources = [s for s in slots if s is not slot and s.frontier]
                    slots.load(slot, SPACE)
                    if sources and draw.random() < 0.7:
                        source = draw.choice(sources)
                        cut = draw.randint(1, source.frontier)
                        slot.memory.copy_from(source.memory, cut)
                        slots.loaded(slot, source.content(), cut)
                        assert slot.ids[:cut].tolist() == source.ids[:cut].tolist()
                    else:
                        slots.load_failed(slot)
                assert slot.generation > before[0]
            case SlotState.ACTIVE:
                room = CONTEXT - slot.frontier
                if room and draw.random() < 0.6:
                    ids = [draw.randrange(1000) for _ in range(min(room, draw.randint(1, 20)))]
                    fill(slot, ids)
                    slots.commit(slot, ids)
                    assert slot.generation == before[0], "extension moved the generation"
                elif slot.frontier and draw.random() < 0.5:
                    slots.truncate(slot, draw.randrange(slot.frontier + 1))
                    assert (slot.generation > before[0]) == (slot.frontier < before[1])
                else:
                    made = (record(slot.frontier),) if slot.frontier else ()
                    slots.retire(slot, made, step)
            case SlotState.IDLE:
                choice = draw.randrange(3)
                if choice == 0:
                    slots.activate(slot, SPACE)
                elif choice == 1:
                    slots.release(slot)
                else:
                    slots.detach(slot)
        slots.check()


def test_truncate_forgets_records_and_hidden_spans_beyond_the_cut() -> None:
    slots = new_slots()
    slot = slots[0]
    slots.activate(slot, SPACE)
    slots.commit(slot, range(100))
    slot.hidden = Spans.of([(10, 20), (60, 70)])
    slots.retire(slot, (record(50), record(100)), 0.0)
    slots.truncate(slot, 60)
    assert [r.end.position for r in slot.records if r.end] == [50]
    assert slot.hidden.pairs == ((10, 20),)
    assert slot.held.pairs == ((0, 60),)


def test_reader_of_a_slot_learns_that_it_was_cut() -> None:
    slots = new_slots()
    slot = slots[0]
    slots.activate(slot, SPACE)
    slots.commit(slot, range(40))
    rows = SlotRows(slot)
    rows.view(0, 0, 40)
    slots.commit(slot, range(10))
    rows.check()  # extension changes nothing that was there
    slots.truncate(slot, 30)
    with pytest.raises(SourceMoved):
        rows.check()
    slots.commit(slot, range(10))
    with pytest.raises(SourceMoved):
        rows.check()  # the same length again is not the same content


def test_detached_rows_outlive_the_slot_and_close_once() -> None:
    slots = new_slots()
    slot = slots[0]
    slots.activate(slot, SPACE)
    fill(slot, list(range(40)))
    slots.commit(slot, range(40))
    slots.retire(slot, (), 0.0)
    closed: list[int] = []
    rows = DetachedRows(slots.detach(slot), lambda: closed.append(1))
    slots.activate(slot, SPACE)
    fill(slot, [250] * 40)
    view = np.frombuffer(rows.view(0, 0, 40), dtype=np.uint8).reshape(40, 8)
    assert view[:, 0].tolist() == list(range(40))
    rows.close()
    rows.close()
    assert closed == [1]
    with pytest.raises(SourceMoved):
        rows.view(0, 0, 1)


def test_superseded_is_the_shorter_of_two_banks_with_one_beginning() -> None:
    slots = new_slots()
    for slot, length in ((slots[0], 30), (slots[1], 40), (slots[2], 40)):
        slots.activate(slot, SPACE)
        slots.commit(slot, range(length))
        slots.retire(slot, (), 0.0)
    assert [slots.superseded(slot) for slot in slots] == [True, True, False]


def test_memory_gives_back_what_a_short_bank_does_not_need() -> None:
    layout = StateLayout("big", (Rows("k", 4096), Rows("v", 4096)))
    memory = HostMemory(layout, 1000)
    memory.planes[0][:] = 7
    memory.planes[1][:] = 7
    before = resident_kilobytes()
    memory.give_back(100)
    assert before - resident_kilobytes() > 6000
    assert int(memory.planes[0][99].sum()) == 7 * 4096
    assert int(memory.planes[0][100].sum()) == 0


def test_memory_takes_only_what_is_touched() -> None:
    before = resident_kilobytes()
    layout = StateLayout("huge", (Rows("k", 4096),))
    memory = HostMemory(layout, 1_000_000)  # 4 GB of address space
    memory.planes[0][:10] = 1
    assert isinstance(memory.planes[0], torch.Tensor)
    assert resident_kilobytes() - before < 10_000


def resident_kilobytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
