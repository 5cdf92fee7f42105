"""Tasks that the store owns: a caller may stop waiting for one, but not stop it.

A task that is cancelled inside an aiosqlite write transaction leaves the catalog locked for good,
so no caller's cancellation may reach one. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
