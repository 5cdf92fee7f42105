"""The engine as `ds4grpc.server` wires it, in the test's own process, and a model that obeys.

Everything is real: thread, slots, prompts, store, and the tiny model's rows. Only what the model
would not do by itself is put in: words that it is told to say, a step that waits or fails.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bankkit import eventually
from prometheus_client import CollectorRegistry

from ds4grpc.bank import Admission, BankContent, namespace
from ds4grpc.chat.prompt import Channel, Conversation, Message, Prompt, Role
from ds4grpc.chat.prompts import Prompts
from ds4grpc.engine.core import Core, CoreOptions
from ds4grpc.engine.engine import EngineLimits, TorchEngine
from ds4grpc.engine.memory import SlotMemory, allocate
from ds4grpc.engine.request import (
    CacheOptions,
    Delta,
    Event,
    Finished,
    GenerationRequest,
    OutputOptions,
    RequestKey,
    Sampling,
    Started,
    Stopping,
)
from ds4grpc.engine.runner import Runner
from ds4grpc.engine.scheduler import Scheduler
from ds4grpc.engine.sequence import Phase
from ds4grpc.engine.slots import Slots, SlotState
from ds4grpc.metrics import BuildInfo, Metrics
from ds4grpc.model.checkpoint import Checkpoint
from ds4grpc.model.fingerprint import fingerprint
from ds4grpc.model.interface import Chunk, State
from ds4grpc.model.llama import Llama
from ds4grpc.store.files import Files
from ds4grpc.store.store import Store, StoreConfig

SPACE = namespace("", b"")
WORKERS = 2
SECONDS = 10.0  # nothing here takes nearly as long
# More than the bias against end markers, so that one is sampled when it is told.
_LOUDLY = 5000.0


class Steered:
    """A model that samples what it is told: `says` maps positions of a bank to ids.

    While `held` it waits before each step. A chunk that `fails` says yes to raises; one
    that `overflows` says yes to gets logits that are no numbers.
    """

    def __init__(self, model: Llama) -> None:
        self._model = model
        self.layout = model.layout
        self.device = model.device
        self.dtype = model.dtype
        self.numeric_mode = model.numeric_mode
        self.vocabulary_size = model.vocabulary_size
        self.max_context = model.max_context
        self.weight_bytes = model.weight_bytes
        self.num_parameters = model.num_parameters
        self.says: dict[int, int] = {}
        self.fails: Callable[[Chunk], bool] = lambda chunk: False
        self.overflows: Callable[[Chunk], bool] = lambda chunk: False
        self.num_steps = 0
        self.waiting = threading.Event()  # a step is held up
        self._free = threading.Event()
        self._free.set()

    def bind(self, planes: Sequence[torch.Tensor]) -> State:
        return self._model.bind(planes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step ends within the block; `waiting` is set once one has begun."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()
            self.waiting.clear()

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        if not self._free.is_set():
            self.waiting.set()
            self._free.wait(SECONDS)
        self.num_steps += 1
        if any(map(self.fails, chunks)):
            raise RuntimeError("the model was told to fail")
        logits = self._model.forward(chunks)
        wanting = [chunk for chunk in chunks if chunk.want_logits]
        for row, chunk in zip(logits, wanting, strict=True):
            if self.overflows(chunk):
                row[7] = torch.nan
            said = self.says.get(chunk.start + len(chunk.ids))
            if said is not None:
                row[said] = row.max() + _LOUDLY
        return logits


class HeldFiles(Files):
    """Files of a store whose next `operation` but `skip` waits until `release`."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self._free = threading.Event()
        self._operation = ""
        self._skip = 0

    def hold(self, operation: str, skip: int = 0) -> None:
        self.waiting.clear()
        self._free.clear()
        self._operation, self._skip = operation, skip

    def release(self) -> None:
        self._operation = ""
        self._free.set()

    def before(self, operation: str, path: str) -> None:
        if operation != self._operation:
            return
        if self._skip:
            self._skip -= 1
            return
        self.waiting.set()
        self._free.wait(SECONDS)


