"""Which stored banks a prompt finds, and that leases end."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bankkit import (
    FINGERPRINT,
    OTHER_SPACE,
    PLAIN,
    SPACE,
    MemorySink,
    MemorySource,
    Observed,
    Turns,
    config_of,
    eventually,
    ids_of,
    names,
)

from ds4grpc.bank import PersistReason, Record, RecordKind, Trust, common_prefix
from ds4grpc.engine.banks import BankSource, MatchQuery
from ds4grpc.store.store import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store(config_of(tmp_path), Observed()) as store:
        yield store
        await leases_end(store)


async def leases_end(store: Store) -> None:
    """Work of callers that were cancelled goes on for a moment."""
    await eventually(lambda: store.num_leased == 0)


async def found(store: Store, query: MatchQuery) -> list[int]:
    """Frontiers of the candidates, in their order."""
    leases = await store.match(query)
    for lease in leases:
        lease.release()
    return [lease.content.frontier for lease in leases]


async def ids_found(store: Store, query: MatchQuery) -> list[str]:
    leases = await store.match(query)
    for lease in leases:
        lease.release()
    return [lease.bank_id for lease in leases]


async def test_match_next_turn_finds_the_last_bank_first(store: Store) -> None:
    turns = Turns()
    for seed in range(6):
        turns = turns.grow(seed, 40)
        await store.persist(turns.source())
    assert (await found(store, turns.query()))[0] == 240


async def test_match_short_bank_is_found_by_its_mark(store: Store) -> None:
    """Below 256 tokens and 1 KiB of text there is nothing else to find it by."""
    turns = Turns().grow(1, 30)
    await store.persist(turns.source())
    other_split = ids_of(9, 31)  # the rendered prompt's canonical ids are not the bank's
    query = replace(turns.query(), ids=other_split)
    assert await found(store, query) == [30]


async def test_match_finds_a_reply_that_was_cut_among_many_with_its_head(store: Store) -> None:
    """A first turn whose key ends inside the reply: only its anchor leads to it, and the head that
    it has in common with many leads to others."""
    head = Turns(head=300).grow(1, 300)
    for seed in range(2, 16):
        turns = head.grow(seed, 60)
        record = replace(turns.records[0], waypoints=turns.waypoints[-1:], anchor=1400)
        turns = replace(turns, waypoints=record.waypoints, records=(record,))
        await store.persist(turns.source())
        if seed == 2:
            cut = turns
    query = replace(cut.query(), marks=(1200, 1400), ids=np.append(cut.ids[:320], ids_of(99, 90)))
    assert cut.bank_id in await ids_found(store, query)


async def test_match_regenerate_finds_the_child_that_goes_on(store: Store) -> None:
    """The prompt of turn 2 again: only turn 2's bank holds the ids of its user message."""
    first = Turns().grow(1, 60)
    second = first.grow(2, 50)
    await store.persist(first.source())
    await store.persist(second.source())
    query = replace(first.query(), ids=second.cut(80))
    leases = await store.match(query)
    assert {lease.content.frontier for lease in leases} == {60, 110}
    assert max(common_prefix(lease.content.ids, query.ids) for lease in leases) == 80
    for lease in leases:
        lease.release()


async def test_match_by_ids_needs_no_text(store: Store) -> None:
    turns = Turns().grow(1, 700)
    await store.persist(turns.source())
    by_ids = MatchQuery(SPACE, b"", (), turns.cut(600), exact=True)
    assert await found(store, by_ids) == [700]
    too_short = MatchQuery(SPACE, b"", (), turns.cut(200), exact=True)
    assert await found(store, too_short) == []


async def test_match_exact_ignores_keys(store: Store) -> None:
    turns = Turns().grow(1, 40)
    await store.persist(turns.source())
    query = replace(turns.query(exact=True), ids=ids_of(9, 300))
    assert await found(store, query) == []


async def test_match_other_namespace_finds_nothing(store: Store) -> None:
    turns = Turns().grow(1, 400)
    persisted = await store.persist(turns.source())
    theirs = replace(turns, space=OTHER_SPACE)
    assert await found(store, theirs.query()) == []
    again = await store.persist(theirs.source())
    assert again.bank_id != persisted.bank_id
    assert (await store.get(again.bank_id)).base == 0
    assert await found(store, theirs.query()) == [400]


async def test_match_offers_nobody_else_s_bank_whatever_the_catalog_says(
    store: Store, tmp_path: Path
) -> None:
    turns = Turns().grow(1, 400)
    await store.persist(turns.source())
    theirs = replace(turns, space=OTHER_SPACE)
    await store.persist(theirs.source())
    path = tmp_path / FINGERPRINT.hex()[:16] / "catalog.db"
    with closing(sqlite3.connect(path)) as catalog, catalog:
        catalog.execute("update hashes set bank_no = (select max(bank_no) from banks)")
    assert await found(store, turns.query()) == []
    assert await found(store, theirs.query()) == [400]


async def test_match_returns_at_most_four(store: Store) -> None:
    stem = Turns().grow(1, 300)
    await store.persist(stem.source())
    for seed in range(10, 18):
        await store.persist(stem.grow(seed, 40).source())
    assert len(await found(store, stem.query())) == 4


