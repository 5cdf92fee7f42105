"""The SQLite file behind the catalog: its settings, its migrations, its errors.

Owns how connections are made and how foreign errors become `CatalogError`. Knows no queries
beyond settings. `upgrade` and `write_log_back` block and run in a worker thread; engines are made
on the loop.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import alembic.command
import alembic.config
import alembic.util
import sqlalchemy
import sqlalchemy.exc
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

BUSY_TIMEOUT_MS = 5000  # an outside reader or writer may hold the file this long
WAL_PAGES = 256  # checkpointed at 1 MiB: the log stays small beside the cap
WAL_LIMIT_BYTES = 4 << 20  # what the log is cut back to after a long outside reader
WAL_MOST_BYTES = 16 << 20  # then only what must be written still is, until a reader has gone
NUM_READERS = 2  # threads and connections for lookups


class CatalogError(Exception):
    """A statement failed. `kind` is a closed set for metrics: see `KINDS`."""

    KINDS = ("locked", "slow", "full", "corrupt", "io", "other")

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@contextmanager
def translated() -> Iterator[None]:
    """Raises CatalogError for what SQLAlchemy, SQLite and Alembic raise."""
    try:
        yield
    except sqlalchemy.exc.DBAPIError as error:
        raise CatalogError(str(error.orig), _kind(error.orig)) from error
    except sqlite3.Error as error:
        raise CatalogError(str(error), _kind(error)) from error
    except OSError as error:
        raise CatalogError(str(error), "io") from error
    except alembic.util.CommandError as error:  # a revision that this version does not know
        raise CatalogError(str(error), "corrupt") from error
    except sqlalchemy.exc.TimeoutError as error:  # all connections wait for somebody's lock
        raise CatalogError(str(error), "locked") from error
    except (sqlalchemy.exc.SQLAlchemyError, ValueError, TypeError, OverflowError) as error:
        # Rows of wrong types, or of numbers that are none.
        raise CatalogError(str(error), "corrupt") from error


def _kind(error: BaseException | None) -> str:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return "other"
    return {
        sqlite3.SQLITE_BUSY: "locked",
        sqlite3.SQLITE_LOCKED: "locked",
        sqlite3.SQLITE_FULL: "full",
        sqlite3.SQLITE_CORRUPT: "corrupt",
        sqlite3.SQLITE_NOTADB: "corrupt",
        sqlite3.SQLITE_SCHEMA: "corrupt",
        sqlite3.SQLITE_ERROR: "corrupt",  # a table or column that is not there
        sqlite3.SQLITE_IOERR: "io",
        sqlite3.SQLITE_READONLY: "io",
        sqlite3.SQLITE_CANTOPEN: "io",
        sqlite3.SQLITE_PERM: "io",
    }.get(code & 0xFF, "other")  # the low byte is the primary code


def upgrade(path: str) -> None:
    """Brings the catalog at `path` to the newest revision, making it when it is not there.

    Blocking. Raises CatalogError: kind `corrupt` for a damaged file or one of a newer version.
    """
    config = alembic.config.Config()
    config.set_main_option("script_location", "ds4grpc:migrations")
    with translated():
        engine = sqlalchemy.create_engine(_url("sqlite", path), poolclass=sqlalchemy.NullPool)
        _configure(engine, "BEGIN IMMEDIATE")
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")


def writer_engine(path: str) -> AsyncEngine:
    """One connection whose transactions take the write lock first: a transaction that reads and
    then writes cannot wait for the lock and would fail at once."""
    engine = create_async_engine(_url("sqlite+aiosqlite", path), pool_size=1, max_overflow=0)
    _configure(engine.sync_engine, "BEGIN IMMEDIATE")
    return engine


def reader_engine(path: str) -> sqlalchemy.Engine:
    """Connections for single SELECTs in worker threads: no transaction outlives its statement, so
    no snapshot keeps the log from being checkpointed.

    Not aiosqlite: each of its steps is a way to another thread and back, and a lookup has five.
    """
    engine = sqlalchemy.create_engine(
        _url("sqlite", path),
        isolation_level="AUTOCOMMIT",
        pool_size=NUM_READERS,
        max_overflow=0,
        pool_reset_on_return=None,
    )
    _configure(engine, None)
    return engine


def write_log_back(path: str) -> None:
    """Writes the log back into the file and cuts it to nothing, unless somebody reads.

    Waits for nobody: whoever waits for a reader here holds up every writer. Blocking. Raises
    CatalogError.
    """
    with translated(), closing(sqlite3.connect(path, timeout=0)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def _url(driver: str, path: str) -> sqlalchemy.URL:
    return sqlalchemy.URL.create(driver, database=path)


def _configure(engine: sqlalchemy.Engine, begin: str | None) -> None:
    def settle(connection: Any, _: ConnectionPoolEntry) -> None:
        # Transactions are begun below, not by Python's driver, which begins them lazily.
        connection.isolation_level = None
        cursor = connection.cursor()
        for setting in (
            f"busy_timeout = {BUSY_TIMEOUT_MS}",
            "synchronous = NORMAL",  # a lost row is found again: the files are the truth
            f"wal_autocheckpoint = {WAL_PAGES}",
            f"journal_size_limit = {WAL_LIMIT_BYTES}",
            "foreign_keys = ON",
        ):
            cursor.execute(f"PRAGMA {setting}")
        cursor.execute("PRAGMA journal_mode = WAL")
        (mode,) = cursor.fetchone()
        cursor.close()
        if mode != "wal":  # it needs locks and memory shared by all processes
            raise CatalogError(
                f"the file system cannot keep the catalog's log (journal mode {mode!r})", "io"
            )

    def start(connection: sqlalchemy.Connection) -> None:
        if begin is not None:
            connection.exec_driver_sql(begin)

    sqlalchemy.event.listen(engine, "connect", settle)
    sqlalchemy.event.listen(engine, "begin", start)
