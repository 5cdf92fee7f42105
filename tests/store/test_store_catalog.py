"""The catalog is only an index: whatever happens to it, the banks are found again."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import alembic.command
import alembic.config
import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from bankkit import SPACE, Observed, Turns, config_of, names

from ds4grpc.bank import PersistReason, RecordKind, Trust
from ds4grpc.errors import StoreDisabled
from ds4grpc.layout import Spans
from ds4grpc.store import database
from ds4grpc.store.catalog import Catalog
from ds4grpc.store.database import CatalogError, upgrade
from ds4grpc.store.index import Entry
from ds4grpc.store.keys import Mark
from ds4grpc.store.store import Store
from ds4grpc.store.tables import metadata

STEM = Turns(head=100).grow(1, 400)
LEFT = STEM.grow(2, 200)


def entry(number: int = 1, frontier: int = 400) -> Entry:
    return Entry(
        bank_id=f"{number:032x}",
        namespace=SPACE,
        parent_id="",
        base=0,
        frontier=frontier,
        head=20,
        size_bytes=4096,
        reason=PersistReason.STOP,
        record_kinds=(RecordKind.RAW, RecordKind.PROMPT),
        hidden_tokens=7,
        trust=Trust.COMMITTED | Trust.DURABLE | Trust.PROVEN,
        created_at=1.25,
        last_used_at=2.5,
        windows=Spans.of([(0, 16), (100, 116)]),
        tails=(100, 400),
        hits=3,
        verified_at=3.5,
        ttl_seconds=60.0,
    )


async def fill(folder: Path) -> None:
    async with Store(config_of(folder), Observed()) as store:
        for turns in (STEM, LEFT):
            await store.persist(turns.source())


async def found(store: Store, turns: Turns) -> list[int]:
    leases = await store.match(turns.query())
    for lease in leases:
        lease.release()
    return [lease.content.frontier for lease in leases]


def catalog_of(folder: Path) -> Path:
    return next(folder.glob("*/catalog.db"))


def bytes_of(folder: Path, pattern: str) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob(pattern))


def statement(path: Path, *sql: str) -> None:
    connection = sqlite3.connect(path)
    for each in sql:
        connection.execute(each)
    connection.commit()
    connection.close()


def hole(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 + 50 :] = b"\xa5" * (len(data) - 4096 - 50)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "is_aside"),
    [
        (Path.unlink, False),
        (lambda path: path.write_bytes(b""), False),
        (lambda path: path.write_bytes(b"not a database" * 1000), True),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), True),
        (hole, True),
        (lambda path: statement(path, "update alembic_version set version_num = '9999'"), True),
        (lambda path: statement(path, "drop table hashes", "drop table banks"), True),
        (
            lambda path: statement(
                path, "update banks set bank_id = '../../x' where frontier = 600"
            ),
            True,
        ),
        (lambda path: statement(path, "update banks set size_bytes = 'many'"), True),
        (lambda path: statement(path, "update banks set windows = x'010203'"), True),
        (lambda path: statement(path, "update banks set trust = -1 where base > 0"), True),
        (lambda path: statement(path, "update banks set trust = 0 where base > 0"), True),
        (lambda path: statement(path, "delete from hashes", "delete from banks"), False),
    ],
    ids=[
        *("missing", "empty", "garbage", "truncated", "hole", "newer", "no tables"),
        *("bad id", "bad type", "bad windows", "bad trust", "no trust", "no rows"),
    ],
)
async def test_catalog_damaged_is_rebuilt(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
    is_aside: bool,
) -> None:
    await fill(tmp_path)
    damage(catalog_of(tmp_path))
    async with Store(config_of(tmp_path), Observed()) as store:
        assert (await found(store, STEM))[0] == 400
        assert (await found(store, LEFT))[0] == 600
        assert (await store.persist(LEFT.grow(3, 100).source())).detail == ""
    aside = names(tmp_path, "catalog.db.bad-*")
    assert len(aside) == is_aside
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len([each for each in warnings if "set aside" in each.message]) == is_aside


async def test_catalog_stays_within_one_file_after_a_clean_stop(tmp_path: Path) -> None:
    await fill(tmp_path)
    names = {path.name for path in catalog_of(tmp_path).parent.glob("catalog*")}
    assert names == {"catalog.db"}
    assert catalog_of(tmp_path).stat().st_mode & 0o777 == 0o600


async def test_catalog_log_and_shared_memory_are_private(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        await store.persist(STEM.source())
        files = [*catalog_of(tmp_path).parent.glob("catalog.db*")]
        assert len(files) == 3
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)


async def test_catalog_holds_no_key_text(tmp_path: Path) -> None:
    marker = STEM.text[100:140]
    async with Store(config_of(tmp_path), Observed()) as store:
        await store.persist(LEFT.source())
        assert marker not in bytes_of(tmp_path, "catalog.db*")
    assert marker in bytes_of(tmp_path, "*.bank")


@pytest.mark.alone
async def test_catalog_locked_by_somebody_for_a_moment_delays_no_match(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        await store.persist(STEM.source())
        outside = sqlite3.connect(catalog_of(tmp_path), check_same_thread=False)
        outside.isolation_level = None
        outside.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.5, lambda: outside.execute("COMMIT"))
        release.start()
        started = time.monotonic()
        assert (await found(store, STEM))[0] == 400
        assert time.monotonic() - started < 0.4
        assert (await store.persist(LEFT.source())).detail == ""
        await asyncio.to_thread(release.join)
        outside.close()
        assert 600 in await found(store, LEFT)


async def test_catalog_locked_for_long_loses_a_write_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    observed = Observed()
    async with Store(config_of(tmp_path), observed) as store:
        bank_id = (await store.persist(STEM.source())).bank_id
        outside = sqlite3.connect(catalog_of(tmp_path))
        outside.isolation_level = None
        outside.execute("BEGIN IMMEDIATE")
        persisted = await store.persist(LEFT.source())
        assert persisted.detail.startswith("catalog")
        assert persisted.frontier == 400
        await store.note_use(bank_id, proven=False)
        assert (await found(store, STEM))[0] == 400
        assert len(names(tmp_path, "*.bank")) == 2
        outside.execute("COMMIT")
        outside.close()
        assert (await store.persist(LEFT.source())).detail == ""
        assert observed.count("catalog_error", "locked") >= 1
    async with Store(config_of(tmp_path), Observed()) as store:
        assert (await store.get(bank_id)).hits == 1


async def test_catalog_locked_at_start_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path)
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    outside = sqlite3.connect(catalog_of(tmp_path))
    outside.isolation_level = None
    outside.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreDisabled, match="locked"):
        async with Store(config_of(tmp_path), Observed()):
            pass
    outside.execute("COMMIT")
    outside.close()
    async with Store(config_of(tmp_path), Observed()) as store:
        assert 600 in await found(store, LEFT)


async def test_task_cancelled_in_a_write_does_not_lock_the_catalog(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        bank_id = (await store.persist(STEM.source())).bank_id
        for delay in (0, 0.0005, 0.001, 0.002, 0.004):
            for work in (store.pin, store.unpin):
                task = asyncio.create_task(work(bank_id))
                await asyncio.sleep(delay)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        assert (await store.persist(LEFT.source())).detail == ""
        assert not (await store.unpin(bank_id)).pinned


async def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    catalog = await Catalog.open(str(tmp_path / "catalog.db"))
    await catalog.add([(entry(), [Mark(b"d" * 16, 5)])])
    assert await catalog.all() == [entry()]
    changed = entry()
    changed.hits, changed.pinned, changed.hidden, changed.verified_at = 9, True, True, None
    await catalog.update([changed])
    assert await catalog.all() == [changed]
    await catalog.close()


async def test_find_gives_each_bank_once_and_the_deepest_ten(tmp_path: Path) -> None:
    catalog = await Catalog.open(str(tmp_path / "catalog.db"))
    digests = [bytes([number]) * 16 for number in range(40)]
    await catalog.add(
        [
            (entry(number), [Mark(digests[number], number), Mark(digests[0], 1)])
            for number in range(1, 40)
        ]
    )
    hits = await catalog.find(lambda: digests)
    assert [hit.position for hit in hits] == list(range(39, 29, -1))
    assert await catalog.find(lambda: []) == []
    await catalog.remove([entry(39).bank_id, "f" * 32])
    assert (await catalog.find(lambda: digests))[0].position == 38
    await catalog.add([(entry(38), [])])  # replaces the row and its hashes
    assert (await catalog.find(lambda: digests))[0].position == 37
    await catalog.close()


async def test_find_speaks_of_failures_in_our_words(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    catalog = await Catalog.open(str(path))
    statement(path, "drop table hashes")
    with pytest.raises(CatalogError) as caught:
        await catalog.find(lambda: [b"d" * 16])
    assert caught.value.kind == "corrupt"
    await catalog.close()


def migrations(connection: sqlalchemy.Connection) -> alembic.config.Config:
    config = alembic.config.Config()
    config.set_main_option("script_location", "ds4grpc:migrations")
    config.attributes["connection"] = connection
    return config


def test_migrations_make_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    upgrade(str(path))
    upgrade(str(path))  # again is no error
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_migrations_go_down_and_up_again(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/catalog.db")
    with engine.connect() as connection:
        config = migrations(connection)
        alembic.command.upgrade(config, "head")
        alembic.command.downgrade(config, "base")
        assert sqlalchemy.inspect(connection).get_table_names() == ["alembic_version"]
        alembic.command.upgrade(config, "head")
    engine.dispose()
