"""Listing, deleting, pinning, verifying, rescanning; and what becomes of damaged files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bankkit import (
    FINGERPRINT,
    OTHER_SPACE,
    PLAIN,
    SPACE,
    MemorySink,
    Observed,
    Turns,
    config_of,
    names,
)

from ds4grpc.errors import (
    BankCorrupt,
    BankInUse,
    BankNotFound,
    BankPinned,
    StoreDisabled,
    StoreFailed,
)
from ds4grpc.layout import StateLayout
from ds4grpc.store.store import Deleted, Store, StoreConfig

STEM = Turns(head=100).grow(1, 400)
LEFT, RIGHT = STEM.grow(2, 200), STEM.grow(3, 150)


@pytest.fixture
async def observed() -> Observed:
    return Observed()


@pytest.fixture
async def store(tmp_path: Path, observed: Observed) -> AsyncIterator[Store]:
    async with Store(config_of(tmp_path), observed) as store:
        yield store
        assert store.num_leased == 0


async def persist(store: Store, *all_turns: Turns) -> list[str]:
    return [(await store.persist(turns.source())).bank_id for turns in all_turns]


async def is_found(store: Store, turns: Turns) -> bool:
    leases = await store.match(turns.query())
    for lease in leases:
        lease.release()
    return any(lease.content.frontier == turns.frontier for lease in leases)


def bank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/??/*.bank"))


async def test_list_shows_all_and_whose_they_are(store: Store) -> None:
    await persist(store, STEM, Turns(space=OTHER_SPACE).grow(1, 400))
    infos = await store.list_banks()
    assert sorted((info.frontier, info.namespace == SPACE) for info in infos) == [
        *((100, True), (400, False), (400, True))  # the head of STEM is a bank too
    ]


async def test_unknown_bank_is_not_found_by_any_call(store: Store) -> None:
    for call in (store.get, store.read, store.delete, store.pin, store.unpin):
        with pytest.raises(BankNotFound):
            await call("0" * 32)
    with pytest.raises(BankNotFound):
        await anext(store.verify(["0" * 32]))


async def test_read_gives_records_and_ids(store: Store) -> None:
    (stem,) = await persist(store, STEM)
    content = await store.read(stem)
    assert content.records == STEM.records
    assert len(content.ids) == 400


async def test_delete_removes_file_and_row(tmp_path: Path, store: Store) -> None:
    stem, left = await persist(store, STEM, LEFT)
    size_bytes = (await store.get(left)).size_bytes
    assert await store.delete(left) == Deleted(size_bytes, hidden=False)
    assert not await is_found(store, LEFT)
    assert len(bank_files(tmp_path)) == 2
    with pytest.raises(BankNotFound):
        await store.delete(left)
    assert await is_found(store, STEM)
    assert stem != left


async def test_delete_of_a_parent_hides_it_until_its_children_go(
    tmp_path: Path, observed: Observed
) -> None:
    async with Store(config_of(tmp_path), observed) as store:
        stem, left, right = await persist(store, STEM, LEFT, RIGHT)
        assert await store.delete(stem) == Deleted(0, hidden=True)
        assert not await is_found(store, STEM)
        assert await is_found(store, LEFT)
        assert stem not in {info.bank_id for info in await store.list_banks()}
        assert store.banks_by_trust["untrusted"] == 1
        with pytest.raises(BankNotFound):
            await store.get(stem)
    async with Store(config_of(tmp_path), observed) as store:  # it stays deleted
        assert stem not in {info.bank_id for info in await store.list_banks()}
        leases = await store.match(LEFT.query())
        assert await leases[0].load(600, MemorySink(PLAIN, 600)) > 0
        for lease in leases:
            lease.release()
        await store.delete(left)
        assert any(stem in path.name for path in bank_files(tmp_path))
        freed = await store.delete(right)
        assert freed.freed_bytes > 0
        assert not any(stem in path.name for path in bank_files(tmp_path))
        assert not names(tmp_path, "*.hidden")
        assert [info.frontier for info in await store.list_banks()] == [100]


async def test_deleted_parent_that_is_written_again_is_back(store: Store) -> None:
    stem, _ = await persist(store, STEM, LEFT)
    await store.delete(stem)
    assert await persist(store, STEM) == [stem]
    assert await is_found(store, STEM)
    assert (await store.get(stem)).frontier == 400


async def test_turn_that_shares_a_deleted_banks_rows_keeps_them(
    tmp_path: Path, store: Store
) -> None:
    stem, left = await persist(store, STEM, LEFT)
    await store.delete(stem)
    (right,) = await persist(store, RIGHT)
    await store.delete(left)
    assert await is_found(store, RIGHT)
    await store.delete(right)
    assert not any(stem in path.name for path in bank_files(tmp_path))


async def test_delete_of_a_pinned_bank_is_refused(store: Store) -> None:
    (stem,) = await persist(store, STEM)
    await store.pin(stem)
    with pytest.raises(BankPinned):
        await store.delete(stem)
    await store.unpin(stem)
    await store.delete(stem)


async def test_delete_of_a_bank_in_use_is_refused(store: Store) -> None:
    (stem,) = await persist(store, STEM)
    leases = await store.match(STEM.query())
    with pytest.raises(BankInUse):
        await store.delete(stem)
    for lease in leases:
        lease.release()
    assert (await store.delete(stem)).freed_bytes > 0


async def test_pin_twice_and_unpin_twice_are_no_errors(tmp_path: Path, store: Store) -> None:
    (stem,) = await persist(store, STEM)
    for _ in range(2):
        assert (await store.pin(stem)).pinned
    assert names(tmp_path, "*.pin") == [f"{stem}.pin"]
    assert (await store.storage()).num_pinned == 1
    for _ in range(2):
        assert not (await store.unpin(stem)).pinned
    assert not names(tmp_path, "*.pin")


async def test_storage_tells_the_truth(tmp_path: Path, store: Store) -> None:
    await persist(store, STEM, LEFT)
    storage = await store.storage()
    assert storage.folder == str(tmp_path / FINGERPRINT.hex()[:16])
    assert (storage.num_stored, storage.num_quarantined) == (3, 0)
    assert (
        storage.disk_bytes
        == store.disk_bytes
        > sum(path.stat().st_size for path in bank_files(tmp_path))
    )
    assert storage.free_bytes > 0


async def test_everything_is_private(tmp_path: Path, store: Store) -> None:
    (stem,) = await persist(store, STEM)
    await store.pin(stem)
    assert modes_below(tmp_path) == {0o600, 0o700}


def quarantined(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/quarantine/*"))


def modes_below(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*")}


def a_shard(folder: Path) -> Path:
    return next(folder.glob("*/??/"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


async def test_verify_reports_and_quarantines(tmp_path: Path, store: Store) -> None:
    stem, left, right = await persist(store, STEM, LEFT, RIGHT)
    bad = next(path for path in bank_files(tmp_path) if path.name.startswith(left))
    flip(bad, bad.stat().st_size - 4096)
    verdicts = {verdict.bank_id: verdict async for verdict in store.verify()}
    assert {bank_id for bank_id, verdict in verdicts.items() if not verdict.ok} == {left}
    assert "checksum" in verdicts[left].detail
    assert sorted(verdict.done for verdict in verdicts.values()) == [1, 2, 3, 4]
    assert verdicts[right].read_bytes > 0
    assert (await store.get(stem)).verified_at is not None
    assert store.banks_by_trust["quarantined"] == 1
    assert quarantined(tmp_path) == [bad.name]
    assert not await is_found(store, LEFT)
    assert await is_found(store, RIGHT)


async def test_load_of_a_damaged_ancestor_is_a_miss_for_all_that_need_it(
    tmp_path: Path, store: Store, observed: Observed
) -> None:
    stem, _, _ = await persist(store, STEM, LEFT, RIGHT)
    bad = next(path for path in bank_files(tmp_path) if path.name.startswith(stem))
    flip(bad, bad.stat().st_size - 5000)
    leases = await store.match(LEFT.query())
    with pytest.raises(BankCorrupt) as caught:
        await leases[0].load(600, MemorySink(PLAIN, 600))
    assert caught.value.kind == "checksum"
    for lease in leases:
        lease.release()
    assert observed.count("restored", "checksum") == 1
    assert not await is_found(store, LEFT)
    assert not await is_found(store, RIGHT)
    assert [info.frontier for info in await store.list_banks()] == [100]
    assert await persist(store, LEFT) != [""]  # and it is written anew
    assert await is_found(store, LEFT)


async def test_match_of_a_truncated_file_is_a_miss_once(
    tmp_path: Path, store: Store, observed: Observed
) -> None:
    (bank_id,) = await persist(store, Turns().grow(1, 400))
    os.truncate(bank_files(tmp_path)[0], 5000)
    for _ in range(3):
        assert await store.match(Turns().grow(1, 400).query()) == []
    assert observed.count("restored", "truncated") == 1
    with pytest.raises(BankNotFound):
        await store.get(bank_id)


async def test_load_of_a_vanished_file_is_a_miss(tmp_path: Path, store: Store) -> None:
    turns = Turns().grow(1, 400)
    await persist(store, turns)
    (lease,) = await store.match(turns.query())
    bank_files(tmp_path)[0].unlink()
    with pytest.raises(BankCorrupt) as caught:
        await lease.load(400, MemorySink(PLAIN, 400))
    assert caught.value.kind == "io"
    lease.release()
    assert await store.list_banks() == []


async def test_load_of_a_swapped_file_is_refused(tmp_path: Path, store: Store) -> None:
    """A valid bank file of the same name and ids, but with another parent."""
    await persist(store, STEM, LEFT)
    other = tmp_path / "other"
    async with Store(config_of(other, min_tokens=450), Observed()) as elsewhere:
        long = Turns().grow(1, 400).grow(2, 200)
        await elsewhere.persist(long.source())
    (whole,) = bank_files(other)
    lease, *others = await store.match(LEFT.query())
    target = next(path for path in bank_files(tmp_path) if path.name.startswith(lease.bank_id))
    shutil.copy(whole, target)
    with pytest.raises(BankCorrupt):
        await lease.load(600, MemorySink(PLAIN, 600))
    for each in (lease, *others):
        each.release()


async def test_quarantine_keeps_the_newest_few(tmp_path: Path, store: Store) -> None:
    for seed in range(20):
        (bank_id,) = await persist(store, Turns().grow(seed, 40))
        await store.quarantine(bank_id, "a check failed")
    assert len(quarantined(tmp_path)) == 16


async def test_rescan_adopts_and_drops(tmp_path: Path, store: Store) -> None:
    stem, left, _ = await persist(store, STEM, LEFT, RIGHT)
    saved = tmp_path / "saved"
    left_file = next(path for path in bank_files(tmp_path) if path.name.startswith(left))
    left_file.rename(saved)
    result = await store.rescan()
    assert (result.num_banks, result.num_adopted, result.num_dropped) == (3, 0, 1)
    assert not await is_found(store, LEFT)
    saved.rename(left_file)
    result = await store.rescan()
    assert (result.num_banks, result.num_adopted, result.num_dropped) == (4, 1, 0)
    assert await is_found(store, LEFT)
    assert (await store.get(left)).parent_id == stem


async def test_rescan_beside_traffic_loses_nothing(store: Store) -> None:
    turns = [Turns(head=100)]
    for seed in range(5):
        turns.append(turns[-1].grow(seed, 150))

    async def rescans() -> None:
        for _ in range(4):
            await store.rescan()

    await asyncio.gather(rescans(), *(store.persist(each.source()) for each in turns[1:]))
    for each in turns[1:]:
        assert await is_found(store, each)


async def test_start_quarantines_what_is_no_bank(tmp_path: Path, observed: Observed) -> None:
    async with Store(config_of(tmp_path), observed) as store:
        await persist(store, STEM, LEFT)
    shard = a_shard(tmp_path)
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    planted = [f"{shard.name}{number:030d}.0.bank" for number in range(3)]
    (shard / planted[0]).write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")
    (shard / planted[1]).symlink_to(canary)
    (shard / planted[2]).mkdir()
    (shard / "notes.txt").write_text("left alone")
    (shard / ("a" * 32 + ".0.bank.tmp")).write_bytes(b"half")
    (tmp_path / FINGERPRINT.hex()[:16] / "zz").symlink_to(tmp_path)
    async with Store(config_of(tmp_path), observed) as store:
        assert len(await store.list_banks()) == 3
        assert await is_found(store, LEFT)
    assert quarantined(tmp_path) == planted
    assert canary.read_text() == "untouched"
    assert (shard / "notes.txt").exists()
    assert not names(tmp_path, "*.tmp")
    assert observed.count("restored", "format") == 1


async def test_start_drops_a_bank_whose_parent_is_gone(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        stem, *_ = await persist(store, STEM, LEFT, RIGHT)
    next(path for path in bank_files(tmp_path) if path.name.startswith(stem)).unlink()
    async with Store(config_of(tmp_path), Observed()) as store:
        assert [info.frontier for info in await store.list_banks()] == [100]
        assert len(quarantined(tmp_path)) == 2


async def test_start_with_two_files_of_one_bank_keeps_the_rows(tmp_path: Path) -> None:
    """As after a crash between writing a compacted file and removing the old one."""
    async with Store(config_of(tmp_path), Observed()) as store:
        await persist(store, STEM, LEFT)
    async with Store(config_of(tmp_path / "other", min_tokens=450), Observed()) as elsewhere:
        await elsewhere.persist(LEFT.source())
    (whole,) = bank_files(tmp_path / "other")
    second = a_shard(tmp_path).parent / whole.parent.name / whole.name
    shutil.copy(whole, second)
    async with Store(config_of(tmp_path), Observed()) as store:
        assert not second.exists()
        assert await is_found(store, LEFT)
        assert len(await store.list_banks()) == 3


async def test_second_owner_is_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        await persist(store, STEM)
        with pytest.raises(StoreDisabled, match="another process owns") as caught:
            async with Store(config_of(tmp_path), Observed()):
                pass
        assert caught.value.reason == "STORE_FOLDER_BUSY"
        assert await is_found(store, STEM)
    async with Store(config_of(tmp_path), Observed()) as store:
        assert await is_found(store, STEM)


async def test_two_models_share_a_folder(tmp_path: Path) -> None:
    other = StoreConfig(str(tmp_path), b"other model".ljust(32), PLAIN, 1 << 30, 16)
    async with Store(config_of(tmp_path), Observed()) as mine, Store(other, Observed()) as theirs:
        mine_id, theirs_id = await persist(mine, STEM), await persist(theirs, STEM)
        assert mine_id != theirs_id
        assert await is_found(mine, STEM)
        assert await is_found(theirs, STEM)
    async with Store(config_of(tmp_path), Observed()) as mine:
        assert len(await mine.list_banks()) == 2


async def test_layout_that_changed_under_one_fingerprint_finds_nothing(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        await persist(store, STEM)
    changed = StateLayout("plain/2", PLAIN.rows)
    async with Store(config_of(tmp_path, changed), Observed()) as store:
        assert not await is_found(store, STEM)


@pytest.mark.parametrize("kind", ["file", "link", "below a file"])
async def test_folder_that_cannot_be_used_disables_the_store(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "banks"
    if kind == "file":
        folder.write_text("")
    elif kind == "link":
        folder.mkdir()
        (folder / FINGERPRINT.hex()[:16]).symlink_to(tmp_path)
    else:
        (tmp_path / "plain").write_text("")
        folder = tmp_path / "plain" / "banks"
    with pytest.raises(StoreDisabled, match="--kv-disk-dir") as caught:
        async with Store(config_of(folder), Observed()):
            pass
    assert caught.value.reason == "STORE_FOLDER_UNUSABLE"


async def test_folder_may_be_named_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    os.symlink(tmp_path / "large disk", tmp_path / "banks")
    async with Store(config_of(tmp_path / "banks"), Observed()) as store:
        await persist(store, STEM)
        assert await is_found(store, STEM)
    assert bank_files(tmp_path / "large disk")


async def test_b23_linked_shard_leads_nothing_out_of_the_folder(tmp_path: Path) -> None:
    """Somebody replaces the folder that a bank lies in by a link to a folder of his own."""
    home = tmp_path / "banks" / FINGERPRINT.hex()[:16]
    async with Store(config_of(tmp_path / "banks"), Observed()) as store:
        (bank_id,) = await persist(store, STEM)
        link_out(home / bank_id[:2], tmp_path / "outside")
        before = stored_files(tmp_path / "outside")
        assert not await is_found(store, STEM)
        with contextlib.suppress(StoreFailed, BankNotFound):
            await store.delete(bank_id)
        assert stored_files(tmp_path / "outside") == before
    async with Store(config_of(tmp_path / "banks"), Observed()) as store:
        assert not await is_found(store, STEM)
    assert stored_files(tmp_path / "outside") == before


def link_out(shard: Path, outside: Path) -> None:
    shard.rename(outside)
    shard.symlink_to(outside)


def stored_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make_folders(shard: Path) -> None:
    for number in range(20):
        (shard / f"ab{number:030x}.0.bank").mkdir(parents=True)


async def test_folders_named_like_banks_do_no_harm(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        await persist(store, STEM)
    make_folders(tmp_path / FINGERPRINT.hex()[:16] / "ab")
    async with Store(config_of(tmp_path), Observed()) as store:
        assert await is_found(store, STEM)
