"""The engine thread: takes messages, gives slots, runs steps, retires sequences.

The only code that changes slot states. Owns every sequence from `Submit` to its `End`. Knows no
event loop, no files, no templates: what needs those is asked for in the list that it hands over
once a turn (`messages`), and comes back as a message.

    receive -> expire -> admit -> step (schedule, run, postprocess) -> write what has rested
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds4grpc.bank import Admission, Ids, PersistReason, RecordKind, bank_id
from ds4grpc.engine import lines
from ds4grpc.engine.admission import Placer
from ds4grpc.engine.intake import Intake, drop_plan, refuse
from ds4grpc.engine.messages import (
    Ask,
    Built,
    Cancel,
    Distrust,
    Down,
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
    WantRecords,
    WantWrite,
    WhenQuiet,
    Wrote,
)
from ds4grpc.engine.observer import EngineObserver
from ds4grpc.engine.rates import Measured
from ds4grpc.engine.request import (
    Event,
    FinishReason,
    FirstToken,
    Progress,
    RequestKey,
)
from ds4grpc.engine.reuse import ResidentBank
from ds4grpc.engine.runner import Runner
from ds4grpc.engine.sampler import sample, step_logprobs
from ds4grpc.engine.scheduler import Scheduler, Work
from ds4grpc.engine.sequence import Phase, Sequence
from ds4grpc.engine.slots import Slot, Slots, SlotSink, SlotState
from ds4grpc.engine.writes import Writes
from ds4grpc.errors import DeadlineExceeded, Ds4grpcError, EngineFailed
from ds4grpc.layout import StateLayout
from ds4grpc.logs import line
from ds4grpc.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """What the engine is told once. Sizes in tokens and bytes."""

    fingerprint: bytes
    layout: StateLayout
    max_context: int
    min_tokens: int
    memory_bytes: int
    staging_bytes: int
    writes: bool  # whether there is a store to write to


class Core:
    """The engine's state and loop; `run` is the thread, `post` the way in."""

    def __init__(
        self,
        options: CoreOptions,
        slots: Slots,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        observer: EngineObserver,
        store_version: Callable[[], int],
    ) -> None:
        """`store_version` is read on the engine thread."""
        self._options = options
        self._slots = slots
        self._runner = runner
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._observer = observer
        self._inbox: queue.SimpleQueue[Down] = queue.SimpleQueue()
        self._up: list[Up] = []
        self._running: list[Sequence] = []
        self._measured = Measured()
        self._when_quiet: list[Callable[[], None]] = []
        self._stopped = False
        self.last_step = time.time()  # Unix seconds of the last turn of the loop
        self._placer = Placer(
            slots,
            min_tokens=options.min_tokens,
            bytes_per_token=options.layout.bytes_per_token,
            staging_bytes=options.staging_bytes,
            memory_bytes=options.memory_bytes,
            writes=options.writes,
            emit=self._up.append,
            evicted=observer.evicted,
        )
        self._writes = Writes(slots, self._placer, options.layout, self._up.append)
        self._intake = Intake(
            slots,
            self._placer,
            max_context=options.max_context,
            bytes_per_token=options.layout.bytes_per_token,
            emit=self._up.append,
            store_version=store_version,
        )

    # 1) The loop

    def post(self, message: Down) -> None:
        """Hands a message to the engine. Any thread, never blocks."""
        self._inbox.put(message)

    def start(self, deliver: Callable[[list[Up]], None]) -> threading.Thread:
        """Starts the thread, which ends with `Stop`; it calls `deliver` with what goes up."""
        self._deliver = deliver
        thread = threading.Thread(target=self.run, name="engine", daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        """Runs until `Stop`. A bug here fails every sequence, but nobody waits for ever."""
        while not self._stopped:
            try:
                self._turn()
            except Exception:
                log.exception("the engine's turn failed")
                for sequence in [*self._intake, *self._running]:
                    self._fail(sequence, EngineFailed("the engine failed; see the server's log"))
            self._flush()

    def _turn(self) -> None:
        self._receive()
        now = time.monotonic()
        self._expire(now)
        self._placer.expire(now)
        self._admit(now)
        work = self._scheduler.next(self._running)
        if work:
            self._flush()  # what clients wait for does not wait for the step
            self._step(work)
        self._writes.after_rest(time.monotonic())
        while self._when_quiet and not self._running and not len(self._intake):
            self._when_quiet.pop()()
        self.last_step = time.time()

    def _receive(self) -> None:
        """Handles all messages; waits for one only when there is nothing else to do."""
        can_step = any(
            s.phase is Phase.PREFILL or (s.phase is Phase.DECODE and not s.paused)
            for s in self._running
        )
        wait = 0.0 if can_step or self._up else 0.05 if len(self._intake) or self._running else 1.0
        try:
            message = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
        except queue.Empty:
            return
        while True:
            self._handle(message)
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _handle(self, message: Down) -> None:
        match message:
            case Submit(request=request):
                self._intake.add(Sequence.of(request, self._tokenizer, self._options.max_context))
            case Ask(call=call, done=done):
                try:
                    done(call(), None)
                except Exception as error:
                    done(None, error)
            case Wrote():
                self._writes.wrote(message)
            case WhenQuiet(done=done):
                self._when_quiet.append(done)
            case Stop():
                self._stopped = True
            case _:
                sequence = self._find(message.key)
                if sequence is None:
                    if isinstance(message, Planned):
                        refuse(message)
                    return
                match message:
                    case Planned():
                        self._planned(sequence, message)
                    case Loaded():
                        self._loaded(sequence, message)
                    case Built():
                        self._built(sequence, message)
                    case Cancel(gone=gone):
                        self._cancel(sequence, gone=gone)
                    case Pause(paused=paused):
                        sequence.paused = paused

    def _flush(self) -> None:
        if self._up:
            out, self._up[:] = list(self._up), []
            self._deliver(out)

    # 2) Admission

    def _admit(self, now: float) -> None:
        rates = self._measured.rates(now)
        for sequence, placement in self._intake.place(self._running, rates, now):
            self._running.append(sequence)
            sequence.adopt(placement, now)
            source, proposal = placement.source, placement.proposal
            if proposal is None or source is None or source is placement.slot:
                self._begin(sequence)
                continue
            sequence.phase = Phase.LOADING
            base = proposal.match.base
            if isinstance(source, Slot):
                sequence.copied = source.content()
                target = placement.slot.memory
                self._up.append(WantCopy(sequence.key, source.memory, target, base))
            else:
                sink = SlotSink(placement.slot.memory)
                self._up.append(WantLoad(sequence.key, source, base, sink))

    def _planned(self, sequence: Sequence, message: Planned) -> None:
        # An id may serve a new request before the lookup of one that was cancelled ends.
        if sequence.phase is not Phase.PLANNING or sequence.request is not message.request:
            refuse(message)
        elif message.plan is None:
            self._fail(sequence, message.error or EngineFailed("the lookup gave no plan"))
        else:
            self._intake.planned(sequence, message.plan)

    def _loaded(self, sequence: Sequence, message: Loaded) -> None:
        """A slot's rows have arrived by copy or from disk, or have not."""
        placement, slot = sequence.placement, sequence.bank
        assert placement is not None and placement.proposal is not None
        source, base = placement.source, sequence.pos_base
        sequence.clock.load_seconds += message.seconds
        if isinstance(source, Slot):
            source.readers -= 1
            content = sequence.copied
            assert content is not None
        else:
            assert source is not None
            content = source.content
        if message.error is None:
            self._slots.loaded(slot, content, base)
            if isinstance(source, Slot):
                slot.stored, slot.stored_bank = min(source.stored, base), source.stored_bank
            else:
                slot.stored, slot.stored_bank = base, source.bank_id
                self._measured.loaded(message.read_bytes, message.seconds, time.monotonic())
        drop_plan(sequence)
        if message.error is not None:
            self._load_failed(sequence)
        elif sequence.error is not None:
            self._fail(sequence, sequence.error)
        elif sequence.finish is not None:
            self._retire_early(sequence)
        else:
            self._begin(sequence)

    def _load_failed(self, sequence: Sequence) -> None:
        """The bank is out of the store by now: look again, for a shorter match or none."""
        self._slots.load_failed(sequence.bank)
        sequence.slot = None
        self._running.remove(sequence)
        if sequence.error is not None:
            self._up.append(End(sequence.key, sequence.error))
        elif sequence.finish is not None:
            self._end_well(sequence, bank="")
        else:
            sequence.load_failures += 1
            self._intake.return_to_front(sequence)

    def _begin(self, sequence: Sequence) -> None:
        """The reuse is in place and final: says so, and prefill starts."""
        request, slot, clock = sequence.request, sequence.bank, sequence.clock
        placement = sequence.placement
        assert placement is not None
        drop_plan(sequence)
        slot.keep = not (request.cache.bypass or request.cache.no_store)
        slot.pinned = slot.pinned or request.cache.pin
        slot.ttl_seconds = request.cache.ttl_seconds
        head = request.prompt.head
        # Also where the bank begins as another one: most system prompts share an opening.
        if sequence.pos_base < head and np.array_equal(
            sequence.target_ids[:head], request.prompt.ids[:head]
        ):
            slot.head = head
        sequence.phase = Phase.PREFILL
        clock.started = time.monotonic()
        source_id = ""
        if placement.proposal is not None:
            bank = placement.proposal.bank
            source_id = (
                self._bank_id(bank.content.namespace, bank.content.ids)
                if isinstance(bank, ResidentBank)
                else bank.bank_id
            )
        if placement.admission in (Admission.DISK, Admission.DISK_PARTIAL):
            sequence.stored_source = source_id
            self._up.append(NoteUse(source_id, proven=False))
        self._observer.stage("lookup", clock.lookup_seconds)
        if placement.admission not in (Admission.COLD, Admission.WARM):
            self._observer.stage("load", clock.load_seconds)
        started = sequence.started(placement, source_id)
        log.info(lines.admit(sequence.request_id, started, clock.started - request.arrival))
        self._emit(sequence, started)

    # 3) Steps

    def _step(self, work: list[Work]) -> None:
        began = time.monotonic()
        logits, errors = self._runner.run(work)
        now = time.monotonic()
        self._measure(work, now - began)
        for one, row, error in zip(work, logits, errors, strict=True):
            sequence = one.sequence
            if error is not None:
                log.error(
                    line("step failed", request=sequence.request_id, error=type(error).__name__),
                    exc_info=error,
                )
                if sequence.stored_source and sequence.phase is Phase.PREFILL:
                    self._up.append(
                        Distrust(sequence.stored_source, "the prefill after its restore failed")
                    )
                self._fail(sequence, EngineFailed("a step of the model failed for this request"))
                continue
            self._slots.commit(sequence.bank, one.ids)
            if sequence.phase is Phase.PREFILL:
                self._chunk_done(sequence, one, now)
            if row is not None and sequence.phase is Phase.DECODE:
                self._draw(sequence, row, now)

    def _measure(self, work: list[Work], seconds: float) -> None:
        prefilled = sum(len(w.ids) for w in work if w.sequence.phase is Phase.PREFILL)
        if prefilled and seconds > 0:
            self._observer.prefilled(prefilled)
            self._measured.prefilled(prefilled, seconds)

    def _chunk_done(self, sequence: Sequence, work: Work, now: float) -> None:
        del sequence.pending[: len(work.ids)]
        self._emit(sequence, Progress(sequence.bank.frontier, sequence.prompt_end))
        if sequence.pending:
            return
        self._observer.stage("compute", now - sequence.clock.started)
        sequence.phase = Phase.DECODE
        if sequence.max_new == 0:
            self._finish(sequence, FinishReason.LENGTH)

    def _draw(self, sequence: Sequence, logits: npt.NDArray[np.float32], now: float) -> None:
        """Takes the next token of a row from its logits (V,), or the one that is forced."""
        clock = sequence.clock
        if sequence.forced:
            deltas = sequence.accept_forced()
        else:
            token = sample(logits[None], [sequence.row])[0]
            if sequence.request.output.logprobs:
                sequence.note_logprobs(
                    step_logprobs(
                        logits, token, sequence.request.output.logprobs, self._tokenizer.token_bytes
                    )
                )
            deltas = sequence.accept(token, self._tokenizer.end_ids)
            self._observer.generated(1)
        if not clock.first_token:
            clock.first_token = now
            self._emit(sequence, FirstToken(now - clock.placed, now - sequence.request.arrival))
        else:
            self._observer.inter_token(now - clock.last_token)
        clock.last_token = now
        for delta in deltas:
            self._emit(sequence, delta)
        if sequence.finish is None and sequence.bank.frontier >= self._options.max_context:
            for delta in sequence.stop(FinishReason.LENGTH):
                self._emit(sequence, delta)
        if sequence.finish is not None:
            self._retire(sequence)

    # 4) Endings

    def _expire(self, now: float) -> None:
        for sequence in [*self._intake, *self._running]:
            request = sequence.request
            if sequence.phase is Phase.RETIRING or sequence.ending:
                continue
            if request.deadline is not None and now >= request.deadline:
                self._fail(sequence, DeadlineExceeded("the call's deadline passed"))
            elif (
                request.stopping.time_limit_seconds is not None
                and now - request.arrival >= request.stopping.time_limit_seconds
            ):
                self._finish(sequence, FinishReason.TIME_LIMIT)

    def _cancel(self, sequence: Sequence, *, gone: bool) -> None:
        sequence.gone = sequence.gone or gone
        if not sequence.ending:
            self._finish(sequence, FinishReason.CANCELLED)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence before its reply ended by itself."""
        if sequence.phase in (Phase.WAITING, Phase.PLANNING):
            sequence.finish = reason
            self._intake.remove(sequence)
            self._end_well(sequence, bank="")
            return
        if sequence.phase is Phase.LOADING:
            sequence.finish = reason  # the slot is being filled: retired when that has ended
            return
        if sequence.phase is Phase.PREFILL:
            sequence.finish = reason
            self._retire_early(sequence)
            return
        for delta in sequence.stop(reason):
            self._emit(sequence, delta)
        self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """The reply has ended: cuts the bank to what the client received and asks for records."""
        slot = sequence.bank
        committed = slot.frontier - sequence.prompt_end
        received = sequence.delivered(committed)
        self._slots.truncate(slot, sequence.prompt_end + received)
        slot.hidden = slot.hidden | sequence.hidden_span(received)
        sequence.phase = Phase.RETIRING
        if sequence.request.cache.bypass:
            self._slots.retire(slot, (), time.monotonic())
            self._release(slot)
            self._end_well(sequence, bank="")
            return
        sequence.reply = sequence.parser.reply(received)
        self._up.append(
            WantRecords(
                sequence.key,
                sequence.request.prompt,
                sequence.reply,
                slot.content(),
                sequence.waypoints,
            )
        )

    def _retire_early(self, sequence: Sequence) -> None:
        """Ends a sequence that has no reply: its finished chunks stay, found by their tokens."""
        slot = sequence.bank
        keeps = slot.frontier > 0 and not sequence.request.cache.bypass
        bank = self._slot_bank_id(slot) if keeps else ""
        self._slots.retire(slot, (), time.monotonic())
        if not keeps:
            self._release(slot)
        self._end_well(sequence, bank=bank)

    def _built(self, sequence: Sequence, message: Built) -> None:
        """The records are there: publishes them, after the last token was committed."""
        if sequence.phase is not Phase.RETIRING:
            return
        slot = sequence.bank
        kind = message.records[0].kind if message.records else RecordKind.PROMPT
        thinking = sequence.request.prompt.thinking
        self._observer.record(kind, message.outcome, thinking=thinking)
        bank = self._slot_bank_id(slot) if slot.frontier else ""
        self._slots.retire(slot, message.records, time.monotonic())
        self._writes.after_turn(slot)
        if sequence.stored_source:
            self._up.append(NoteUse(sequence.stored_source, proven=True))
        self._end_well(sequence, bank=bank)

    def _end_well(self, sequence: Sequence, *, bank: str) -> None:
        assert sequence.finish is not None
        if sequence in self._running:
            self._running.remove(sequence)
        sequence.phase = Phase.ENDED
        finished = sequence.finished(bank)
        log.info(lines.finish(sequence.request_id, finished))
        self._emit(sequence, finished)
        self._up.append(End(sequence.key))

    def _fail(self, sequence: Sequence, error: Ds4grpcError) -> None:
        """Ends a sequence with an error; finished chunks of its bank stay."""
        if sequence.phase is Phase.LOADING:
            sequence.error = error  # the slot is being filled by another thread: that ends first
            return
        sequence.phase = Phase.ENDED
        self._up.append(End(sequence.key, error))  # it is told even if the rest has a bug
        drop_plan(sequence)
        self._intake.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            slot = sequence.slot
            if slot is not None and slot.state is SlotState.ACTIVE:
                if slot.frontier > sequence.prompt_end > 0:
                    # Part of a reply that no client can replay: the prompt is what stays.
                    self._slots.truncate(slot, sequence.prompt_end)
                self._slots.retire(slot, (), time.monotonic())
                if sequence.request.cache.bypass:
                    self._release(slot)

    def _release(self, slot: Slot) -> None:
        if slot.state is SlotState.IDLE and slot.readers == 0:
            self._slots.release(slot)

    # 5) Questions, asked with `Ask`

    def unwritten(self, reason: PersistReason) -> list[WantWrite]:
        """Writes for all idle banks that hold something no file does."""
        return self._writes.everything(reason)

    def residents(self) -> list[tuple[str, str, ResidentBank]]:
        """(bank id, stored bank's id, snapshot) of each resident bank."""
        return [
            (self._slot_bank_id(self._slots[b.slot]), self._slots[b.slot].stored_bank, b)
            for b in self._intake.residents()
        ]

    def forget(self, slot_index: int, generation: int) -> bool:
        """Drops an idle bank unless it has changed; returns whether it is gone."""
        slot = self._slots[slot_index]
        if slot.generation != generation or slot.state is not SlotState.IDLE or slot.readers:
            return False
        self._slots.release(slot)
        return True

    @property
    def slots(self) -> Slots:
        return self._slots

    @property
    def kv_bytes(self) -> int:
        """Bytes of committed rows, resident and staged for writing."""
        return self._slots.resident_bytes + self._placer.staged_bytes

    # 6) Small things

    def _find(self, key: RequestKey) -> Sequence | None:
        live = (*self._running, *self._intake)
        return next((s for s in live if s.key == key), None)

    def _emit(self, sequence: Sequence, event: Event) -> None:
        if not sequence.gone:
            self._up.append(Emit(sequence.key, event))

    def _bank_id(self, namespace: bytes, ids: Ids) -> str:
        return bank_id(namespace, self._options.fingerprint, ids)

    def _slot_bank_id(self, slot: Slot) -> str:
        return self._bank_id(slot.namespace, slot.ids[: slot.frontier])
