"""Who uses which bank just now. Knows nothing else of banks. Any thread."""

from __future__ import annotations

import threading
from collections import Counter


class Leases:
    """Counts who uses a bank. A leased bank is not evicted nor deleted; any thread.

    A lease on a bank keeps its ancestors too: they are needed by a child that stays.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()  # guarded by the lock; no zeros

    def take(self, bank_id: str) -> None:
        with self._lock:
            self._counts[bank_id] += 1

    def release(self, bank_id: str) -> None:
        with self._lock:
            self._counts[bank_id] -= 1
            if self._counts[bank_id] == 0:
                del self._counts[bank_id]

    def held(self) -> set[str]:
        with self._lock:
            return set(self._counts)
