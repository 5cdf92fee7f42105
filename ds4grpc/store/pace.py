"""The pace of writing: an average that bank files are not written faster than.

Owns the arithmetic and the waiting. Knows no files. Worker threads wait here; any may end it.
"""

from __future__ import annotations

import threading
import time


class Pace:
    """`bytes_per_second` None: as fast as the disk takes it."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._free_at = 0.0  # when what was written so far is paid for; guarded by the lock

    def wait(self, num_bytes: int) -> None:
        """Returns when that many bytes may be written: when those before them are paid for. A
        rest saves nothing up, so the average holds over a file as over any longer time. Blocking.
        """
        if self._rate is None or self._ended.is_set():
            return
        with self._lock:
            now = time.monotonic()
            start = max(self._free_at, now)
            self._free_at = start + num_bytes / self._rate
            seconds = start - now
        if seconds > 0:
            self._ended.wait(seconds)

    def end(self) -> None:
        """Nobody waits any more: the store closes."""
        self._ended.set()
