"""The catalog is only an index: whatever happens to it, the banks are found again."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
import alembic.script
import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from bankkit import SPACE, Observed, Turns, config_of, eventually, names

from ds4grpc.bank import PersistReason, RecordKind, Trust
from ds4grpc.errors import BankNotFound, StoreDisabled
from ds4grpc.layout import Spans
from ds4grpc.store import database, match, rows, waiting
from ds4grpc.store import store as store_module
from ds4grpc.store.catalog import Catalog, Hit
from ds4grpc.store.database import CatalogError, upgrade
from ds4grpc.store.files import Files
from ds4grpc.store.index import Entry
from ds4grpc.store.keys import Mark
from ds4grpc.store.store import Store
from ds4grpc.store.tables import metadata

LONG = bool(os.environ.get("DS4GRPC_LONG"))
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


def num_rows(folder: Path) -> int:
    with closing(sqlite3.connect(catalog_of(folder))) as connection:
        (number,) = connection.execute("select count(*) from banks").fetchone()
        assert isinstance(number, int)
        return number


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


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").touch()


def symlink(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def log_without_database(path: Path) -> None:
    """As if somebody had deleted the one and left the other of a server that was killed."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("update banks set hits = 1")
        connection.commit()
        log = path.with_name("catalog.db-wal").read_bytes()
    path.unlink()
    path.with_name("catalog.db-wal").write_bytes(log)


# What is done to the catalog, and whether it is kept aside: there is nothing to keep of some.
DAMAGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "missing": (Path.unlink, False),
    "empty": (lambda path: path.write_bytes(b""), False),
    "log alone": (log_without_database, False),
    "directory": (directory, True),
    "symlink": (symlink, True),
    "log is a directory": (lambda path: path.with_name("catalog.db-wal").mkdir(), True),
    "garbage": (lambda path: path.write_bytes(b"not a database" * 1000), True),
    "random": (lambda path: path.write_bytes(random.Random(1).randbytes(40_000)), True),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:5000]), True),
    "hole": (hole, True),
    "newer": (
        lambda path: statement(path, "update alembic_version set version_num = '9999'"),
        True,
    ),
    "no tables": (lambda path: statement(path, "drop table hashes", "drop table banks"), True),
    "bad id": (
        lambda path: statement(path, "update banks set bank_id = '../../x' where frontier = 600"),
        True,
    ),
    "bad type": (lambda path: statement(path, "update banks set size_bytes = 'many'"), True),
    "bad windows": (lambda path: statement(path, "update banks set windows = x'010203'"), True),
    "bad trust": (lambda path: statement(path, "update banks set trust = -1 where base > 0"), True),
    "no trust": (lambda path: statement(path, "update banks set trust = 0 where base > 0"), True),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_catalog_damaged_is_rebuilt_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    await fill(tmp_path)
    work, is_aside = DAMAGES[damage]
    work(catalog_of(tmp_path))
    await assert_all_is_found(tmp_path)
    aside = names(tmp_path, "catalog.db.bad-*")
    assert len(aside) == is_aside or damage == "log is a directory"
    warnings = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1, warnings
    assert ("set aside" if is_aside else "was missing") in warnings[0]


async def assert_all_is_found(folder: Path) -> None:
    """What `fill` has stored is offered and can be gone on from."""
    async with Store(config_of(folder), Observed()) as store:
        assert (await found(store, STEM))[0] == 400
        assert (await found(store, LEFT))[0] == 600
        assert (await store.persist(LEFT.grow(3, 100).source())).detail == ""
    assert not [name for name in names(folder, "catalog.db-*") if ".bad-" not in name]


async def test_catalog_without_rows_is_filled_again(tmp_path: Path) -> None:
    await fill(tmp_path)
    statement(catalog_of(tmp_path), "delete from hashes", "delete from banks")
    await assert_all_is_found(tmp_path)


async def test_catalog_read_only_is_made_writable_and_private(tmp_path: Path) -> None:
    await fill(tmp_path)
    catalog_of(tmp_path).chmod(0o444)
    await assert_all_is_found(tmp_path)
    assert catalog_of(tmp_path).stat().st_mode & 0o777 == 0o600


