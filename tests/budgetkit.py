"""Stores with a cap of a few banks, for tests of what goes and what stays."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bankkit import Observed, Turns, config_of

from ds4grpc.store.files import Files
from ds4grpc.store.store import Store

TOKENS = 2000
FILE_BYTES = TOKENS * 128 + 24576  # rows, and at most six sections' worth of rounding


def occupied(folder: Path) -> int:
    """What `du` says of everything below a folder, itself not counted."""
    total = 0
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@asynccontextmanager
async def store_for(
    folder: Path, num_banks: float, observed: Observed | None = None, files: Files | None = None
) -> AsyncIterator[Store]:
    """A store whose cap has room for about that many banks of TOKENS tokens."""
    quota_bytes = int(num_banks * FILE_BYTES * 16 / 15) + (1 << 19)
    config = config_of(folder, quota_bytes=quota_bytes)
    async with Store(config, observed or Observed(), files) as store:
        yield store


def conversation(seed: int) -> Turns:
    return Turns().grow(seed, TOKENS)


async def is_stored(store: Store, turns: Turns) -> bool:
    leases = await store.match(turns.query())
    for lease in leases:
        lease.release()
    return any(lease.content.frontier == turns.frontier for lease in leases)
