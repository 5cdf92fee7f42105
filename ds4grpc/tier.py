"""The disk tier of a server: opened by its options, or off and saying why.

Owns what becomes of a folder that is busy or cannot be used, and what health tells of the disk.
Knows no banks. Event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from ds4grpc.config import MB, ServeConfig
from ds4grpc.errors import ConfigError, StoreDisabled
from ds4grpc.loading import Loaded
from ds4grpc.logs import line
from ds4grpc.metrics import Metrics
from ds4grpc.store.files import Files
from ds4grpc.store.folder import occupied_bytes
from ds4grpc.store.store import Store, StoreConfig

log = logging.getLogger(__name__)

_HEALTH_SECONDS = 1.0  # how late health tells of the disk


@dataclass(frozen=True, slots=True)
class Tier:
    """The disk tier; without a `store`, why there is none."""

    store: Store | None
    off_detail: str = ""

    @property
    def trouble(self) -> str:
        """Why banks are not written at the moment."""
        return self.store.trouble if self.store is not None else self.off_detail


@asynccontextmanager
async def open_tier(config: ServeConfig, loaded: Loaded, metrics: Metrics) -> AsyncIterator[Tier]:
    """Opens the disk tier. A folder that another server has is a refusal, unless the options say
    otherwise; one that cannot be used is a tier that is off, and says so."""
    if config.no_kv_disk:
        yield Tier(None, "--no-kv-disk")
        return
    is_new = not await asyncio.to_thread(config.bank_folder.exists)
    store = await _store(config, loaded, metrics)
    try:
        await store.__aenter__()
    except StoreDisabled as error:
        busy = error.reason == "STORE_FOLDER_BUSY"
        if busy and config.kv_disk_busy == "refuse":
            raise ConfigError(
                f"{error.message}; or start without the disk tier with --kv-disk-busy off"
            ) from error
        log.error(line("banks are not kept on disk", detail=error.message))
        yield Tier(None, error.message)
        return
    if is_new:
        log.warning(
            line(
                "banks hold prompts and replies in clear, readable by this user",
                folder=str(config.bank_folder),
                off="--no-kv-disk",
            )
        )
    try:
        yield Tier(store)
    finally:
        await store.__aexit__(None, None, None)


async def watch_tier(tier: Tier, health: health_aio.HealthServicer, service: str) -> None:
    """Keeps a service's health that of the disk tier: NOT_SERVING while banks cannot be written."""
    was = health_pb2.HealthCheckResponse.SERVING
    while True:
        now = (
            health_pb2.HealthCheckResponse.NOT_SERVING
            if tier.trouble
            else health_pb2.HealthCheckResponse.SERVING
        )
        if now != was:
            await health.set(service, now)
        was = now
        await asyncio.sleep(_HEALTH_SECONDS)


def _disk_quota(config: ServeConfig) -> int:
    """Most bytes for banks. Those that are there count as free, or each start would evict some of
    them. Blocks."""
    used_bytes = 0
    if config.kv_disk_space_mb is None:
        with suppress(OSError):  # whatever is wrong with the folder shows when it is opened
            used_bytes = occupied_bytes(Files(), str(config.bank_folder))
    return config.kv_disk_bytes(used_bytes)


async def _store(config: ServeConfig, loaded: Loaded, metrics: Metrics) -> Store:
    """Makes what keeps banks on disk, not entered yet."""
    rate = config.kv_disk_write_mb_per_s
    return Store(
        StoreConfig(
            folder=str(config.bank_folder),
            fingerprint=loaded.fingerprint,
            layout=loaded.model.layout,
            quota_bytes=await asyncio.to_thread(_disk_quota, config),
            min_tokens=config.kv_cache_min_tokens,
            write_bytes_per_second=rate * MB if rate is not None else None,
            vocabulary_size=loaded.model.vocabulary_size,
        ),
        metrics,
    )
