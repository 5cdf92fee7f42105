"""One server process: builds every part, says when it is ready, and takes it down in order.

The only file that knows every part. `run` is the program's main thread: it loads the model, then
runs the event loop until a signal.

    signal -> NOT_SERVING -> no new work -> streams end (grace) -> banks to disk -> exit 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from prometheus_client import CollectorRegistry

from ds4grpc import __version__
from ds4grpc.bank import PersistReason
from ds4grpc.config import MB, Address, ServeConfig
from ds4grpc.engine.core import Core, CoreOptions
from ds4grpc.engine.engine import EngineLimits, TorchEngine
from ds4grpc.engine.memory import SlotMemory, allocate
from ds4grpc.engine.runner import Runner
from ds4grpc.engine.scheduler import Scheduler
from ds4grpc.engine.slots import Slots
from ds4grpc.errors import ConfigError
from ds4grpc.loading import Loaded, default_sampling, describe, load
from ds4grpc.logs import LogWriter, line
from ds4grpc.metrics import BuildInfo, EngineState, Metrics, MetricsListener, StoreState
from ds4grpc.model.interface import State
from ds4grpc.rpc.bank import BankService
from ds4grpc.rpc.generation import GenerationService, ServedModel
from ds4grpc.rpc.identity import Tenants
from ds4grpc.rpc.interceptors import ErrorInterceptor
from ds4grpc.rpc.model import ModelService
from ds4grpc.rpc.reflection import add_reflection
from ds4grpc.store.store import Store
from ds4grpc.tier import Tier, open_tier, watch_tier
from ds4grpc.v1 import (
    bank_pb2_grpc,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

log = logging.getLogger(__name__)

GENERATION = "ds4grpc.v1.GenerationService"
MODEL = "ds4grpc.v1.ModelService"
BANK = "ds4grpc.v1.BankService"
HEALTH = "grpc.health.v1.Health"

MAX_RECEIVE_BYTES = 64 * MB
# Worker threads render, tokenize, look up, copy and read; more would only share the same cores.
_WORKERS = 4
# What a bank that lost its slot may take, of the memory for resident banks, until it is written.
_STAGING_SHARE = 4
# Prefill chunks while other requests run: this part of a chunk alone, and not less than that.
_SHARED_CHUNK = 4
_MIN_CHUNK = 32
# A client may ping this often on a silent stream, such as a long prefill.
_MIN_PING_MS = 10_000


def run(config: ServeConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code.

    Raises ConfigError, ModelNotFound, ModelError when it cannot start.
    """
    with LogWriter(sys.stderr, form=config.log_format, level=config.log_level):
        return asyncio.run(_serve(config))