async def test_catalog_truncated_at_any_page_is_rebuilt(tmp_path: Path) -> None:
    await fill(tmp_path)
    whole = catalog_of(tmp_path).read_bytes()
    (page,) = struct.unpack(">H", whole[16:18])
    sizes = range(page, len(whole), page)
    assert len(sizes) >= 5
    for size in sizes:
        catalog_of(tmp_path).write_bytes(whole[:size])
        await assert_all_is_found(tmp_path)
        assert len(names(tmp_path, "catalog.db.bad-*")) == 1  # the last one alone is kept


async def test_catalog_with_a_bad_page_is_rebuilt_when_a_lookup_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "UPKEEP_SECONDS", 0.1)
    async with Store(config_of(tmp_path), Observed()) as store:
        await store.persist(STEM.source())
        bank_id = (await store.persist(LEFT.source())).bank_id
        await store.note_use(bank_id, proven=False)
        await store.note_use(bank_id, proven=True)
    with closing(sqlite3.connect(catalog_of(tmp_path))) as connection:
        (root,) = connection.execute(
            "select rootpage from sqlite_master where name = 'hashes'"
        ).fetchone()
    data = bytearray(catalog_of(tmp_path).read_bytes())
    data[(root - 1) * 4096 : root * 4096] = b"\xa5" * 4096
    catalog_of(tmp_path).write_bytes(data)
    observed = Observed()
    async with Store(config_of(tmp_path), observed) as store:
        assert await found(store, LEFT) == []
        await eventually(lambda: "set aside" in caplog.text)
        await eventually(lambda: not store._shelf.rows.is_damaged)
        assert (await found(store, LEFT))[0] == 600
        info = await store.get(bank_id)
        assert info.hits == 1
        assert Trust.PROVEN in info.trust
        assert (await store.persist(LEFT.grow(3, 100).source())).detail == ""
    assert observed.count("catalog_error", "corrupt") >= 1
    async with Store(config_of(tmp_path), Observed()) as store:  # what was noted is in the rows
        assert (await store.get(bank_id)).hits == 1


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


async def test_catalog_locked_for_long_loses_neither_a_bank_nor_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    observed = Observed()
    async with Store(config_of(tmp_path), observed) as store:
        bank_id = (await store.persist(STEM.source())).bank_id
        outside = sqlite3.connect(catalog_of(tmp_path))
        outside.isolation_level = None
        outside.execute("BEGIN IMMEDIATE")
        assert (await store.persist(LEFT.source())).detail == ""
        assert (await store.persist(LEFT.grow(3, 100).source())).frontier == 700
        await store.note_use(bank_id, proven=False)
        assert (await found(store, STEM))[0] == 400
        assert (await found(store, LEFT.grow(3, 100)))[0] == 700  # found before its row is there
        assert num_rows(tmp_path) == 2
        assert store.trouble == ""  # banks are written
        outside.execute("COMMIT")
        outside.close()
        await eventually(lambda: num_rows(tmp_path) == 4)
        assert (await found(store, LEFT.grow(3, 100)))[0] == 700
        assert observed.count("catalog_error", "locked") >= 1
        assert observed.count("persist_failed", "catalog") == 0
    async with Store(config_of(tmp_path), Observed()) as store:
        assert (await store.get(bank_id)).hits == 1


async def test_bank_deleted_while_its_row_waits_stays_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    monkeypatch.setattr(store_module, "UPKEEP_SECONDS", 0.1)
    async with Store(config_of(tmp_path), Observed()) as store:
        await store.persist(STEM.source())
        outside = sqlite3.connect(catalog_of(tmp_path))
        outside.isolation_level = None
        outside.execute("BEGIN EXCLUSIVE")
        bank_id = (await store.persist(LEFT.source())).bank_id
        kept = (await store.persist(STEM.grow(5, 100).source())).bank_id
        assert (await store.delete(bank_id)).freed_bytes > 0
        outside.execute("COMMIT")
        outside.close()
        await eventually(lambda: num_rows(tmp_path) == 3)
        assert 600 not in await found(store, LEFT)
    async with Store(config_of(tmp_path), Observed()) as store:
        assert {each.bank_id for each in await store.list_banks()} >= {kept}
        with pytest.raises(BankNotFound):
            await store.get(bank_id)


