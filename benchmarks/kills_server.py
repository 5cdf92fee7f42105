"""The server that kills.py kills: the real one, told apart by the steps of its store.

Started once, it imports everything, then forks a server for each line it reads on stdin (a JSON
object with `args` and `aim`). Each says in a shared file which step of which operation it takes
next, and with an aim (`<operation>: <step>`) kills itself there, with SIGKILL. Compaction begins
sooner than it would, since no cycle waits for an idle server, and a bank is never computed again
because that is faster, as it is with a model as small as this.
"""

from __future__ import annotations

import contextvars
import functools
import json
import mmap
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import sqlalchemy
import sqlalchemy.event

import ds4grpc.commands.serve
import ds4grpc.engine.reuse
import ds4grpc.server  # everything that a server needs, before the first fork
import ds4grpc.store.catalog
import ds4grpc.store.compact
from ds4grpc.cli import main
from ds4grpc.store.compact import Compactor
from ds4grpc.store.delta import DeltaWriter
from ds4grpc.store.files import Files
from ds4grpc.store.shelf import Shelf

STATUS_BYTES = 64
IDLE = "between operations"
# What the store does outside of an operation: hit counts, checkpoints, the start.
OTHER = "upkeep"
operation: contextvars.ContextVar[str] = contextvars.ContextVar("operation", default=OTHER)


class Steps:
    """Where the store stands, in a file that outlives the process."""

    def __init__(self, status: mmap.mmap, aim: str) -> None:
        self._status = status
        self._aim = aim

    def at(self, step: str) -> None:
        """The process is about to take this step."""
        name = f"{operation.get()}: {step}"
        self.say(name)
        if name == self._aim:
            os.kill(os.getpid(), signal.SIGKILL)

    def say(self, name: str) -> None:
        self._status[:STATUS_BYTES] = name.encode().ljust(STATUS_BYTES)


def watch(steps: Steps) -> None:
    """Puts the hooks in. Reading changes nothing, so it is no step."""

    def before(self: Files, name: str, path: str) -> None:
        if name in ("read", "open_read", "scan"):
            return
        if name == "rename" and path.endswith(".dead"):
            name = "rename to .dead"
        steps.at(name)

    def statement(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        words = " ".join(text.lower().split()[:2])
        if not words.startswith(("select", "with", "pragma", "begin")):
            steps.at("insert into hashes" if "into hashes" in text.lower() else words)

    Files.before = before  # type: ignore[method-assign]
    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", statement)
    sqlalchemy.event.listen(sqlalchemy.Engine, "commit", lambda _: steps.at("commit"))
    for owner, method, name in (
        (DeltaWriter, "_write", "publish"),
        (Compactor, "_merge_at", "compaction"),
        (Shelf, "delete", "delete"),
        (Shelf, "_evict", "delete"),
        (Shelf, "expire", "delete"),
    ):
        _during(owner, method, name, steps)
    for method in ("run", "run_long"):
        _carry(method)
    migrate = ds4grpc.store.catalog.upgrade

    def upgrade(path: str) -> None:
        token = operation.set("migration")
        try:
            migrate(path)
        finally:
            operation.reset(token)

    ds4grpc.store.catalog.upgrade = upgrade
    ds4grpc.engine.reuse._recompute_wins = lambda *_: False
    ds4grpc.store.compact.RUN_FILES = 3
    ds4grpc.store.compact.IDLE_SECONDS = 0.0
    ds4grpc.store.compact.ROUND_SECONDS = 0.1


def _during(owner: type, method: str, name: str, steps: Steps) -> None:
    """Names the steps that are taken while a coroutine of this method runs."""
    inner: Callable[..., Awaitable[Any]] = getattr(owner, method)

    @functools.wraps(inner)
    async def named(*args: Any, **kwargs: Any) -> Any:
        token = operation.set(name)
        try:
            return await inner(*args, **kwargs)
        finally:
            operation.reset(token)
            steps.say(IDLE)

    setattr(owner, method, named)


def _carry(method: str) -> None:
    """Lets work in a worker thread know whose it is."""
    inner: Callable[..., Awaitable[Any]] = getattr(Shelf, method)

    @functools.wraps(inner)
    async def carried(self: Shelf, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await inner(self, contextvars.copy_context().run, work, *args, **kwargs)

    setattr(Shelf, method, carried)


def serve(args: list[str], aim: str, status: mmap.mmap) -> None:
    """Never returns."""
    steps = Steps(status, aim)
    steps.say(IDLE)
    watch(steps)
    try:
        main(["serve", *args], prog_name="ds4grpc", standalone_mode=False)
    finally:
        os._exit(1)


def answer(path: str) -> None:
    with open(path, "r+b") as file:
        status = mmap.mmap(file.fileno(), STATUS_BYTES)
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if child == 0:
            serve(wanted["args"], wanted["aim"], status)
        sys.stdout.write(f"child {child}\n")
        sys.stdout.flush()
        os.waitpid(child, 0)
        sys.stdout.write("ended\n")
        sys.stdout.flush()


if __name__ == "__main__":
    answer(sys.argv[1])
