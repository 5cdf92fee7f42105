"""What the bank folder occupies, and how much more may be written below the cap.

Owns the count of bytes, of this model's folder and of the others under the same root. Evicts
nothing: that is the shelf's. Event loop; looks at the disk in worker threads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ds4grpc.store.folder import Folder
from ds4grpc.store.tasks import Run

# Kept free below the cap for what grows between two looks at it: the catalog and its log. At
# most a sixteenth of the cap, so that a small one is not all slack.
SLACK_BYTES = 2 << 20


class Budget:
    """The bytes under one root, against the cap that all its models share."""

    def __init__(
        self, folder: Folder, quota_bytes: int, run: Run, bank_bytes: Callable[[], int]
    ) -> None:
        """`bank_bytes` are those of all files in service."""
        self.quota_bytes = quota_bytes
        self.num_quarantined = 0
        self.other_bytes = 0  # of everything in the folder but banks, quarantine and catalog
        self.foreign_bytes = 0  # of the other models' folders, and of files nobody knows of
        self.quarantine_bytes = 0
        self._catalog_bytes = 0
        self._claimed_bytes = 0  # what the other folders' owners may still write
        self._reserved_bytes = 0  # of temp files
        self._folder = folder
        self._run = run
        self._bank_bytes = bank_bytes

    @property
    def disk_bytes(self) -> int:
        """What the whole folder occupies, other models' parts and temp files included."""
        return (
            self._bank_bytes()
            + self.other_bytes
            + self._folder.new_bytes
            + self._catalog_bytes
            + self.foreign_bytes
            + self.quarantine_bytes
            + self._reserved_bytes
        )

    @property
    def _slack_bytes(self) -> int:
        return min(SLACK_BYTES, self.quota_bytes // 16)

    def over(self, num_bytes: int) -> int:
        """By how much the cap would be passed with so much more."""
        due = self.disk_bytes + self._claimed_bytes + self._slack_bytes + num_bytes
        return due - self.quota_bytes

    async def take(self, num_bytes: int) -> None:
        """Takes room that there is; `give_back` ends it. Raises OSError."""
        self._reserved_bytes += num_bytes
        try:
            await self.claim()
        except OSError:
            self._reserved_bytes -= num_bytes
            raise

    def give_back(self, num_bytes: int) -> None:
        self._reserved_bytes -= num_bytes

    async def measure(self) -> None:
        """Looks again at what grows by itself: catalog and quarantine. Raises OSError."""
        self._catalog_bytes = await self._run(self._folder.catalog_bytes)
        quarantined = await self._run(self._folder.quarantined)
        self.num_quarantined = len(quarantined)
        self.quarantine_bytes = sum(seen.size_on_disk_bytes for seen in quarantined)

    async def measure_foreign(self) -> None:
        """Looks again at the other models' folders. Raises OSError."""
        measured = await self._run(self._folder.foreign_bytes)
        self.foreign_bytes, self._claimed_bytes = measured

    async def claim(self) -> None:
        """Lets the other models' servers know what is still to be written. Raises OSError."""
        claimed = self._reserved_bytes + self._slack_bytes
        await self._run(self._folder.claim, claimed)

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """The room below the cap is this process's to take. Raises OSError."""
        cap = self._folder.cap_lock()
        await self._run(cap.__enter__)
        try:
            yield
        finally:
            cap.__exit__(None, None, None)
