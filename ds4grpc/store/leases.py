"""Who uses which bank just now. Knows nothing else of banks. Any thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class Leases:
    """Counts who uses a bank. A leased bank is not evicted nor deleted; any thread.

    A lease on a bank keeps its ancestors too: they are needed by a child that stays.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()  # guarded by the lock; no zeros
        self._paths: Counter[str] = Counter()  # of the files behind them; the same

    def take(self, bank_id: str, paths: Iterable[str] = ()) -> None:
        """`paths` are the files that its rows lie in now: they stay, whatever takes their
        place."""
        with self._lock:
            self._counts[bank_id] += 1
            self._paths.update(paths)

    def release(self, bank_id: str, paths: Iterable[str] = ()) -> None:
        with self._lock:
            _take_one(self._counts, bank_id)
            for path in paths:
                _take_one(self._paths, path)

    def needs(self, path: str) -> bool:
        """Whether somebody may still read this file."""
        with self._lock:
            return path in self._paths

    def held(self) -> set[str]:
        with self._lock:
            return set(self._counts)


def _take_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if counts[name] == 0:
        del counts[name]
