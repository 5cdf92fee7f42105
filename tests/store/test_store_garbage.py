"""What is of no use goes when somebody asks for it, and nothing else does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bankkit import Observed, Turns, config_of, eventually, names, stored_names

from ds4grpc.store import store as store_module
from ds4grpc.store.format import file_name
from ds4grpc.store.store import Store

STEM = Turns(head=100).grow(1, 400)
LEFT, RIGHT = STEM.grow(2, 200), STEM.grow(3, 150)
OTHER = Turns().grow(4, 300)


@pytest.fixture(autouse=True)
def no_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes here goes because it was asked for."""
    monkeypatch.setattr(store_module, "UPKEEP_SECONDS", 3600.0)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store(config_of(tmp_path), Observed()) as store:
        yield store


async def gc(store: Store, *, quarantined: bool = False, dry_run: bool = False) -> dict[str, int]:
    """Files by kind."""
    pieces = await store.collect_garbage(quarantined=quarantined, dry_run=dry_run)
    return dict(Counter(str(piece.kind) for piece in pieces))


def plant(folder: Path, name: str, data: bytes = b"x" * 5000) -> Path:
    """A file in the folder that `name`'s first digits belong into."""
    (own,) = (path.parent for path in folder.glob("*/catalog.db"))
    (own / name[:2]).mkdir(mode=0o700, exist_ok=True)
    path = own / name[:2] / name
    path.write_bytes(data)
    return path


def file_of(folder: Path, turns: Turns) -> Path:
    (path,) = folder.rglob(f"{turns.bank_id}.*.bank")
    return path


def quarantined(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/quarantine/*"))


async def assert_counted(store: Store) -> None:
    """What the store believes of the folder's size is what a scan finds."""
    believed = store.disk_bytes
    await store.rescan()
    assert store.disk_bytes == believed


async def test_gc_of_a_clean_folder_removes_nothing(tmp_path: Path, store: Store) -> None:
    for turns in (STEM, LEFT, RIGHT, OTHER):
        await store.persist(turns.source())
    before = names(tmp_path, "*")
    assert await gc(store, quarantined=True) == {}
    assert names(tmp_path, "*") == before
    await assert_counted(store)


async def test_gc_removes_leftovers_of_writes_and_removals(tmp_path: Path, store: Store) -> None:
    stem = (await store.persist(STEM.source(pin=True))).bank_id
    leftovers = [
        plant(tmp_path, f"{stem}.0.bank.tmp"),
        plant(tmp_path, f"{'e' * 32}.0.bank.dead"),
        plant(tmp_path, f"{'e' * 32}.pin", b""),
        plant(tmp_path, f"{'d' * 32}.hidden", b""),
    ]
    before = stored_names(tmp_path)
    assert await gc(store, dry_run=True) == {"leftover": 4}
    assert all(path.exists() for path in leftovers)
    pieces = await store.collect_garbage(quarantined=False, dry_run=False)
    assert sorted(piece.path for piece in pieces) == sorted(map(str, leftovers))
    assert sum(piece.size_bytes for piece in pieces) == 2 * 8192
    assert not any(path.exists() for path in leftovers)
    assert stored_names(tmp_path) == before
    assert names(tmp_path, "*.pin") == [f"{stem}.pin"]
    await assert_counted(store)
    assert await gc(store) == {}


async def test_gc_adopts_good_files_without_a_bank_and_quarantines_others(
    tmp_path: Path, store: Store
) -> None:
    for turns in (STEM, LEFT, OTHER):
        await store.persist(turns.source())
    child, lone = file_of(tmp_path, LEFT), file_of(tmp_path, OTHER)
    data, kept = child.read_bytes(), lone.read_bytes()
    for bank_id in (OTHER.bank_id, LEFT.bank_id, STEM.bank_id):
        await store.delete(bank_id)
    lone.write_bytes(kept)
    child.write_bytes(data)  # its parent is not there any more
    assert await gc(store, dry_run=True) == {"orphan": 2}
    assert await gc(store) == {"orphan": 1}
    assert (await store.get(OTHER.bank_id)).frontier == 300
    assert quarantined(tmp_path) == [child.name]
    await assert_counted(store)
    assert await gc(store) == {}
    assert await gc(store, quarantined=True) == {"quarantined": 1}
    assert quarantined(tmp_path) == []
    await assert_counted(store)


async def test_gc_removes_expired_banks_with_the_deleted_ones_that_they_needed(
    tmp_path: Path, store: Store
) -> None:
    await store.persist(STEM.source())
    await store.persist(LEFT.source(ttl_seconds=0.001))
    await store.persist(OTHER.source(ttl_seconds=1e6))
    await store.delete(STEM.bank_id)
    assert await gc(store, dry_run=True) == {"expired": 1, "deleted": 1}
    assert await gc(store) == {"expired": 1, "deleted": 1}
    kept = {STEM.head_only().bank_id, OTHER.bank_id}
    assert {name.partition(".")[0] for name in stored_names(tmp_path)} == kept
    await assert_counted(store)


async def test_gc_leaves_what_a_lease_or_a_child_needs(tmp_path: Path, store: Store) -> None:
    await store.persist(STEM.source())
    await store.persist(LEFT.source(ttl_seconds=1e6))
    await store.persist(RIGHT.source(ttl_seconds=1.5))
    leases = await store.match(RIGHT.query())
    end = (await store.get(RIGHT.bank_id)).last_used_at + 1.5
    await eventually(lambda: time.time() >= end)  # it expires while it is in use
    for lease in leases:
        if lease.bank_id != RIGHT.bank_id:
            lease.release()
    await store.delete(STEM.bank_id)
    before = stored_names(tmp_path)
    assert await gc(store) == {}
    assert stored_names(tmp_path) == before
    for lease in leases:
        lease.release()
    assert await gc(store) == {"expired": 1}  # LEFT needs the deleted one still
    assert before - stored_names(tmp_path) == {file_name(RIGHT.bank_id, 400)}


async def test_gc_removes_files_that_merging_replaced_once_nobody_reads_them(
    tmp_path: Path, store: Store
) -> None:
    turns = Turns()
    for seed in range(34):
        turns = turns.grow(seed, 40)
        await store.persist(turns.source())
    leases = await store.match(turns.query())
    files = stored_names(tmp_path)
    assert await store.compact() == 1
    replaced = files & stored_names(tmp_path)
    assert replaced
    assert await gc(store, dry_run=True) == {}
    assert await gc(store) == {}
    for lease in leases:
        lease.release()
    found = await gc(store)
    assert set(found) == {"retired"}
    assert await gc(store) == {}
    await assert_counted(store)
