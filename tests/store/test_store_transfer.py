"""Banks leave as one file and come in as one: bit for bit, whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from bankkit import (
    FINGERPRINT,
    LAYOUTS,
    OTHER_SPACE,
    PLAIN,
    SPACE,
    TAILED,
    DyingFiles,
    MemorySink,
    MemorySource,
    Observed,
    Turns,
    config_of,
    eventually,
    names,
    stored_names,
)

from ds4grpc.bank import PersistReason, Trust
from ds4grpc.bank import bank_id as bank_id_of
from ds4grpc.errors import (
    BankCorrupt,
    BankInUse,
    BankNotFound,
    Ds4grpcError,
    InvalidRequest,
    Overloaded,
    PreconditionFailed,
    StoreFull,
)
from ds4grpc.layout import StateLayout
from ds4grpc.store import transfer
from ds4grpc.store.files import Files
from ds4grpc.store.format import StateForm
from ds4grpc.store.reader import BankFile
from ds4grpc.store.store import Store
from ds4grpc.store.transfer import Imported

LONG = "DS4GRPC_LONG" in os.environ
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)


def conversation(layout: StateLayout = PLAIN, space: bytes = SPACE) -> list[Turns]:
    """After each of its turns; files of several blocks, windows and tails at each turn."""
    grown = [Turns(layout, space, head=40)]
    for seed, count in enumerate((90, 61, 33, 148)):
        grown.append(grown[-1].grow(seed, count))
    return grown[1:]


async def stored(store: Store, grown: list[Turns]) -> Turns:
    for turns in grown:
        assert (await store.persist(turns.source())).detail == ""
    return grown[-1]


async def export(store: Store, bank_id: str) -> bytes:
    async with store.transfer.send(bank_id) as outgoing:
        chunks = []
        while chunk := await store.transfer.next_chunk(outgoing):
            assert len(chunk) <= transfer.CHUNK_BYTES
            chunks.append(chunk)
        data = b"".join(chunks)
        assert (len(data), hashlib.sha256(data).digest()) == (outgoing.size_bytes, outgoing.sha256)
    await eventually(lambda: store.num_leased == 0)
    return data


async def take(
    store: Store, data: bytes, space: bytes = SPACE, *, pin: bool = False, chunk: int = 70_000
) -> Imported:
    async with store.transfer.receive(len(data)) as incoming:
        for start in range(0, len(data), chunk):
            await incoming.add(data[start : start + chunk])
        return await incoming.publish(space, hashlib.sha256(data).digest(), pin=pin)


async def assert_holds(store: Store, turns: Turns) -> None:
    """The bank is found by its key and holds what a conversation of its ids must, bit for bit."""
    leases = await store.match(turns.query())
    lease = next(each for each in leases if each.bank_id == turns.bank_id)
    assert lease.content.records == turns.records
    assert lease.content.hidden == turns.content.hidden
    position = turns.layout.replay_base(turns.frontier, lease.content.held, lease.content.tails)
    assert position == turns.resumes_at
    sink = MemorySink(turns.layout, turns.frontier)
    await lease.load(position, sink)
    sink.assert_holds(MemorySource(turns.layout, turns.ids), position, lease.content.held)
    for each in leases:
        each.release()


def own_folder(folder: Path) -> Path:
    (catalog,) = folder.glob("*/catalog.db")
    return catalog.parent


def incoming(folder: Path) -> list[Path]:
    return list(own_folder(folder).glob("incoming/*"))


async def assert_untouched(store: Store, folder: Path, before: int) -> None:
    """Nothing is left of an import, and its bytes are free again."""
    await eventually(lambda: not incoming(folder))
    catalog_bytes = 1 << 20  # more than it grows; a step of an import's room is 8 MiB
    await eventually(lambda: store.disk_bytes <= before + catalog_bytes)


@each_layout
async def test_bank_goes_to_another_machine_and_tenant_bit_for_bit(
    tmp_path: Path, layout: StateLayout
) -> None:
    grown = conversation(layout)
    async with Store(config_of(tmp_path / "a", layout), Observed()) as store:
        turns = await stored(store, grown)
        await store.note_use(turns.bank_id, proven=True)
        assert len((await store.inspect(turns.bank_id)).chain) > 1
        data = await export(store, turns.bank_id)
        # Half of a namespace names the tenant; ids are digests of namespaces.
        for secret in (SPACE, SPACE[:16], SPACE[16:]):
            assert secret.hex().encode() not in data
            assert secret not in data
        for each in (*grown, grown[0].head_only()):
            assert each.bank_id.encode() not in data
    theirs = replace(turns, space=OTHER_SPACE)
    observed = Observed()
    async with Store(config_of(tmp_path / "b", layout), observed) as store:
        imported = await take(store, data, OTHER_SPACE)
        assert imported == Imported(theirs.bank_id, turns.frontier, len(data), False)
        assert theirs.bank_id != turns.bank_id
        await assert_holds(store, theirs)
        assert await store.match(turns.query()) == []
        info = await store.get(theirs.bank_id)
        assert info.trust == Trust.COMMITTED | Trust.KEYED | Trust.DURABLE  # not proven here
        assert (info.base, info.parent_id, info.reason) == (0, "", PersistReason.ADMIN)
        assert info.namespace == OTHER_SPACE
        assert [verdict.ok async for verdict in store.verify()] == [True]
        grown_on = theirs.grow(9, 100)
        await store.persist(grown_on.source())  # the conversation goes on from it
        assert (await store.get(grown_on.bank_id)).parent_id == theirs.bank_id
    (path,) = own_folder(tmp_path / "b").glob(f"??/{theirs.bank_id}.0.bank")
    assert path.stat().st_size == len(data)
    (own_folder(tmp_path / "b") / "catalog.db").unlink()
    async with Store(config_of(tmp_path / "b", layout), observed) as store:
        await assert_holds(store, theirs)
        await assert_holds(store, grown_on)


async def test_exported_file_is_a_bank_file_that_is_nobodys(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path / "a", TAILED), Observed()) as store:
        turns = await stored(store, conversation(TAILED))
        path = tmp_path / "conversation.bank"
        path.write_bytes(await export(store, turns.bank_id))
    with BankFile.open(Files(), str(path), StateForm(FINGERPRINT, TAILED), is_named=False) as file:
        assert file.verify() > 0
        header, content = file.header, file.read_content()
    assert (header.namespace, header.base, header.parent_id) == (bytes(32), 0, "")
    assert header.bank_id == bank_id_of(bytes(32), FINGERPRINT, turns.ids)
    assert content.records == turns.records


async def test_bank_that_leans_on_a_merged_one_is_exported_whole(tmp_path: Path) -> None:
    grown = [Turns().grow(0, 300)]
    for seed in range(1, 8):
        grown.append(grown[-1].grow(seed, 300))
    async with Store(config_of(tmp_path / "a"), Observed()) as store:
        await stored(store, grown)
        assert await store.compact() == 1
        middle = grown[3]
        assert (await store.get(middle.bank_id)).parent_id == grown[-1].bank_id
        data = await export(store, middle.bank_id)
    async with Store(config_of(tmp_path / "b"), Observed()) as store:
        await take(store, data)
        await assert_holds(store, middle)


async def test_damaged_file_is_refused_wherever_it_is_damaged(tmp_path: Path) -> None:
    draw = random.Random(9)
    async with Store(config_of(tmp_path / "a", TAILED), Observed()) as store:
        turns = await stored(store, conversation(TAILED))
        data = await export(store, turns.bank_id)
    async with Store(config_of(tmp_path / "b", TAILED), Observed()) as store:
        before = store.disk_bytes
        positions = range(len(data)) if LONG else draw.sample(range(len(data)), 150)
        for at in (*range(0, 32, 5), *positions):
            wrong = bytearray(data)
            wrong[at] ^= 1 << draw.randrange(8)
            with pytest.raises((InvalidRequest, PreconditionFailed)):
                await take(store, bytes(wrong), chunk=len(data))
        for wrong_data in (data[:-1], data[:-4096], data + bytes(4096), data[:20], b""):
            with pytest.raises(InvalidRequest) as refused:
                await take(store, wrong_data)
            assert refused.value.reason == "BANK_FILE_DAMAGED"
        async with store.transfer.receive(0) as taking:
            await taking.add(data)
            with pytest.raises(InvalidRequest, match="SHA-256"):
                await taking.publish(SPACE, b"x" * 32, pin=False)
        await assert_untouched(store, tmp_path / "b", before)
        assert stored_names(tmp_path / "b") == set()
        await take(store, data)
        await assert_holds(store, turns)


async def test_file_of_a_part_of_a_bank_is_refused(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        turns = await stored(store, conversation())
        (path,) = own_folder(tmp_path).glob(f"??/{turns.bank_id}.*.bank")
        with pytest.raises(InvalidRequest, match="a part of a bank"):
            await take(store, path.read_bytes(), OTHER_SPACE)


async def test_file_of_another_model_is_refused_with_both_values(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path / "a"), Observed()) as store:
        turns = await stored(store, conversation())
        data = await export(store, turns.bank_id)
    other = replace(config_of(tmp_path / "b"), fingerprint=b"\7" * 32)
    async with Store(other, Observed()) as store:
        with pytest.raises(PreconditionFailed) as refused:
            await take(store, data)
    assert refused.value.reason == "OTHER_MODEL"
    assert FINGERPRINT.hex() in refused.value.message
    assert "07" * 32 in refused.value.message
    async with Store(config_of(tmp_path / "c", TAILED), Observed()) as store:
        with pytest.raises(PreconditionFailed, match="plain/1; this server has .*, tailed/1"):
            await take(store, data)


async def test_import_of_what_is_stored_already_keeps_that(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        grown = conversation()
        turns = await stored(store, grown)
        data = await export(store, turns.bank_id)
        before = stored_names(tmp_path)
        again = await take(store, data, pin=True)
        assert (again.bank_id, again.already_stored) == (turns.bank_id, True)
        assert (await store.get(turns.bank_id)).pinned
        assert stored_names(tmp_path) == before
        parent = grown[-2].bank_id
        data = await export(store, parent)
        await store.delete(parent)
        with pytest.raises(BankNotFound):
            await export(store, parent)
        assert (await take(store, data)).already_stored
        assert (await store.get(parent)).frontier == grown[-2].frontier


async def test_import_makes_room_below_the_cap_or_is_refused(tmp_path: Path) -> None:
    quota = 16 << 20
    async with Store(config_of(tmp_path / "a"), Observed()) as store:
        big = await stored(store, [Turns().grow(1, 40_000)])  # 5 MB
        data = await export(store, big.bank_id)
    observed = Observed()
    async with Store(config_of(tmp_path / "b", quota_bytes=quota), observed) as store:
        for seed in (2, 3):
            await stored(store, [Turns().grow(seed, 40_000)])
        most = 0
        async with store.transfer.receive(len(data)) as taking:
            for start in range(0, len(data), 100_000):
                await taking.add(data[start : start + 100_000])
                most = max(most, store.disk_bytes)
            await taking.publish(SPACE, hashlib.sha256(data).digest(), pin=True)
        assert most <= quota
        assert observed.count("evicted", "lru") >= 1
        await assert_holds(store, big)
        other = await stored(store, [Turns().grow(4, 40_000)])
        await store.pin(other.bank_id)
        before = store.disk_bytes
        with pytest.raises(StoreFull):
            await take(store, data, OTHER_SPACE)
        with pytest.raises(StoreFull, match="--kv-disk-space-mb"):
            async with store.transfer.receive(quota + 1):
                pass
        with pytest.raises(InvalidRequest, match="more than the 10 bytes"):
            async with store.transfer.receive(10) as taking:
                await taking.add(b"x" * 11)
        await assert_untouched(store, tmp_path / "b", before)


async def test_export_of_a_damaged_chain_fails_and_quarantines_it(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        grown = conversation()
        turns = await stored(store, grown)
        (path,) = own_folder(tmp_path).glob(f"??/{grown[1].bank_id}.*.bank")
        data = bytearray(path.read_bytes())
        data[-4000] ^= 1
        path.write_bytes(data)
        with pytest.raises(BankCorrupt):
            await export(store, turns.bank_id)
        await eventually(lambda: store.num_leased == 0)
        with pytest.raises(BankNotFound):
            await store.get(turns.bank_id)
        await assert_holds(store, grown[0])


async def test_only_so_many_transfers_at_once(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        turns = await stored(store, conversation())
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(transfer.MAX_EXPORTS):
                await stack.enter_async_context(store.transfer.send(turns.bank_id))
            for _ in range(transfer.MAX_IMPORTS):
                await stack.enter_async_context(store.transfer.receive(0))
            with pytest.raises(Overloaded):
                await export(store, turns.bank_id)
            with pytest.raises(Overloaded):
                await take(store, b"x")
            with pytest.raises(BankInUse, match="an export"):
                await store.delete(turns.bank_id)
        data = await export(store, turns.bank_id)
        await eventually(lambda: not incoming(tmp_path))
        assert (await take(store, data)).already_stored


async def test_b49_lookups_and_exports_that_are_given_up_leave_no_lease(tmp_path: Path) -> None:
    """Matched and not loaded, cancelled between lookup and load, exported half: at rest nothing is
    held, and eviction works as before."""
    draw = random.Random(49)
    quota = 12 << 20
    async with Store(config_of(tmp_path, quota_bytes=quota), Observed()) as store:
        known = [await stored(store, [Turns().grow(seed, 2000)]) for seed in range(20)]

        async def look(turns: Turns) -> None:
            leases = await store.match(turns.query())
            for lease in leases:  # what is resident is longer, say
                lease.release()

        async def send(turns: Turns) -> None:
            with contextlib.suppress(Overloaded):
                async with store.transfer.send(turns.bank_id) as outgoing:
                    await store.transfer.next_chunk(outgoing)
                    await asyncio.sleep(3600)  # a client that takes nothing more

        for _ in range(2000 if LONG else 200):
            call = asyncio.create_task(draw.choice((look, look, look, send))(draw.choice(known)))
            if draw.random() < 0.2 or call.get_coro().__name__ == "send":  # type: ignore[union-attr]
                for _ in range(draw.randrange(40)):
                    await asyncio.sleep(0)
                call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
        await eventually(lambda: store.num_leased == 0)
        for seed in range(100, 160):
            await stored(store, [Turns().grow(seed, 2000)])
        assert store.disk_bytes <= quota
        assert {turns.bank_id for turns in known}.isdisjoint(
            {info.bank_id for info in await store.list_banks()}
        )
        await assert_holds(store, Turns().grow(159, 2000))


def dying_import(folder: Path, data: bytes, deadline: int) -> int:
    """The exit code of a process that imports and dies before its `deadline`-th change: 9, or 0
    when it came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:

            async def work() -> None:
                files = DyingFiles()
                async with Store(config_of(folder), Observed(), files) as store:
                    files.arm(deadline)
                    await take(store, data, pin=True, chunk=100_000)
                    files.deadline = 0
                    os._exit(0)

            asyncio.run(work())
        except Ds4grpcError:
            code = 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.slow
def test_process_that_dies_in_an_import_leaves_a_whole_bank_or_none(tmp_path: Path) -> None:
    turns = conversation()[-1]

    async def exported() -> bytes:
        async with Store(config_of(tmp_path / "a"), Observed()) as store:
            await stored(store, conversation())
            return await export(store, turns.bank_id)

    data = asyncio.run(exported())
    outcomes = []

    async def look(folder: Path) -> bool:
        async with Store(config_of(folder), Observed()) as store:
            assert incoming(folder) == []
            there = [info.bank_id for info in await store.list_banks()]
            if there:
                assert there == [turns.bank_id]
                await assert_holds(store, turns)
                assert (await store.get(turns.bank_id)).pinned
            else:
                assert stored_names(folder) == set()
            assert names(folder, "*.tmp") == []
            return bool(there)

    for deadline in range(1, 100):
        folder = tmp_path / str(deadline)
        code = dying_import(folder, data, deadline)
        assert code in (0, 9)
        outcomes.append(asyncio.run(look(folder)))
        if code == 0:
            break
    assert outcomes == sorted(outcomes)  # once it is there it stays
    assert outcomes[0] is False
    assert outcomes[-1] is True
