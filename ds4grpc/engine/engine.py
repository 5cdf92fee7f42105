"""The engine as the services see it: requests in, events out, on the event loop.

`Engine` is the protocol, `TorchEngine` the embedded default: it owns the engine thread and the
tasks that do for it what the thread must not do (look up, load, build records, write). Nothing
here computes on the loop: tokenizing, rendering and copying run in worker threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ds4grpc.bank import Ids, PersistReason, Record
from ds4grpc.chat.prompts import Prompts
from ds4grpc.engine.banks import BankStore, MatchQuery, Persisted, StoredBank
from ds4grpc.engine.core import Core
from ds4grpc.engine.memory import SlotMemory
from ds4grpc.engine.messages import (
    Ask,
    Built,
    Cancel,
    Distrust,
    Emit,
    End,
    Loaded,
    NoteUse,
    Pause,
    Planned,
    Stop,
    Submit,
    Up,
    WantCopy,
    WantLoad,
    WantPlan,
    WantRecords,
    WantWrite,
    WhenQuiet,
    Wrote,
)
from ds4grpc.engine.request import (
    Delta,
    Event,
    Finished,
    GenerationRequest,
    Progress,
    RequestKey,
    Started,
)
from ds4grpc.engine.reuse import Lookup, Plan, rank
from ds4grpc.engine.slots import SlotState
from ds4grpc.errors import (
    BankCorrupt,
    Draining,
    Ds4grpcError,
    EngineFailed,
    GenerationNotFound,
    InvalidRequest,
    Overloaded,
)
from ds4grpc.layout import StateLayout

log = logging.getLogger(__name__)
T = TypeVar("T")

# Events that a stream may hold for a slow reader before its row pauses, and when it goes on.
_STREAM_FULL = 1024
_STREAM_LOW = 128
_RECENT = 100  # ended generations that ListGenerations still shows
_RETRY_SECONDS = 2.0
_CLOCK_SET_SECONDS = 0.1  # two readings of the clocks are never so far apart by themselves


@dataclass(slots=True)
class GenerationInfo:
    """One generation as `ListGenerations` shows it; `state` is queued, running or ended."""

    request_id: str
    tenant: str
    created: float  # Unix seconds
    state: str = "queued"
    started: Started | None = None
    finished: Finished | None = None
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    code: str = ""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What gauges and `GetStorage` show."""

    slots: dict[str, int]
    resident_trust: dict[str, int]
    kv_bytes: int
    running: int
    waiting: int
    last_step: float


@dataclass(frozen=True, slots=True)
class ResidentInfo:
    """A resident bank, for `BankService`."""

    slot: int
    generation: int
    bank_id: str
    stored_bank: str
    namespace: bytes
    in_use: bool
    pinned: bool
    frontier: int
    hidden_tokens: int
    records: tuple[Record, ...]
    ids: Ids
    last_use: float  # Unix seconds


class Engine(Protocol):
    """What serves generations. The embedded one is below; a distributed one may stand behind."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Events of one generation; closing the iterator cancels it.

        Raises InvalidRequest, Overloaded, Draining before the first event; DeadlineExceeded,
        EngineFailed, Draining later.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def drain(self, grace_seconds: float) -> None:
        """Refuses new requests, lets running ones end within the grace, keeps their banks."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes in tokens; `queue` in requests; `kv_bytes` caps what one request may need."""

    max_context: int
    vocabulary_size: int
    queue: int
    kv_bytes: int


class _Stream:
    """Events of one request on their way to its reader. Event loop only."""

    def __init__(self, info: GenerationInfo) -> None:
        self.info = info
        self.events: deque[Event] = deque()
        self.arrived = asyncio.Event()
        self.ended = False
        self.error: Ds4grpcError | None = None
        self.paused = False


