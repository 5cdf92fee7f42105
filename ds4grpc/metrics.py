"""Every Prometheus metric of the server, and the one lock that makes each scrape consistent.

Owns `Metrics`, whose methods the other parts call from any thread; `families` has the names and
label sets. Knows no engine, store or gRPC: what mirrors their state is read through
callbacks, once a scrape, on the scraping thread. Nothing here is global.

One lock is held for each update and while a scrape reads all families, so these hold always:

    requests_started_total == sum(requests_total) + requests_running + requests_waiting
    sum(prompt_tokens_total) == sum of `started.prompt_tokens`
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ds4grpc.bank import Admission, MissReason, PersistReason, RecordKind
from ds4grpc.config import Address
from ds4grpc.errors import ConfigError
from ds4grpc.families import (
    BUCKETS,
    CATALOG_FAULTS,
    FAMILIES,
    PERSIST_FAULTS,
    RESTORE_RESULTS,
    SLOT_STATES,
    TRUST,
    Family,
)

Stage = Literal["lookup", "load", "compute"]


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """What runs; `fingerprint` is its first 16 hex digits."""

    version: str
    model: str
    fingerprint: str
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class EngineState:
    """What a scrape shows of the engine. `banks` by trust, `last_step` in Unix seconds."""

    slots: Mapping[str, int] = field(default_factory=dict)
    banks: Mapping[str, int] = field(default_factory=dict)
    kv_memory_bytes: int = 0
    last_step: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreState:
    """What a scrape shows of the disk tier. `banks` by trust."""

    enabled: bool = False
    banks: Mapping[str, int] = field(default_factory=dict)
    disk_bytes: int = 0
    quota_bytes: int = 0


class Admitted(Protocol):
    """What an admission is counted by; `engine.request.Started` is one."""

    @property
    def admission(self) -> Admission: ...
    @property
    def miss_reason(self) -> MissReason | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def memory_tokens(self) -> int: ...
    @property
    def disk_tokens(self) -> int: ...
    @property
    def hidden_tokens(self) -> int: ...
    @property
    def queue_seconds(self) -> float: ...


class RequestCount:
    """One Generate call's way through the counts: waiting, running, ended. Any thread."""

    __slots__ = ("_admission", "_metrics", "_state")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._state: Literal["waiting", "running", "ended"] = "waiting"
        self._admission = Admission.COLD
        with metrics.lock:
            metrics.counter("ds4grpc_requests_started_total").inc()
            metrics.gauge("ds4grpc_requests_waiting").inc()

    def admitted(self, started: Admitted) -> None:
        """The call got a slot. Ignored after `ended` (the two come from different threads)."""
        metrics = self._metrics
        computed = started.prompt_tokens - started.memory_tokens - started.disk_tokens
        with metrics.lock:
            if self._state != "waiting":
                return
            self._state = "running"
            self._admission = started.admission
            metrics.gauge("ds4grpc_requests_waiting").dec()
            metrics.gauge("ds4grpc_requests_running").inc()
            metrics.counter("ds4grpc_admissions_total", started.admission).inc()
            if started.miss_reason is not None:
                metrics.counter("ds4grpc_cache_misses_total", started.miss_reason).inc()
            tokens = metrics.counter
            tokens("ds4grpc_prompt_tokens_total", "computed").inc(computed)
            tokens("ds4grpc_prompt_tokens_total", "memory").inc(started.memory_tokens)
            tokens("ds4grpc_prompt_tokens_total", "disk").inc(started.disk_tokens)
            tokens("ds4grpc_hidden_tokens_total").inc(started.hidden_tokens)
            metrics.histogram("ds4grpc_queue_seconds").observe(started.queue_seconds)

    def first_token(self, *, since_slot: float, since_arrival: float) -> None:
        """The first token was sampled, in seconds since the slot was given and since arrival."""
        metrics, admission = self._metrics, self._admission
        with metrics.lock:
            metrics.histogram("ds4grpc_prefill_seconds", admission).observe(since_slot)
            metrics.histogram("ds4grpc_time_to_first_token_seconds", admission).observe(
                since_arrival
            )

    def ended(self, code: str, finish_reason: str = "none") -> None:
        """The call ended with a status of `CODES`; only the first call counts."""
        metrics = self._metrics
        with metrics.lock:
            if self._state == "ended":
                return
            metrics.gauge(f"ds4grpc_requests_{self._state}").dec()
            metrics.counter("ds4grpc_requests_total", code, finish_reason).inc()
            self._state = "ended"