async def test_match_long_prompt_asks_for_a_bounded_number(store: Store) -> None:
    turns = Turns().grow(1, 300)
    await store.persist(turns.source())
    text = turns.text + b"x" * (3 << 20)
    ids = np.concatenate([turns.ids, ids_of(2, 400_000)])
    marks = tuple(range(0, len(text), 100))
    query = MatchQuery(SPACE, text, (*marks, len(turns.text)), ids)
    assert await found(store, query) == [300]


async def test_match_empty_store_and_empty_query_find_nothing(store: Store) -> None:
    assert await found(store, MatchQuery(SPACE, b"", (), ids_of(1, 0))) == []
    assert await found(store, Turns().grow(1, 500).query()) == []


async def test_match_content_is_what_was_persisted(store: Store) -> None:
    turns = Turns(head=20).grow(1, 60).grow(2, 50)
    await store.persist(turns.source())
    (lease, *rest) = await store.match(turns.query())
    stored, content = lease.content, turns.content
    assert np.array_equal(stored.ids, content.ids)
    assert (stored.records, stored.hidden) == (content.records, content.hidden)
    assert (stored.head, stored.namespace) == (20, SPACE)
    for each in (lease, *rest):
        each.release()


async def test_match_cancelled_caller_leaves_no_lease(store: Store) -> None:
    turns = Turns().grow(1, 300)
    await store.persist(turns.source())
    for delay in (0, 0.001, 0.003, 0.01):
        task = asyncio.create_task(store.match(turns.query()))
        await asyncio.sleep(delay)
        task.cancel()
        try:
            for lease in await task:
                lease.release()
        except asyncio.CancelledError:
            pass
        await leases_end(store)


async def test_lease_released_twice_counts_once(store: Store) -> None:
    turns = Turns().grow(1, 300)
    await store.persist(turns.source())
    first, second = (*await store.match(turns.query()), *await store.match(turns.query()))
    first.release()
    first.release()
    assert store.num_leased == 1
    await asyncio.to_thread(second.release)
    assert store.num_leased == 0


async def test_load_cancelled_leaves_the_sink_alone(store: Store) -> None:
    turns = Turns().grow(1, 3000)
    await store.persist(turns.source())
    (lease,) = await store.match(turns.query())
    sink = MemorySink(PLAIN, turns.frontier)
    task = asyncio.create_task(lease.load(turns.frontier, sink))
    await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    before = [bytes(plane) for plane in sink.planes]
    await asyncio.sleep(0.05)
    assert before == [bytes(plane) for plane in sink.planes]
    sink = MemorySink(PLAIN, turns.frontier)
    assert await lease.load(turns.frontier, sink) == lease.load_bytes(turns.frontier)
    sink.assert_holds(MemorySource(PLAIN, turns.ids), turns.frontier, lease.content.held)
    lease.release()


async def test_note_use_is_kept_over_a_restart(tmp_path: Path) -> None:
    turns = Turns().grow(1, 300)
    async with Store(config_of(tmp_path), Observed()) as store:
        bank_id = (await store.persist(turns.source())).bank_id
        assert (await store.get(bank_id)).trust.names() == ("COMMITTED", "KEYED", "DURABLE")
        await store.note_use(bank_id, proven=False)
        await store.note_use(bank_id, proven=True)
        await store.note_use("0" * 32, proven=True)
    async with Store(config_of(tmp_path), Observed()) as store:
        info = await store.get(bank_id)
        assert (info.hits, Trust.PROVEN in info.trust) == (1, True)
        assert info.record_kinds == (RecordKind.VISIBLE,)


async def test_version_moves_with_what_a_lookup_finds(store: Store) -> None:
    turns = Turns().grow(1, 300)
    versions = [store.version]
    bank_id = (await store.persist(turns.source())).bank_id
    versions.append(store.version)
    await store.match(Turns().grow(5, 300).query())
    assert store.version == versions[-1]
    await store.delete(bank_id)
    versions.append(store.version)
    bank_id = (await store.persist(turns.source())).bank_id
    versions.append(store.version)
    await store.quarantine(bank_id, "a check failed")
    versions.append(store.version)
    assert versions == sorted(set(versions))


async def test_persist_without_records_is_found_by_ids_only(store: Store) -> None:
    turns = Turns().grow(1, 300)
    content = replace(turns.content, records=())
    source = BankSource(content, MemorySource(PLAIN, turns.ids), PersistReason.REST)
    bank_id = (await store.persist(source)).bank_id
    assert Trust.KEYED not in (await store.get(bank_id)).trust
    assert await found(store, turns.query()) == [300]


async def test_persist_of_a_stored_bank_writes_nothing(store: Store) -> None:
    turns = Turns().grow(1, 300)
    first = await store.persist(turns.source())
    again = await store.persist(turns.source(pin=True))
    assert (again.bank_id, again.frontier, again.written_bytes) == (first.bank_id, 300, 0)
    assert (await store.get(first.bank_id)).pinned