class Errors(logging.Handler):
    """Keeps what was logged as an error: the engine survives its own bugs, tests do not."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))

    def expect(self, *starts: str) -> None:
        """That these errors were logged so far, and no others."""
        assert len(self.messages) == len(starts), self.messages
        for message, start in zip(self.messages, starts, strict=True):
            assert message.startswith(start)
        self.messages.clear()


@dataclass(frozen=True, slots=True)
class TinyModel:
    """The tiny sliding-window model, loaded once a test run."""

    checkpoint: Checkpoint
    model: Llama
    prompts: Prompts


@dataclass
class Answer:
    """What came of one generation."""

    events: list[Event] = field(default_factory=list)

    @property
    def started(self) -> Started:
        (started,) = (event for event in self.events if isinstance(event, Started))
        assert self.events[0] is started
        return started

    @property
    def finished(self) -> Finished:
        (finished,) = (event for event in self.events if isinstance(event, Finished))
        assert self.events[-1] is finished
        return finished

    @property
    def ids(self) -> list[int]:
        return [i for event in self.events if isinstance(event, Delta) for i in event.token_ids]

    def said(self, channel: Channel = Channel.TEXT) -> str:
        deltas = (event for event in self.events if isinstance(event, Delta))
        return "".join(delta.text for delta in deltas if delta.channel is channel)


@dataclass
class Rig:
    """A running engine and its parts."""

    engine: TorchEngine
    core: Core
    model: Steered
    prompts: Prompts
    checkpoint: Checkpoint
    store: Store | None
    metrics: Metrics
    workers: ThreadPoolExecutor
    errors: Errors
    files: Files | None
    numbers: Iterator[int] = field(default_factory=count)

    def chat(self, *contents: str, budget: int | None = None, **options: Any) -> Prompt:
        """A conversation of user and assistant in turn; options are Conversation's."""
        messages = tuple(
            Message(Role.ASSISTANT if i % 2 else Role.USER, content)
            for i, content in enumerate(contents)
        )
        options.setdefault("thinking", False)
        return self.prompts.from_chat(Conversation(messages, **options), budget)

    def request(
        self, prompt: Prompt, max_tokens: int | None = 8, **options: Any
    ) -> GenerationRequest:
        """A greedy request that no end marker ends by chance. Options are those of Stopping,
        CacheOptions and GenerationRequest."""
        given = {
            kind: {name: options.pop(name) for name in kind.__slots__ if name in options}
            for kind in (Stopping, CacheOptions)
        }
        request = GenerationRequest(
            request_id=f"request-{next(self.numbers)}",
            tenant="",
            prompt=prompt,
            sampling=Sampling(temperature=0.0, logit_bias=self.no_end),
            stopping=Stopping(max_tokens, **given[Stopping]),
            cache=CacheOptions(**{"namespace": SPACE, **given[CacheOptions]}),
            output=OutputOptions(token_ids=True, prompt_token_ids=True),
            arrival=time.monotonic(),
        )
        return replace(request, **options)

    @property
    def no_end(self) -> dict[int, float]:
        return dict.fromkeys(self.checkpoint.tokenizer.end_ids, -1000.0)

    @property
    def end_id(self) -> int:
        return self.checkpoint.tokenizer.controls["<|im_end|>"]

    def say(self, position: int, text: str, *, end: bool = True) -> list[int]:
        """Makes the model sample `text`, and then an end marker, from a position of a bank on."""
        ids = self.checkpoint.tokenizer.plain_ids(text)
        said = [*ids, self.end_id] if end else ids
        self.model.says.update(enumerate(said, position))
        return ids

    async def answer(self, request: GenerationRequest, into: Answer | None = None) -> Answer:
        """Runs a request to its end; what came before an error is in `into`."""
        answer = Answer() if into is None else into
        async for event in self.engine.generate(request):
            answer.events.append(event)
        return answer

    async def ask(self, prompt: Prompt, max_tokens: int | None = 8, **options: Any) -> Answer:
        return await self.answer(self.request(prompt, max_tokens, **options))

    async def cold(self, answer: Answer, num_tokens: int | None = None) -> list[int]:
        """What a request that reuses nothing samples after the same effective prompt: as many
        tokens, or `num_tokens`."""
        prompt = self.prompts.from_ids(np.asarray(answer.started.prompt_token_ids, np.uint32))
        wanted = len(answer.ids) if num_tokens is None else num_tokens
        cold = await self.ask(prompt, wanted, bypass=True)
        assert cold.started.admission is Admission.COLD
        return cold.ids

    def phase(self, key: RequestKey) -> Phase:
        """Where a sequence stands; engine thread."""
        sequence = self.core._find(key)
        return Phase.ENDED if sequence is None else sequence.phase

    def is_planning(self, key: RequestKey) -> bool:
        return self.phase(key) is Phase.PLANNING

    async def forgotten(self, key: RequestKey) -> None:
        """Waits until another request may have the id."""
        await eventually(lambda: key not in self.engine._live)

    def is_paused(self, key: RequestKey) -> bool:
        """Whether a sequence waits for its reader; engine thread."""
        sequence = self.core._find(key)
        return sequence is not None and sequence.paused

    async def generated(self, key: RequestKey) -> int:
        """Tokens that a running sequence has sampled."""
        sequence = await self.engine.ask(lambda: self.core._find(key))
        assert sequence is not None
        return sequence.generated

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Waits for something that is to be asked on the engine thread."""
        for _ in range(1000):
            if await self.engine.ask(is_so):
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it did not happen")

    @contextmanager
    def workers_held(self) -> Iterator[threading.Event]:
        """No lookup, copy or record is made within the block, or until the event is set."""
        free = threading.Event()
        for _ in range(WORKERS):
            self.workers.submit(free.wait, SECONDS)
        try:
            yield free
        finally:
            free.set()

    async def written(self) -> None:
        """Waits until no write of a bank in a slot is under way."""
        await self.until(lambda: all(slot.persisting is None for slot in self.core.slots))

    async def forget_all(self) -> None:
        """Empties all slots."""
        for resident in await self.engine.residents():
            assert await self.engine.forget(resident)

    async def banks(self) -> list[BankContent]:
        """What all slots that hold something hold."""
        slots = self.core.slots
        return await self.engine.ask(lambda: [s.content() for s in slots if s.frontier])

    async def bank(self) -> BankContent:
        (bank,) = await self.banks()
        return bank

    def count(self, name: str, *labels: str) -> float:
        """A counter's value."""
        with self.metrics.lock:
            return float(self.metrics.counter(name, *labels)._value.get())

    async def check(self) -> None:
        """That nothing is left over once nothing runs."""
        slots = self.core.slots
        await self.engine.drain(SECONDS)
        await self.engine.ask(slots.check)
        assert {slot.state for slot in slots} <= {SlotState.FREE, SlotState.IDLE}
        assert not any(slot.readers for slot in slots)
        if (store := self.store) is not None:  # a write under way has leases, too
            await eventually(lambda: store.num_leased == 0)
        assert self.errors.messages == []