async def _serve(config: ServeConfig) -> int:
    began = time.monotonic()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():
            log.warning(line("second signal: exit at once, nothing more is stored"))
            sys.stderr.flush()
            os._exit(130)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    async with _start(config) as server:
        _say(server.ready_line(time.monotonic() - began))
        await stopping.wait()
        await server.drain(config.grace_seconds)
    log.info(line("stopped"))
    return 0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `address` and the others carry the ports that were really bound."""

    address: Address
    admin_address: Address | None
    metrics_address: Address
    model: model_pb2.Model
    folder: str  # of banks; "" when the disk tier is off
    off_detail: str  # why it is off
    num_stored: int
    engine: TorchEngine
    health: health_aio.HealthServicer
    stores: bool

    def ready_line(self, seconds: float) -> str:
        """What a person wants to know when it is up."""
        model = self.model
        size = model.num_slots * model.max_context_tokens * model.kv_bytes_per_token / MB
        disk = (
            f"banks {self.folder} ({self.num_stored} stored)"
            if self.folder
            else f"banks not stored: {self.off_detail}"
        )
        admin = f" | admin {self.admin_address}" if self.admin_address else ""
        return (
            f"ready in {seconds:.1f} s | grpc {self.address}{admin}"
            f" | metrics http://{self.metrics_address}/metrics"
            f" | {model.name} {model.dtype} {model.device}"
            f" | {model.num_slots} slots x {model.max_context_tokens:,} tokens = up to"
            f" {size:,.0f} MB | {disk}"
        )

    async def drain(self, grace_seconds: float) -> None:
        """NOT_SERVING at once, streams end within the grace, banks are written."""
        log.info(line("draining", grace=grace_seconds))
        await self.health.enter_graceful_shutdown()
        await self.engine.drain(grace_seconds)
        if self.stores:
            async for want, persisted in self.engine.flush(PersistReason.STOP):
                if persisted.detail:
                    log.warning(
                        line(
                            "bank not stored",
                            tokens=want.source.content.frontier,
                            reason=persisted.detail,
                        )
                    )


@asynccontextmanager
async def _start(config: ServeConfig) -> AsyncIterator[Server]:
    """Builds every part and takes them down in the opposite order."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        workers = ThreadPoolExecutor(_WORKERS, "worker")
        stack.push_async_callback(asyncio.to_thread, workers.shutdown)
        loaded = await loop.run_in_executor(workers, load, config)
        checkpoint, model = loaded.checkpoint, loaded.model
        collected = CollectorRegistry()
        metrics = Metrics(
            collected,
            BuildInfo(
                version=__version__,
                model=checkpoint.name,
                fingerprint=loaded.fingerprint.hex()[:16],
                dtype=model.numeric_mode,
                device=model.device.type,
            ),
        )
        listener = MetricsListener(collected, config.metrics_listen)
        stack.push_async_callback(asyncio.to_thread, listener.close)
        tier = await stack.enter_async_context(open_tier(config, loaded, metrics))
        store = tier.store
        engine = await stack.enter_async_context(_engine(config, loaded, metrics, store, workers))
        _watch(metrics, engine, store)
        described = describe(config, loaded)
        health = health_aio.HealthServicer()
        server = _grpc_server()
        tenants = Tenants(loopback=config.listen.is_loopback)
        sampling = default_sampling(checkpoint)
        served = ServedModel(
            name=checkpoint.name,
            vocabulary_size=model.vocabulary_size,
            max_context=model.max_context,
            sampling=sampling,
            exact_reuse=config.exact_reuse,
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationService(engine, loaded.prompts, served, metrics, tenants, workers), server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelService(described, checkpoint.tokenizer, loaded.prompts, workers), server
        )
        services = [GENERATION, MODEL]
        admin, admin_address = None, None
        if config.admin_listen is not None:
            admin = _grpc_server()
            _add_banks(admin, config.admin_listen, loaded, engine, tier, workers)
            health_pb2_grpc.add_HealthServicer_to_server(health, admin)
            add_reflection(admin, (BANK, HEALTH))
        elif config.listen.is_loopback:
            _add_banks(server, config.listen, loaded, engine, tier, workers)
            services.append(BANK)
        else:
            log.warning(line("BankService is not served beyond loopback; see --admin-listen"))
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        add_reflection(server, (*services, HEALTH))
        address = await _listen(server, config.listen, "--listen", stack)
        if admin is not None and config.admin_listen is not None:
            admin_address = await _listen(admin, config.admin_listen, "--admin-listen", stack)
        for service in ("", GENERATION, MODEL, BANK):
            await health.set(service, health_pb2.HealthCheckResponse.SERVING)
        if not config.no_kv_disk:  # what is wanted is no trouble
            watching = asyncio.create_task(watch_tier(tier, health, BANK))
            stack.push_async_callback(_ended, watching)
        yield Server(
            address=address,
            admin_address=admin_address,
            metrics_address=listener.address,
            model=described,
            folder=str(config.bank_folder) if store is not None else "",
            off_detail=tier.off_detail,
            num_stored=(await store.storage()).num_stored if store is not None else 0,
            engine=engine,
            health=health,
            stores=store is not None,
        )


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _engine(
    config: ServeConfig,
    loaded: Loaded,
    metrics: Metrics,
    store: Store | None,
    workers: ThreadPoolExecutor,
) -> AsyncIterator[TorchEngine]:
    model, layout = loaded.model, loaded.model.layout

    def new_memory() -> tuple[SlotMemory, State]:
        memory = allocate(layout, model.max_context, model.device)
        return memory, model.bind(memory.planes)

    core = Core(
        CoreOptions(
            fingerprint=loaded.fingerprint,
            layout=layout,
            max_context=model.max_context,
            min_tokens=config.kv_cache_min_tokens,
            memory_bytes=loaded.kv_bytes,
            staging_bytes=loaded.kv_bytes // _STAGING_SHARE,
            writes=store is not None,
        ),
        Slots(layout, config.slots, model.max_context, new_memory),
        Runner(model),
        Scheduler(
            chunk_alone=config.prefill_chunk,
            chunk_shared=max(_MIN_CHUNK, config.prefill_chunk // _SHARED_CHUNK),
        ),
        loaded.checkpoint.tokenizer,
        metrics,
        store_version=lambda: store.version if store is not None else 0,
    )
    engine = TorchEngine(
        core,
        loaded.prompts,
        layout,
        EngineLimits(model.max_context, model.vocabulary_size, config.queue, loaded.kv_bytes),
        store,
        workers,
    )
    async with engine:
        yield engine


def _add_banks(
    server: grpc.aio.Server,
    address: Address,
    loaded: Loaded,
    engine: TorchEngine,
    tier: Tier,
    workers: ThreadPoolExecutor,
) -> None:
    service = BankService(
        engine,
        tier.store,
        tier.off_detail,
        Tenants(loopback=address.is_loopback),
        loaded.kv_bytes,
        loaded.checkpoint.tokenizer,
        workers,
        loaded.model.numeric_mode,
    )
    bank_pb2_grpc.add_BankServiceServicer_to_server(service, server)


def _grpc_server() -> grpc.aio.Server:
    return grpc.aio.server(
        interceptors=[ErrorInterceptor()],
        options=[
            ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
            ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server on it
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_MS),
        ],
    )


async def _listen(
    server: grpc.aio.Server, address: Address, option: str, stack: AsyncExitStack
) -> Address:
    """Binds and starts; returns the address with the port that was bound."""
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise ConfigError(
            f"{option} {address} cannot be bound: is another server running there?"
        ) from error
    await server.start()
    stack.push_async_callback(server.stop, grace=0)
    return Address(address.host, port)


def _watch(metrics: Metrics, engine: TorchEngine, store: Store | None) -> None:
    def engine_state() -> EngineState:
        stats = engine.stats()
        return EngineState(stats.slots, stats.resident_trust, stats.kv_bytes, stats.last_step)

    metrics.watch_engine(engine_state)
    if store is not None:

        def store_state() -> StoreState:
            return StoreState(
                not store.trouble, store.banks_by_trust, store.disk_bytes, store.quota_bytes
            )

        metrics.watch_store(store_state)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
