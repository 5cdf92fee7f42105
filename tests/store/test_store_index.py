"""The index in memory and the lookup hashes, without files."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from bankkit import OTHER_SPACE, RENDERER, SPACE, Turns, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4grpc.bank import PersistReason, Record, RecordKind, Trust, Waypoint
from ds4grpc.engine.banks import MatchQuery
from ds4grpc.layout import Spans
from ds4grpc.store.index import HIT_HALF_LIFE_SECONDS, Entry, Index
from ds4grpc.store.keys import Mark, bank_marks, parent_digests, query_digests


def entry(number: int, parent: int | None = None, last_used_at: float = 0.0) -> Entry:
    return Entry(
        bank_id=f"{number:032x}",
        namespace=SPACE,
        parent_id="" if parent is None else f"{parent:032x}",
        base=0 if parent is None else number,
        frontier=1000,
        head=0,
        size_bytes=100 + number,
        reason=PersistReason.TURN,
        record_kinds=(),
        hidden_tokens=0,
        trust=Trust.COMMITTED | Trust.DURABLE,
        created_at=0.0,
        last_used_at=last_used_at,
    )


def index_of(*entries: Entry) -> Index:
    index = Index()
    for each in entries:
        index.add(each)
    return index


def test_victims_come_least_recently_used_first_and_leaves_only() -> None:
    index = index_of(
        *(entry(1, last_used_at=1.0), entry(2, 1, 9.0), entry(3, last_used_at=5.0)),
    )
    order = []
    while (victim := index.pop_victim(())) is not None:
        order.append(int(victim.bank_id, 16))
    assert order == [3, 2, 1]
    assert (len(index), index.num_bytes) == (0, 0)


def test_hit_is_worth_six_hours_and_fades() -> None:
    hit, fresh = entry(1, last_used_at=0.0), entry(2, last_used_at=HIT_HALF_LIFE_SECONDS - 1)
    index = index_of(hit, fresh)
    index.used(hit, 0.0)
    assert hit.worth > fresh.worth
    newer = entry(3, last_used_at=HIT_HALF_LIFE_SECONDS + 1)
    index.add(newer)
    assert hit.worth < newer.worth


def test_hit_fades_as_others_are_evicted() -> None:
    """A favourite that nobody asks for any more goes, however little time passes."""
    favourite = entry(1, last_used_at=0.0)
    index = index_of(favourite)
    for second in range(8):
        index.used(favourite, float(second))
    for number in range(2, 200):
        index.add(entry(number, last_used_at=10.0))
        if number > 10:
            victim = index.pop_victim(())
            assert victim is not None
            if victim is favourite:
                assert number > 20  # not at once
                return
    raise AssertionError("the favourite stays for ever")


def test_superseded_bank_goes_first() -> None:
    index = index_of(*(entry(number, last_used_at=number) for number in range(5)))
    newest = index.get(f"{4:032x}")
    assert newest is not None
    index.set_superseded(newest)
    assert index.pop_victim(()) is newest


def test_bank_whose_bytes_are_mostly_rows_outlives_one_whose_are_not() -> None:
    """Both have been used alike; a hit on the first saves more for each byte it takes."""
    index = Index(bytes_per_token=1.0)
    dense, sparse = (entry(number, last_used_at=1.0) for number in (1, 2))
    dense.size_bytes, sparse.size_bytes = dense.frontier, 20 * sparse.frontier
    for each in (sparse, dense):
        index.add(each)
        for _ in range(3):
            index.used(each, 2.0)
    assert index.pop_victim(()) is sparse


def test_victim_is_neither_pinned_nor_spared() -> None:
    index = index_of(*(entry(number, last_used_at=number) for number in range(5)))
    first = index.get(f"{0:032x}")
    assert first is not None
    index.set_pinned(first, pinned=True)
    victim = index.pop_victim({f"{1:032x}"})
    assert victim is not None
    assert victim.bank_id == f"{2:032x}"
    index.set_pinned(first, pinned=False)
    assert index.pop_victim({f"{1:032x}"}) is first
    assert index.pop_victim(()) is not None  # what was spared is still there


def test_protected_bytes_count_each_ancestor_once() -> None:
    index = index_of(entry(1), entry(2, 1), entry(3, 1), entry(4, 3), entry(5))
    left = index.get(f"{2:032x}")
    assert left is not None
    index.set_pinned(left, pinned=True)
    assert index.protected_bytes([f"{4:032x}"]) == 101 + 102 + 103 + 104
    assert [each.bank_id[-1] for each in index.chain(left)] == ["1", "2"]
    root = index.get(f"{1:032x}")
    assert root is not None
    assert {each.bank_id[-1] for each in index.descendants(root)} == set("1234")


@given(seed=st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_index_agrees_with_a_plain_model(seed: int) -> None:
    """A random walk of everything that moves the order, against sorting from scratch."""
    chance = random.Random(seed)
    index, model, number = Index(), dict[str, Entry](), 0
    for _ in range(120):
        move = chance.choice(["add", "add", "use", "pin", "evict"])
        known = list(model.values())
        if move == "add":
            number += 1
            parent = (
                int(chance.choice(known).bank_id, 16) if known and chance.random() < 0.5 else None
            )
            each = entry(number, parent, chance.random() * 1e5)
            index.add(each)
            model[each.bank_id] = each
        elif move == "use" and known:
            index.used(chance.choice(known), chance.random() * 1e5)
        elif move == "pin" and known:
            each = chance.choice(known)
            index.set_pinned(each, pinned=not each.pinned)
        elif move == "evict":
            spared = {each.bank_id for each in chance.sample(known, len(known) // 4)}
            allowed = [
                each
                for each in known
                if not each.pinned
                and each.bank_id not in spared
                and not any(other.parent_id == each.bank_id for other in known)
            ]
            victim = index.pop_victim(spared)
            best = min(allowed, key=lambda each: (each.worth, each.bank_id), default=None)
            assert victim is best
            if victim is not None:
                del model[victim.bank_id]
        assert len(index) == len(model)
        assert index.num_bytes == sum(each.size_bytes for each in model.values())
        assert index.num_pinned == sum(each.pinned for each in model.values())


def test_children_come_most_recently_used_first() -> None:
    index = index_of(entry(1), entry(2, 1, 5.0), entry(3, 1, 9.0), entry(4, 1, 7.0))
    root = index.get(f"{1:032x}")
    assert root is not None
    assert [each.bank_id[-1] for each in index.children(root)] == ["4", "3", "2"]
    index.order_children()
    assert [each.bank_id[-1] for each in index.children(root)] == ["3", "4", "2"]
    first = index.get(f"{2:032x}")
    assert first is not None
    index.used(first, 20.0)
    assert [each.bank_id[-1] for each in index.children(root)] == ["2", "3", "4"]


def test_time_to_live_and_pin() -> None:
    brief = replace(entry(1, last_used_at=100.0), ttl_seconds=10.0)
    assert brief.is_usable(109.0)
    assert not brief.is_usable(110.0)
    brief.pinned = True
    assert brief.is_usable(1e9)


@pytest.mark.parametrize("flag", [Trust.COMMITTED, Trust.DURABLE])
def test_bank_without_a_needed_flag_is_not_usable(flag: Trust) -> None:
    each = entry(1)
    each.trust &= ~flag
    assert not each.is_usable(0.0)
    each.trust |= flag
    assert each.is_usable(0.0)
    each.trust |= Trust.QUARANTINED
    assert not each.is_usable(0.0)


def digests(marks: list[Mark]) -> dict[bytes, int]:
    return {mark.digest: mark.position for mark in marks}


def test_marks_of_a_child_leave_out_what_the_parent_has() -> None:
    parent = Turns().grow(1, 700)
    child = parent.grow(2, 300)
    theirs = digests(bank_marks(SPACE, parent.ids, parent.records, 0, 0))
    own = digests(bank_marks(SPACE, child.ids, child.records, 700, 0))
    assert not set(theirs) & set(own)
    assert min(own.values()) >= 700
    assert set(own.values()) >= {768, 1000}


def test_marks_before_the_first_reply_are_of_ids_only() -> None:
    """A preamble that thousands of conversations share must not be in each one's rows."""
    preamble = "x" * 10_000
    record = Record(RecordKind.RAW, preamble.encode(), RENDERER, (Waypoint(10_000, 500),))
    marks = bank_marks(SPACE, ids_of(1, 500), [record], 0, 0)
    assert sorted(mark.position for mark in marks) == [256, 500, 500]