class TorchEngine:
    """The engine on this machine's torch. Use as an async context manager."""

    def __init__(
        self,
        core: Core,
        prompts: Prompts,
        layout: StateLayout,
        limits: EngineLimits,
        store: BankStore | None,
        workers: ThreadPoolExecutor,
    ) -> None:
        self._core = core
        self._prompts = prompts
        self._layout = layout
        self._limits = limits
        self._store = store
        self._workers = workers
        self._streams: dict[RequestKey, _Stream] = {}
        self._live: set[RequestKey] = set()  # those that the engine thread still has
        self._recent: deque[GenerationInfo] = deque(maxlen=_RECENT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._clock_offset = time.time() - time.monotonic()

    async def __aenter__(self) -> TorchEngine:
        self._loop = asyncio.get_running_loop()
        self._thread = self._core.start(self._deliver)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._core.post(Stop())
        await self._loop.run_in_executor(None, self._thread.join)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # 1) Generations

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self._check(request)
        info = GenerationInfo(request.request_id, request.tenant, time.time())
        stream = _Stream(info)
        self._streams[request.key] = stream
        self._live.add(request.key)
        self._core.post(Submit(request))
        try:
            while True:
                while stream.events:
                    event = stream.events.popleft()
                    if stream.paused and len(stream.events) <= _STREAM_LOW:
                        stream.paused = False
                        self._core.post(Pause(request.key, paused=False))
                    yield event
                if stream.ended:
                    break
                stream.arrived.clear()
                await stream.arrived.wait()
            if stream.error is not None:
                raise stream.error
            info.code = "OK"
        finally:
            if not stream.ended:
                self._core.post(Cancel(request.key, gone=True))
                info.code = "CANCELLED"
            elif stream.error is not None:
                info.code = stream.error.reason
            info.state = "ended"
            self._streams.pop(request.key, None)
            self._recent.append(info)

    def _check(self, request: GenerationRequest) -> None:
        """Refuses what can never run, and what there is no place for now."""
        if self._draining:
            raise Draining("the server is stopping; retry with another one or later")
        if request.key in self._live:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is already running",
                field="request_id",
                reason="DUPLICATE_REQUEST_ID",
            )
        num_tokens = len(request.prompt.ids)
        limit = self._limits.max_context
        if num_tokens == 0:
            raise InvalidRequest(
                "the prompt has no tokens; send at least one", field="input", reason="EMPTY_PROMPT"
            )
        if num_tokens > limit:
            raise InvalidRequest(
                f"prompt has {num_tokens:,} tokens; the limit is {limit:,} (--max-context)",
                field="input",
                reason="PROMPT_TOO_LONG",
                metadata={"promptTokens": str(num_tokens), "maxContext": str(limit)},
            )
        highest = int(request.prompt.ids.max())
        if highest >= self._limits.vocabulary_size:
            raise InvalidRequest(
                f"token id {highest} is outside the vocabulary of"
                f" {self._limits.vocabulary_size:,} ids",
                field="token_ids",
                reason="TOKEN_ID_OUT_OF_RANGE",
                metadata={"vocabularySize": str(self._limits.vocabulary_size)},
            )
        needed = int(num_tokens * self._layout.bytes_per_token)
        if needed > self._limits.kv_bytes:
            short = needed - self._limits.kv_bytes
            raise Overloaded(
                f"the prompt needs {needed >> 20:,} MB of KV memory, {short >> 20:,} MB more than"
                " there is (--kv-memory-mb)",
                retry_seconds=0,
                quota="kv_memory",
                reason="KV_MEMORY_TOO_SMALL",
                metadata={"neededBytes": str(needed), "limitBytes": str(self._limits.kv_bytes)},
            )
        waiting = sum(stream.info.state == "queued" for stream in self._streams.values())
        if waiting >= self._limits.queue:
            raise Overloaded(
                f"{waiting:,} requests are waiting; the limit is {self._limits.queue:,} (--queue)",
                retry_seconds=_RETRY_SECONDS,
                quota="queue",
                reason="QUEUE_FULL",
                metadata={"waiting": str(waiting), "limit": str(self._limits.queue)},
            )

    def cancel(self, request_id: str, tenant: str) -> None:
        """Ends a generation of `tenant` with finished{CANCELLED}. Raises GenerationNotFound."""
        key = (tenant, request_id)
        if key not in self._streams:
            raise GenerationNotFound(
                f"no running or queued generation has the request_id {request_id!r}"
            )
        self._core.post(Cancel(key, gone=False))

    def generations(self, tenant: str) -> list[GenerationInfo]:
        """Running, queued, then ended generations of `tenant`, newest first within each."""
        live = [s.info for s in reversed(self._streams.values()) if s.info.tenant == tenant]
        ended = [info for info in reversed(self._recent) if info.tenant == tenant]
        return [
            *(info for info in live if info.state == "running"),
            *(info for info in live if info.state == "queued"),
            *ended,
        ]

    # 2) What the engine thread asks for

    def _deliver(self, messages: list[Up]) -> None:
        """Takes the engine thread's list over to the loop; any thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, messages)
        except RuntimeError:  # the loop is closed: nobody is left to be served
            log.debug("dropped %d messages after the loop closed", len(messages))

    def _dispatch(self, messages: list[Up]) -> None:
        for message in messages:
            match message:
                case Emit(key=key, event=event):
                    self._push(key, event)
                case End(key=key, error=error):
                    self._live.discard(key)
                    stream = self._streams.get(key)
                    if stream is not None and not stream.ended:
                        stream.ended, stream.error = True, error
                        stream.arrived.set()
                case WantPlan():
                    self._spawn(self._plan(message))
                case WantLoad():
                    self._spawn(self._load(message))
                case WantCopy():
                    self._spawn(self._copy(message))
                case WantRecords():
                    self._spawn(self._build(message))
                case WantWrite():
                    self._spawn(self._write(message))
                case NoteUse(bank_id=bank_id, proven=proven):
                    if self._store is not None:
                        self._spawn(self._store.note_use(bank_id, proven=proven))
                case Distrust(bank_id=bank_id, detail=detail):
                    if self._store is not None:
                        self._spawn(self._store.quarantine(bank_id, detail))

    def _push(self, key: RequestKey, event: Event) -> None:
        stream = self._streams.get(key)
        if stream is None:
            return
        info = stream.info
        if isinstance(event, Started):
            info.state, info.started = "running", event
        elif isinstance(event, Progress):
            info.prefilled_tokens = event.prefilled_tokens
        elif isinstance(event, Delta):
            info.generated_tokens += 1
        elif isinstance(event, Finished):
            info.finished = event
        stream.events.append(event)
        stream.arrived.set()
        if len(stream.events) >= _STREAM_FULL and not stream.paused:
            stream.paused = True
            self._core.post(Pause(key, paused=True))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the engine failed", exc_info=error)

    async def _in_worker(self, call: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._workers, call, *args)

    async def _plan(self, want: WantPlan) -> None:
        """Looks for banks; any trouble ends this request alone."""
        began = time.monotonic()
        request = want.request
        leases: Sequence[StoredBank] = ()
        try:
            version = self._store.version if self._store is not None else 0
            if self._store is not None and want.use_store:
                prompt = request.prompt
                leases = await self._store.match(
                    MatchQuery(
                        request.cache.namespace,
                        prompt.text,
                        prompt.marks,
                        prompt.ids,
                        exact=request.cache.exact,
                        head=prompt.head,
                    )
                )
            lookup = Lookup(
                prompt=request.prompt,
                encode=lambda offset: self._prompts.encode_from(request.prompt, offset),
                layout=self._layout,
                max_context=self._limits.max_context,
                reply_tokens=want.reply_tokens,
                exact=request.cache.exact,
            )
            proposals, miss = await self._in_worker(
                rank, lookup, want.resident, leases, self._sound, want.rates
            )
            seconds = time.monotonic() - began
            plan = Plan(proposals, miss, tuple(leases), want.resident_version, version, seconds)
            self._core.post(Planned(request, plan))
        except Exception as error:
            for lease in leases:
                lease.release()
            known = error if isinstance(error, Ds4grpcError) else None
            if known is None:
                log.exception("a lookup failed")
            failure = known or EngineFailed("looking for banks failed; see the server's log")
            self._core.post(Planned(request, None, failure))

    def _sound(self, bank: StoredBank, record: Record) -> bool:
        return self._prompts.is_sound(record, bank.content)

    async def _load(self, want: WantLoad) -> None:
        began = time.monotonic()
        read_bytes, failure = 0, None
        try:
            read_bytes = await want.bank.load(want.position, want.sink)
        except BankCorrupt as error:
            failure = error
        except Exception:
            log.exception("a restore failed")
            failure = BankCorrupt("the bank could not be read", kind="io")
        seconds = time.monotonic() - began
        self._core.post(Loaded(want.key, read_bytes, seconds, failure))

    async def _copy(self, want: WantCopy) -> None:
        began = time.monotonic()
        failure: Ds4grpcError | None = None
        try:
            await self._in_worker(_copy_rows, want.target, want.source, want.num_tokens)
        except Exception:
            log.exception("a fork failed")
            failure = EngineFailed("copying the bank failed; see the server's log")
        self._core.post(Loaded(want.key, 0, time.monotonic() - began, failure))

    async def _build(self, want: WantRecords) -> None:
        """Builds a turn's records. A failure costs the next turn's reuse, not this reply."""
        try:
            records, outcome = await self._in_worker(
                self._prompts.build, want.prompt, want.reply, want.content, want.waypoints
            )
            self._core.post(Built(want.key, records, outcome))
        except Exception:
            log.exception("building a turn's records failed")
            self._core.post(Built(want.key, (), "failed"))

    async def _write(self, want: WantWrite) -> None:
        persisted = await self._persist(want)
        if want.slot >= 0:
            self._core.post(Wrote(want.slot, want.generation, persisted))

    async def _persist(self, want: WantWrite) -> Persisted:
        if self._store is None:
            want.source.rows.close()
            return Persisted("", 0, 0, "the disk tier is off")
        return await self._store.persist(want.source)

    # 3) Questions and the end

    async def ask(self, call: Callable[[], T]) -> T:
        """Runs `call` on the engine thread between two steps."""
        future: asyncio.Future[T] = self._loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            def settle() -> None:
                if future.done():
                    return
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)

            self._loop.call_soon_threadsafe(settle)

        self._core.post(Ask(call, done))
        return await future

    async def flush(self, reason: PersistReason) -> AsyncIterator[tuple[WantWrite, Persisted]]:
        """Writes what idle banks hold and files do not, one after another."""
        for want in await self.ask(lambda: self._core.unwritten(reason)):
            persisted = await self._persist(want)
            self._core.post(Wrote(want.slot, want.generation, persisted))
            yield want, persisted

    async def residents(self) -> list[ResidentInfo]:
        """All resident banks. Times of use stay what they were, from one call to the next, unless
        the clock is set."""
        offset = time.time() - time.monotonic()
        if abs(offset - self._clock_offset) > _CLOCK_SET_SECONDS:
            self._clock_offset = offset
        return [
            ResidentInfo(
                slot=bank.slot,
                generation=bank.generation,
                bank_id=identity,
                stored_bank=stored,
                namespace=bank.content.namespace,
                in_use=bank.in_use,
                pinned=bank.pinned,
                frontier=bank.content.frontier,
                hidden_tokens=bank.content.hidden.num_tokens,
                records=bank.content.records,
                ids=bank.content.ids,
                last_use=bank.last_use + self._clock_offset,
            )
            for identity, stored, bank in await self.ask(self._core.residents)
        ]

    async def forget(self, resident: ResidentInfo) -> bool:
        """Drops an idle resident bank; False when it is in use or has changed."""
        return await self.ask(lambda: self._core.forget(resident.slot, resident.generation))

    def stats(self) -> EngineStats:
        """Counts, read without stopping the engine; they may be a step apart."""
        slots = self._core.slots
        states = {state.value: slots.count(state) for state in SlotState}
        trust = {"reusable": 0, "untrusted": 0, "quarantined": 0}
        for slot in slots:
            if slot.frontier:
                trust["reusable"] += 1
        live = [stream.info.state for stream in list(self._streams.values())]
        return EngineStats(
            slots=states,
            resident_trust=trust,
            kv_bytes=self._core.kv_bytes,
            running=live.count("running"),
            waiting=live.count("queued"),
            last_step=self._core.last_step,
        )

    async def drain(self, grace_seconds: float) -> None:
        """Refuses new requests, ends queued ones, lets running ones end within the grace."""
        self._draining = True
        for stream in list(self._streams.values()):
            if stream.info.state == "queued":
                self._end_draining(stream)
        try:
            async with asyncio.timeout(grace_seconds):
                await self._quiet()
        except TimeoutError:
            for stream in list(self._streams.values()):
                self._end_draining(stream)
            await self._quiet()

    async def _quiet(self) -> None:
        """Returns when the engine has no sequence left; what has ended has its records by then."""
        quiet = asyncio.Event()

        def say() -> None:
            self._loop.call_soon_threadsafe(quiet.set)

        self._core.post(WhenQuiet(say))
        await quiet.wait()

    def _end_draining(self, stream: _Stream) -> None:
        if stream.ended:
            return
        stream.ended = True
        stream.error = Draining("the server is stopping; retry with another one or later")
        stream.arrived.set()
        self._core.post(Cancel((stream.info.tenant, stream.info.request_id), gone=True))


def _copy_rows(target: SlotMemory, source: SlotMemory, num_tokens: int) -> None:
    target.copy_from(source, num_tokens)
