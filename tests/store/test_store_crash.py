"""The process dies at every file operation: the next start is consistent, each time.

The child is a real process that ends at once, in the middle; what it had confirmed before goes
through a pipe. Or an operation fails, and the process goes on.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import alembic.command
import alembic.config
import alembic.script
import pytest
import sqlalchemy
from bankkit import READS, DyingFiles, MemorySource, Observed, Turns, config_of, names
from crashkit import LEFT, RIGHT, STEM, Tell, catalog_of, check, live, run_until

from ds4grpc.errors import StoreFailed
from ds4grpc.store.files import Files
from ds4grpc.store.store import Store

LONG = bool(os.environ.get("DS4GRPC_LONG"))  # `make test-long`: every step


@pytest.mark.slow
def test_process_that_dies_at_any_step_leaves_a_good_folder(
    tmp_path: Path, no_blocking_calls: object
) -> None:
    files = DyingFiles()
    asyncio.run(live(tmp_path / "whole", files, lambda line: None))
    operations = files.operations
    assert {"create", "write", "sync_data", "rename", "sync_folder", "unlink"} <= set(operations)
    for deadline in range(1, len(operations) + 1, 1 if LONG else 11):
        folder = tmp_path / str(deadline)
        told = run_until(deadline, partial(live, folder))
        asyncio.run(check(folder, told))


def revisions() -> list[str]:
    """Every revision that a catalog may be at, newest first; "" is a catalog that is missing."""
    config = alembic.config.Config()
    config.set_main_option("script_location", "ds4grpc:migrations")
    scripts = alembic.script.ScriptDirectory.from_config(config)
    return [script.revision for script in scripts.walk_revisions()][1:] + [""]


def take_back(catalog: Path, revision: str) -> None:
    """Brings a catalog to an older revision, rows in place."""
    if not revision:
        catalog.unlink()
        return
    config = alembic.config.Config()
    config.set_main_option("script_location", "ds4grpc:migrations")
    engine = sqlalchemy.create_engine(f"sqlite:///{catalog}", poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        alembic.command.downgrade(config, revision)


def start_until(folder: Path, deadline: int) -> list[str]:
    """Starts a store in a process that dies before its `deadline`-th statement or change; returns
    them when it does not."""

    async def start(files: DyingFiles, tell: Tell) -> None:
        def count(*_: object) -> None:
            files.before("statement", "")

        sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", count)
        sqlalchemy.event.listen(sqlalchemy.Engine, "commit", count)
        async with Store(config_of(folder), Observed(), files):
            for operation in list(files.operations):
                tell(operation)

    return run_until(deadline, start)


@pytest.mark.slow
@pytest.mark.parametrize("revision", [*revisions(), "damaged"])
def test_process_that_dies_at_any_step_of_a_migration_loses_no_bank(
    tmp_path: Path, revision: str, no_blocking_calls: object
) -> None:
    async def put() -> None:
        async with Store(config_of(tmp_path / "before"), Observed()) as store:
            for turns in (STEM, LEFT, RIGHT):
                assert (await store.persist(turns.source())).detail == ""
            await store.pin(LEFT.bank_id)

    asyncio.run(put())
    catalog = catalog_of(tmp_path / "before")
    if revision == "damaged":
        catalog.write_bytes(b"no database" * 1000)
    else:
        take_back(catalog, revision)
    told = ["stored stem", "stored left", "stored right", "pinned left"]

    def start_copy(deadline: int) -> list[str]:
        folder = tmp_path / str(deadline)
        shutil.copytree(tmp_path / "before", folder)
        steps = start_until(folder, deadline)
        asyncio.run(check(folder, told))
        return steps

    steps = start_copy(0)
    assert steps.count("statement") > 10
    for deadline in range(1, len(steps) + 1, 1 if LONG else 6):
        start_copy(deadline)


class WatchingFiles(Files):
    """Counts the rows of the catalog ahead of each sync and rename in a folder of banks."""

    def __init__(self, folder: Path) -> None:
        self.catalog = catalog_of(folder)
        self.steps: list[tuple[str, int]] = []

    def before(self, operation: str, path: str) -> None:
        shard = path if operation == "sync_folder" else os.path.dirname(path)
        watched = operation in ("sync_data", "rename", "sync_folder")
        if watched and len(os.path.basename(shard)) == 2:
            with closing(sqlite3.connect(self.catalog)) as catalog:
                (count,) = catalog.execute("select count(*) from banks").fetchone()
            self.steps.append((operation, count))


async def test_row_comes_after_its_file_and_goes_after_its_name(tmp_path: Path) -> None:
    files = WatchingFiles(tmp_path)
    async with Store(config_of(tmp_path), Observed(), files) as store:
        persisted = await store.persist(Turns().grow(1, 60).source())
        await store.delete(persisted.bank_id)
    comes = [("sync_data", 0), ("rename", 0), ("sync_folder", 0)]
    assert files.steps == [*comes, ("rename", 1), ("sync_folder", 1)]


def bank_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.bank"))


class FailingFiles(Files):
    """The `first`-th change after arming fails."""

    def __init__(self, first: int, error: int) -> None:
        self.first = first
        self.error = error
        self.armed = False
        self.changes = 0

    def before(self, operation: str, path: str) -> None:
        if self.armed and operation not in READS:
            self.changes += 1
            if self.changes == self.first:
                raise OSError(self.error, os.strerror(self.error))


async def test_persist_on_a_failing_disk_is_lost_and_the_next_one_works(tmp_path: Path) -> None:
    """One operation fails, each in its turn; then the disk is well again."""
    errors = (errno.ENOSPC, errno.EIO, errno.EROFS)
    for first in range(1, 30):
        folder = tmp_path / str(first)
        files = FailingFiles(first, errors[first % len(errors)])
        async with Store(config_of(folder), Observed(), files) as store:
            await store.persist(STEM.source())
            files.armed = True
            source = LEFT.source()
            persisted = await store.persist(source)
            done = files.changes < first
            files.armed = False
            assert (persisted.detail == "") == done, f"change {first}"
            assert persisted.frontier == (LEFT.frontier if done else STEM.frontier)
            assert isinstance(source.rows, MemorySource)
            assert source.rows.closed
            assert (await store.persist(LEFT.source())).detail == ""
            assert names(folder, "*.tmp") == []
            assert store.disk_bytes >= bank_bytes(folder)
        if done:
            return
    pytest.fail("the persist never got through")


async def test_delete_on_a_failing_disk_is_done_or_not_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    """One operation fails, each in its turn; then the disk is well again."""
    for first in range(1, 30):
        folder = tmp_path / str(first)
        files = FailingFiles(first, (errno.EIO, errno.EROFS)[first % 2])
        async with Store(config_of(folder), Observed(), files) as store:
            await store.persist(STEM.source())
            await store.persist(LEFT.source())
            files.armed = True
            try:
                await store.delete(LEFT.bank_id)
            except StoreFailed:
                assert files.changes >= first
            done = files.changes < first
            files.armed = False
            listed = {info.bank_id for info in await store.list_banks()}
        async with Store(config_of(folder), Observed()) as store:
            found = {info.bank_id for info in await store.list_banks()}
            assert STEM.bank_id in found
            assert found == listed, f"change {first}: another answer after a restart"
            if LEFT.bank_id in found:
                await store.delete(LEFT.bank_id)
            assert names(folder, "*.dead") == names(folder, "*.tmp") == []
            assert (await store.persist(LEFT.source())).detail == ""
        if done:
            return
    pytest.fail("the delete never got through")


@pytest.mark.parametrize("change", ["delete from banks", "update banks set hidden = 0, pinned = 0"])
async def test_rows_say_what_the_markers_say_after_a_start(tmp_path: Path, change: str) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        for turns in (STEM, LEFT):
            await store.persist(turns.source())
        await store.pin(LEFT.bank_id)
        await store.delete(STEM.bank_id)  # hidden
    with closing(sqlite3.connect(catalog_of(tmp_path))) as catalog, catalog:
        catalog.execute("pragma foreign_keys = off")
        catalog.execute(change)
    for _ in range(2):  # once by reading files or markers, once with the rows of then
        async with Store(config_of(tmp_path), Observed()) as store:
            assert [info.bank_id for info in await store.list_banks() if info.pinned] == [
                LEFT.bank_id
            ]
            assert store.banks_by_trust == {"reusable": 2, "untrusted": 1, "quarantined": 0}
        with closing(sqlite3.connect(catalog_of(tmp_path))) as catalog:
            rows = catalog.execute("select bank_id, hidden, pinned from banks").fetchall()
        head = STEM.head_only().bank_id
        assert set(rows) == {(head, 0, 0), (STEM.bank_id, 1, 0), (LEFT.bank_id, 0, 1)}