def test_query_meets_the_marks_it_should() -> None:
    turns = Turns().grow(1, 700).grow(2, 600)
    marks = digests(bank_marks(SPACE, turns.ids, turns.records, 0, 0))
    met = {marks[digest] for digest in query_digests(turns.query()) if digest in marks}
    assert {256, 512, 700, 1024, 1280, 1300} <= met
    exact = {marks[digest] for digest in query_digests(turns.query(exact=True)) if digest in marks}
    assert exact == {256, 512, 768, 1024, 1280}
    other = replace(turns.query(), namespace=OTHER_SPACE)
    assert not set(query_digests(other)) & set(marks)


def test_text_past_a_reply_is_met_at_each_kilobyte() -> None:
    key = b"a" * 1500 + b"b" * 3000
    record = Record(RecordKind.VISIBLE, key, RENDERER, (Waypoint(1500, 300),))
    marks = digests(bank_marks(SPACE, ids_of(1, 900), [record], 0, 0))
    query = MatchQuery(SPACE, key[:4200] + b"other", (), ids_of(2, 10))
    assert [marks[digest] for digest in query_digests(query) if digest in marks] == [300] * 3


def test_parent_is_met_at_its_frontier_and_at_the_head() -> None:
    turns = Turns(head=77).grow(1, 200)
    marks = digests(bank_marks(SPACE, turns.ids, (), 0, 0))
    head = digests(bank_marks(SPACE, turns.cut(77), (), 0, 0))
    asked = set(parent_digests(turns.grow(2, 30).content))
    assert asked & set(marks)
    assert asked & set(head)


def test_lookup_of_a_huge_prompt_stays_bounded() -> None:
    query = MatchQuery(SPACE, b"x" * 5_000_000, tuple(range(1000)), ids_of(1, 500_000))
    assert len(query_digests(query)) <= 512 + 512 + 256 + 1


def test_marks_name_positions_of_hidden_waypoints_in_order() -> None:
    record = Record(
        RecordKind.VISIBLE, b"abcdef", RENDERER, (Waypoint(2, 40), Waypoint(2, 60), Waypoint(6, 90))
    )
    marks = bank_marks(SPACE, ids_of(1, 100), [record], 0, 0)
    assert sorted(mark.position for mark in marks) == [60, 90, 100]
    assert Spans.of([(0, 4), (2, 9)]) & Spans.of([(3, 5), (8, 20)]) == Spans.of([(3, 5), (8, 9)])