@contextmanager
def logged_errors() -> Iterator[Errors]:
    errors = Errors()
    logger = logging.getLogger("ds4grpc")
    logger.addHandler(errors)
    try:
        yield errors
    finally:
        logger.removeHandler(errors)


@asynccontextmanager
async def running(
    tiny: TinyModel,
    folder: Path | None = None,
    *,
    slots: int = 2,
    max_context: int = 1024,
    min_tokens: int = 32,
    staging_bytes: int = 1 << 24,
    chunk: int = 64,
    queue: int = 16,
    files: Files | None = None,
) -> AsyncIterator[Rig]:
    """An engine for one block; with `folder` also a store. Leaves nothing unfinished."""
    model = Steered(tiny.model)
    name = fingerprint(tiny.checkpoint, model.layout, model.numeric_mode)
    metrics = Metrics(CollectorRegistry(), BuildInfo("0", "tiny", name.hex()[:16], "f32", "cpu"))

    def new_memory() -> tuple[SlotMemory, State]:
        memory = allocate(model.layout, max_context, model.device)
        return memory, model.bind(memory.planes)

    @asynccontextmanager
    async def stored() -> AsyncIterator[Store | None]:
        if folder is None:
            yield None
            return
        config = StoreConfig(str(folder), name, model.layout, 1 << 28, min_tokens)
        async with Store(config, metrics, files) as store:
            yield store

    with ThreadPoolExecutor(WORKERS, "worker") as workers, logged_errors() as errors:
        async with stored() as store:
            core = Core(
                CoreOptions(
                    fingerprint=name,
                    layout=model.layout,
                    max_context=max_context,
                    min_tokens=min_tokens,
                    memory_bytes=1 << 28,
                    staging_bytes=staging_bytes,
                    writes=store is not None,
                ),
                Slots(model.layout, slots, max_context, new_memory),
                Runner(model),
                Scheduler(chunk_alone=chunk, chunk_shared=chunk),
                tiny.checkpoint.tokenizer,
                metrics,
                store_version=lambda: store.version if store is not None else 0,
            )
            limits = EngineLimits(max_context, model.vocabulary_size, queue, 1 << 28)
            engine = TorchEngine(core, tiny.prompts, model.layout, limits, store, workers)
            async with engine:
                rig = Rig(
                    engine=engine,
                    core=core,
                    model=model,
                    prompts=tiny.prompts,
                    checkpoint=tiny.checkpoint,
                    store=store,
                    metrics=metrics,
                    workers=workers,
                    errors=errors,
                    files=files,
                )
                yield rig
                await rig.check()