async def test_rows_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    monkeypatch.setattr(store_module, "UPKEEP_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "MAX_WAITING", 2)
    async with Store(config_of(tmp_path), Observed()) as store:
        await store.persist(STEM.source())
        before = len(names(tmp_path, "*.bank"))
        outside = sqlite3.connect(catalog_of(tmp_path))
        outside.isolation_level = None
        outside.execute("BEGIN IMMEDIATE")
        details = [(await store.persist(STEM.grow(n, 100).source())).detail for n in range(5, 8)]
        assert details[:2] == ["", ""]
        assert details[2].startswith("catalog: another process holds the catalog")
        assert len(names(tmp_path, "*.bank")) == before + 2  # no file that nobody would find
        await asyncio.sleep(0.5)
        assert store.trouble  # for as long as it is so
        outside.execute("COMMIT")
        outside.close()
        await eventually(lambda: not store.trouble)
        assert (await store.persist(STEM.grow(8, 100).source())).detail == ""


async def test_disk_that_is_well_again_is_told_of_though_the_catalog_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    monkeypatch.setattr(store_module, "UPKEEP_SECONDS", 0.1)
    async with Store(config_of(tmp_path), Observed()) as store:
        await store.persist(STEM.source())
        bank_id = (await store.persist(LEFT.source())).bank_id
        await store.persist(LEFT.grow(3, 100).source())
        await store.delete(bank_id)  # hidden: its rows are needed
        with closing(sqlite3.connect(catalog_of(tmp_path))) as outside:
            outside.isolation_level = None
            outside.execute("BEGIN IMMEDIATE")
            store._shelf.condition.failed("a disk that refused")
            await eventually(lambda: not store.trouble)
            assert (await store.persist(LEFT.source())).detail == ""  # wanted again
            assert (await store.get(bank_id)).frontier == 600
            assert store.trouble == ""
    async with Store(config_of(tmp_path), Observed()) as store:
        assert (await store.get(bank_id)).frontier == 600


async def test_lookup_in_a_catalog_that_hangs_is_a_miss_and_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(match, "LOOKUP_SECONDS", 0.1)
    observed = Observed()
    async with Store(config_of(tmp_path), observed) as store:
        await store.persist(STEM.source())
        goes_on = threading.Event()
        find = Catalog._find

        def hang(catalog: Catalog, digests: Callable[[], Sequence[bytes]]) -> list[Hit]:
            goes_on.wait(2)
            return find(catalog, digests)

        with monkeypatch.context() as slowed:
            slowed.setattr(Catalog, "_find", hang)
            for _ in range(match.MAX_LATE):
                assert await found(store, STEM) == []
            began = time.monotonic()
            assert await found(store, STEM) == []
            assert time.monotonic() - began < 0.05  # no more of them pile up
            goes_on.set()
            await eventually(lambda: store._finder._num_late == 0)
        assert (await found(store, STEM))[0] == 400
        assert store.num_leased == 0
        assert observed.count("catalog_error", "slow") == match.MAX_LATE


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


def revisions() -> list[str]:
    """All that were ever released, oldest first."""
    config = alembic.config.Config()
    config.set_main_option("script_location", "ds4grpc:migrations")
    script = alembic.script.ScriptDirectory.from_config(config)
    return [each.revision for each in reversed(list(script.walk_revisions()))]


def take_back_to(path: Path, revision: str) -> None:
    """Makes the catalog anew with the migrations up to a revision, and the same rows."""
    newest = path.rename(path.with_name("newest"))
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        alembic.command.upgrade(migrations(connection), revision)
    tables = sqlalchemy.inspect(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"attach '{newest}' as newest")
        for table in ("banks", "hashes"):
            columns = ", ".join(column["name"] for column in tables.get_columns(table))
            connection.exec_driver_sql(
                f"insert into {table} ({columns}) select {columns} from newest.{table}"
            )
    engine.dispose()
    newest.unlink()


@pytest.mark.parametrize("revision", revisions())
async def test_catalog_of_any_released_version_keeps_its_rows(
    tmp_path: Path, revision: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        bank_id = (await store.persist(STEM.source())).bank_id
        await store.persist(LEFT.source())
        await store.note_use(bank_id, proven=False)
    await asyncio.to_thread(take_back_to, catalog_of(tmp_path), revision)
    observed = Observed()
    async with Store(config_of(tmp_path), observed) as store:
        assert (await store.get(bank_id)).hits == 1  # from the row: no file holds it
        assert (await found(store, LEFT))[0] == 600
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


class NoLocks(Files):
    """A file system that keeps no locks, as some network mounts do."""

    def lock(self, path: str) -> int:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


async def test_folder_without_locks_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(StoreDisabled, match="No locks available") as caught:
        async with Store(config_of(tmp_path), Observed(), NoLocks()):
            pass
    assert "--kv-disk-dir" in caught.value.message


async def test_folder_without_shared_memory_for_the_log_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where SQLite cannot share memory between processes it goes on without a log, by itself."""
    await fill(tmp_path)
    statement(catalog_of(tmp_path), "pragma journal_mode = delete")
    with closing(sqlite3.connect(catalog_of(tmp_path))) as outside:
        outside.execute("select * from banks").fetchone()
        real = sqlalchemy.create_engine

        def without_memory(url: sqlalchemy.URL, **options: Any) -> sqlalchemy.Engine:
            url = url.set(query={"vfs": "unix-dotfile"})
            url = url.set(database=f"file:{url.database}", query={**url.query, "uri": "true"})
            engine: sqlalchemy.Engine = real(url, **options)
            return engine

        monkeypatch.setattr(sqlalchemy, "create_engine", without_memory)
        with pytest.raises(StoreDisabled, match="cannot keep the catalog's log"):
            async with Store(config_of(tmp_path), Observed()):
                pass
    assert names(tmp_path, "catalog.db.bad-*") == []
    monkeypatch.undo()
    async with Store(config_of(tmp_path), Observed()) as store:
        assert 600 in await found(store, LEFT)


async def test_b47_log_is_bounded_under_updates_with_a_reader_that_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    measured: Callable[[str], None],
) -> None:
    num_updates = 10_000 if LONG else 300
    limit, most = (4 << 20, 16 << 20) if LONG else (256 << 10, 512 << 10)
    monkeypatch.setattr(store_module, "UPKEEP_SECONDS", 0.2)
    monkeypatch.setattr(rows, "WAL_LIMIT_BYTES", limit)
    monkeypatch.setattr(rows, "WAL_MOST_BYTES", most)
    async with Store(config_of(tmp_path), Observed()) as store:
        bank_id = (await store.persist(STEM.source())).bank_id
        log = catalog_of(tmp_path).with_name("catalog.db-wal")
        with closing(sqlite3.connect(catalog_of(tmp_path))) as reader:
            reader.isolation_level = None
            reader.execute("BEGIN")
            reader.execute("select count(*) from banks").fetchone()
            for number in range(num_updates):
                await (store.unpin if number % 2 else store.pin)(bank_id)
            await eventually(lambda: "long read of the catalog" in caplog.text)
            longest = log.stat().st_size
            assert longest > most
            await store.note_use(bank_id, proven=False)
            await asyncio.sleep(0.5)
            assert log.stat().st_size == longest  # a use can wait
            assert (await found(store, STEM))[0] == 400
        await eventually(lambda: log.stat().st_size <= limit)
        left = log.stat().st_size
    measured(f"{num_updates} updates beside a reader: log {longest:,} bytes, {left:,} after it")
    assert not log.exists()
    async with Store(config_of(tmp_path), Observed()) as store:
        assert (await store.get(bank_id)).hits == 1


async def test_row_whose_size_is_no_number_is_damage(tmp_path: Path) -> None:
    await fill(tmp_path)
    with closing(sqlite3.connect(catalog_of(tmp_path))) as catalog, catalog:
        catalog.execute("update banks set size_bytes = 9e999")
    async with Store(config_of(tmp_path), Observed()) as store:
        assert (await found(store, STEM))[0] == 400
    assert len(names(tmp_path, "catalog.db.bad-*")) >= 1