class Metrics(Collector):
    """All families on one registry, every combination of label values at 0.

    A label value outside its closed set is a bug of ours: KeyError. Only failures that come from
    outside (`kind`, `result`) fall back to `other`.
    """

    def __init__(self, registry: CollectorRegistry, build: BuildInfo) -> None:
        self.lock = threading.Lock()
        self._read_engine: Callable[[], EngineState] = EngineState
        self._read_store: Callable[[], StoreState] = StoreState
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._counters: dict[tuple[str, ...], Counter] = {}
        self._gauges: dict[tuple[str, ...], Gauge] = {}
        self._histograms: dict[tuple[str, ...], Histogram] = {}
        facts = dataclasses.asdict(build)
        for family in FAMILIES:
            is_build = family.name == "ds4grpc_build_info"
            sets = [(facts[name],) if is_build else family.labels[name] for name in family.labels]
            self._create(family, itertools.product(*sets))
        self.gauge("ds4grpc_build_info", *facts.values()).set(1)
        registry.register(self)

    def _create(self, family: Family, series: Iterable[tuple[str, ...]]) -> None:
        labels = tuple(family.labels)
        metric: Counter | Gauge | Histogram
        if family.kind == "histogram":
            metric = Histogram(family.name, family.text, labels, registry=None, buckets=BUCKETS)
        elif family.kind == "counter":
            metric = Counter(family.name, family.text, labels, registry=None)
        else:
            metric = Gauge(family.name, family.text, labels, registry=None)
        self._families[family.name] = metric
        for values in series:
            child = metric.labels(*values) if values else metric
            if isinstance(child, Histogram):
                self._histograms[family.name, *values] = child
            elif isinstance(child, Counter):
                self._counters[family.name, *values] = child
            else:
                self._gauges[family.name, *values] = child

    # The three below are for callers that hold `lock`.

    def counter(self, name: str, *values: str) -> Counter:
        return self._counters[name, *values]

    def gauge(self, name: str, *values: str) -> Gauge:
        return self._gauges[name, *values]

    def histogram(self, name: str, *values: str) -> Histogram:
        return self._histograms[name, *values]

    def watch_engine(self, read: Callable[[], EngineState]) -> None:
        """`read` is called at each scrape, on its thread; it must be quick and not raise."""
        self._read_engine = read

    def watch_store(self, read: Callable[[], StoreState]) -> None:
        """As `watch_engine`, for the disk tier."""
        self._read_store = read

    def request_started(self) -> RequestCount:
        """A Generate call arrived, whatever becomes of it."""
        return RequestCount(self)

    def stage(self, stage: Stage, seconds: float) -> None:
        """An admission spent `seconds` in a stage."""
        with self.lock:
            self.histogram("ds4grpc_admission_seconds", stage).observe(seconds)

    def prefilled(self, num_tokens: int) -> None:
        with self.lock:
            self.counter("ds4grpc_prefill_tokens_total").inc(num_tokens)

    def generated(self, num_tokens: int) -> None:
        with self.lock:
            self.counter("ds4grpc_generated_tokens_total").inc(num_tokens)

    def inter_token(self, seconds: float) -> None:
        with self.lock:
            self.histogram("ds4grpc_inter_token_seconds").observe(seconds)

    def record(self, kind: RecordKind, outcome: str, *, thinking: bool) -> None:
        """A turn finished and built (or could not build) a record; outcome of RECORD_OUTCOMES."""
        with self.lock:
            self.counter("ds4grpc_records_total", kind, "on" if thinking else "off", outcome).inc()

    def persisted(self, reason: PersistReason, seconds: float, written_bytes: int) -> None:
        """A bank file was published."""
        with self.lock:
            self.counter("ds4grpc_bank_persists_total", reason).inc()
            self.counter("ds4grpc_bank_written_bytes_total").inc(written_bytes)
            self.histogram("ds4grpc_bank_persist_seconds").observe(seconds)

    def compacted(self, seconds: float, written_bytes: int) -> None:
        """Files of a chain were merged."""
        with self.lock:
            self.counter("ds4grpc_bank_compacted_bytes_total").inc(written_bytes)

    def persist_failed(self, kind: str) -> None:
        with self.lock:
            known = kind if kind in PERSIST_FAULTS else "other"
            self.counter("ds4grpc_bank_persist_failures_total", known).inc()

    def restored(self, result: str, seconds: float, read_bytes: int) -> None:
        """A load of a stored bank ended, well or not."""
        with self.lock:
            known = result if result in RESTORE_RESULTS else "other"
            self.counter("ds4grpc_bank_restores_total", known).inc()
            self.counter("ds4grpc_bank_read_bytes_total").inc(read_bytes)
            self.histogram("ds4grpc_bank_restore_seconds").observe(seconds)

    def evicted(self, reason: str) -> None:
        with self.lock:
            self.counter("ds4grpc_bank_evictions_total", reason).inc()

    def catalog(self, op: str, seconds: float) -> None:
        with self.lock:
            self.histogram("ds4grpc_catalog_seconds", op).observe(seconds)

    def catalog_error(self, kind: str) -> None:
        with self.lock:
            known = kind if kind in CATALOG_FAULTS else "other"
            self.counter("ds4grpc_catalog_errors_total", known).inc()

    def describe(self) -> Iterator[Metric]:
        """The families without samples; lets the registry refuse a name that is taken."""
        for metric in self._families.values():
            yield from metric.describe()

    def collect(self) -> Iterator[Metric]:
        """One consistent scrape. Any thread; reads the callbacks before it takes the lock."""
        engine, store = self._read_engine(), self._read_store()
        with self.lock:
            self._mirror(engine, store)
            families = [family for metric in self._families.values() for family in metric.collect()]
        for family in families:
            # prometheus_client adds the creation time of each series as one more series.
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
        return iter(families)

    def _mirror(self, engine: EngineState, store: StoreState) -> None:
        for state in SLOT_STATES:
            self.gauge("ds4grpc_slots", state).set(engine.slots.get(state, 0))
        for trust in TRUST:
            self.gauge("ds4grpc_banks", "resident", trust).set(engine.banks.get(trust, 0))
            self.gauge("ds4grpc_banks", "stored", trust).set(store.banks.get(trust, 0))
        self.gauge("ds4grpc_kv_memory_bytes").set(engine.kv_memory_bytes)
        self.gauge("ds4grpc_engine_last_step_timestamp_seconds").set(engine.last_step)
        self.gauge("ds4grpc_disk_enabled").set(store.enabled)
        self.gauge("ds4grpc_disk_bytes").set(store.disk_bytes)
        self.gauge("ds4grpc_disk_quota_bytes").set(store.quota_bytes)


class MetricsListener:
    """`/metrics` over HTTP on a thread of its own, until `close`."""

    def __init__(self, registry: CollectorRegistry, address: Address) -> None:
        """Listens at once. Raises ConfigError when the address cannot be had."""
        try:
            self._server, self._thread = start_http_server(
                address.port, addr=address.host, registry=registry
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address} (--metrics-listen): {error.strerror or error}"
            ) from error
        self.address = Address(address.host, self._server.server_port)

    def close(self) -> None:
        """Stops listening; waits for the thread, not for scrapes under way."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
