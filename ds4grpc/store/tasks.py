"""Tasks and threads that the store owns: a caller may stop waiting for one, but not stop it.

A task that is cancelled inside an aiosqlite write transaction leaves the catalog locked for good,
so no caller's cancellation may reach one. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

THREADS_A_POOL = 4  # disks serve a few requests at once better than one, and hardly better many


def _pool(name: str) -> Any:
    return field(default_factory=lambda: ThreadPoolExecutor(THREADS_A_POOL, f"store-{name}"))


@dataclass(frozen=True, slots=True)
class Threads:
    """Four pools, so that short work never waits behind a load or a write, that a load can wait for
    its reads, and that it never waits for a file that comes or goes. Threads start when they are
    first needed."""

    work: ThreadPoolExecutor = _pool("work")  # short file work
    long: ThreadPoolExecutor = _pool("long")  # loads, writes, verifications
    read: ThreadPoolExecutor = _pool("read")  # block reads of loads; wait for nothing
    transfer: ThreadPoolExecutor = _pool("transfer")  # exports and imports

    async def stop(self) -> None:
        for pool in (self.work, self.long, self.read, self.transfer):
            await asyncio.to_thread(pool.shutdown)


class Run(Protocol):
    """Runs short blocking work in a worker thread."""

    async def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


class OwnedTasks:
    """The running ones; `drain` before the loop ends."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work to its end, whatever becomes of the caller; when the caller is cancelled
        nobody gets the result."""
        task = self.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_look_at)
            raise

    async def drain(self) -> None:
        """Waits for all of them, also for those that start meanwhile."""
        while self._running:
            await asyncio.wait(self._running)


def _look_at(task: asyncio.Task[Any]) -> None:
    """Takes note of an outcome, so that asyncio does not report it as forgotten."""
    if not task.cancelled():
        task.exception()