async def test_persist_of_a_prefix_of_a_stored_bank_writes_nothing(store: Store) -> None:
    turns = Turns().grow(1, 300)
    first = await store.persist(turns.grow(2, 50).source())
    part = await store.persist(turns.source())
    assert (part.bank_id, part.frontier, part.written_bytes) == (first.bank_id, 300, 0)


async def test_persist_below_the_minimum_says_so(store: Store) -> None:
    turns = Turns().grow(1, 15)
    source = turns.source()
    persisted = await store.persist(source)
    assert (persisted.frontier, persisted.written_bytes) == (0, 0)
    assert "16 tokens" in persisted.detail
    assert isinstance(source.rows, MemorySource)
    assert source.rows.closed


async def test_persist_writes_only_what_is_new(tmp_path: Path) -> None:
    observed = Observed()
    async with Store(config_of(tmp_path), observed) as store:
        turns = Turns()
        sizes = []
        for seed in range(8):
            turns = turns.grow(seed, 400)
            before = observed.written_bytes
            bank = await store.persist(turns.source())
            assert bank.written_bytes == observed.written_bytes - before
            sizes.append(bank.written_bytes)
            assert (await store.get(bank.bank_id)).base == 400 * seed
        assert max(sizes) < 1.5 * min(sizes)


async def test_persist_fork_below_the_parents_base_hangs_on_the_grandparent(store: Store) -> None:
    banks = []
    turns = Turns()
    for seed, count in enumerate((500, 300, 300)):
        turns = turns.grow(seed, count)
        banks.append((await store.persist(turns.source())).bank_id)
    assert (await store.get(banks[2])).base == 800
    branch = Turns(ids=turns.cut(780)).grow(7, 200)
    info = await store.get((await store.persist(branch.source())).bank_id)
    assert (info.base, info.parent_id) == (780, banks[1])
    early = Turns(ids=turns.cut(290)).grow(8, 200)
    info = await store.get((await store.persist(early.source())).bank_id)
    assert (info.base, info.parent_id) == (290, banks[0])


async def test_persist_source_that_moves_leaves_nothing(tmp_path: Path) -> None:
    observed = Observed()
    async with Store(config_of(tmp_path), observed) as store:
        turns = Turns().grow(1, 300)
        for checks in range(5):
            rows = MemorySource(PLAIN, turns.ids, moves_after=checks)
            source = BankSource(turns.content, rows, PersistReason.TURN)
            persisted = await store.persist(source)
            assert (persisted.detail, persisted.frontier) == ("moved", 0)
            assert rows.closed
        assert observed.count("persist_failed", "moved") == 5
        assert await store.list_banks() == []
        assert not names(tmp_path, "*.tmp")
        persisted = await store.persist(turns.source())
        assert persisted.detail == ""


async def test_persist_many_at_once_writes_each_once(store: Store) -> None:
    turns = [Turns(head=200)]
    for seed in range(6):
        turns.append(turns[-1].grow(seed, 220))
    results = await asyncio.gather(*(store.persist(turn.source()) for turn in turns[1:] * 2))
    assert all(result.detail == "" for result in results)
    infos = {info.frontier: info for info in await store.list_banks()}
    assert sum(info.frontier - info.base for info in infos.values()) == turns[-1].frontier


async def test_persist_cancelled_caller_does_not_stop_it(store: Store) -> None:
    turns = Turns().grow(1, 300)
    source = turns.source()
    task = asyncio.create_task(store.persist(source))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    second = await store.persist(turns.grow(2, 50).source())  # the catalog is not locked
    assert second.detail == ""
    assert isinstance(source.rows, MemorySource)
    assert source.rows.closed
    assert len(await store.list_banks()) == 2


async def test_restore_chain_with_two_branches_is_bitwise(store: Store) -> None:
    stem = Turns().grow(1, 300)
    branches = [stem.grow(2, 120), stem.grow(3, 90).grow(4, 60)]
    for turns in (stem, *branches):
        await store.persist(turns.source())
    for turns in branches:
        lease, *others = await store.match(turns.query())
        for position in (1, 299, 300, 301, turns.frontier):
            sink = MemorySink(PLAIN, turns.frontier)
            await lease.load(position, sink)
            sink.assert_holds(MemorySource(PLAIN, turns.ids), position, lease.content.held)
        for each in (lease, *others):
            each.release()


async def test_records_of_a_raw_key_find_the_bank_too(store: Store) -> None:
    """A client that replays reasoning and one that drops it: either key leads to the bank."""
    turns = Turns().grow(1, 300)
    raw_text = b"<think>" + turns.text
    end = turns.waypoints[-1].position
    raw = Record(RecordKind.RAW, raw_text, b"r" * 16, (replace(turns.waypoints[-1]),))
    raw = replace(raw, waypoints=(replace(turns.waypoints[-1], offset=len(raw_text)),))
    content = replace(turns.content, records=(*turns.records, raw))
    await store.persist(BankSource(content, MemorySource(PLAIN, turns.ids), PersistReason.TURN))
    for text in (raw_text, turns.text):
        query = MatchQuery(SPACE, text + b"more", (len(text),), ids_of(8, 50))
        assert await found(store, query) == [end]
