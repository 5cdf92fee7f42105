"""A request in flight: what it still has to prefill, what it has sampled, what it has sent.

Owns the life of one reply token by token: end markers, forced tokens, the reasoning budget,
limits, stop strings. Knows no slots' states and no other sequence. Engine thread.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ds4grpc.bank import Admission, BankContent, Ids, MissReason, Waypoint
from ds4grpc.chat.prompt import Channel, Reply
from ds4grpc.chat.stream import ReplyParser
from ds4grpc.engine.admission import Placement
from ds4grpc.engine.request import (
    Delta,
    Finished,
    FinishReason,
    GenerationRequest,
    RequestKey,
    Started,
    StepLogprobs,
    Timings,
    Usage,
)
from ds4grpc.engine.reuse import Plan, Proposal
from ds4grpc.engine.sampler import Row
from ds4grpc.engine.slots import Slot
from ds4grpc.errors import Ds4grpcError
from ds4grpc.layout import Spans
from ds4grpc.tokenizer import Tokenizer


class Phase(enum.StrEnum):
    """Where a sequence stands; WAITING and PLANNING have no slot."""

    WAITING = "waiting"
    PLANNING = "planning"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    RETIRING = "retiring"
    ENDED = "ended"


@dataclass(slots=True)
class Clock:
    """Moments of a sequence, time.monotonic() seconds; 0 until reached."""

    placed: float = 0.0  # a slot was given
    started: float = 0.0  # the reuse is in place: prefill begins
    first_token: float = 0.0
    last_token: float = 0.0
    lookup_seconds: float = 0.0
    load_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in flight.

    Positions are tokens of the bank: the effective prompt `target_ids` ends at `prompt_end`, its
    last `open_tokens` tokens are the open marker of a reasoning block. `next_id` is sampled (or
    forced) and delivered but not yet committed.
    """

    request: GenerationRequest
    parser: ReplyParser
    row: Row
    open_tokens: int
    max_new: int  # most tokens to sample
    phase: Phase = Phase.WAITING
    plan: Plan | None = None
    num_lookups: int = 0
    load_failures: int = 0
    deferred: bool = False
    slot: Slot | None = None
    placement: Placement | None = None
    copied: BankContent | None = None  # what the slot it is copied from held
    target_ids: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.uint32))
    pending: list[int] = field(default_factory=list)
    prompt_end: int = 0
    pos_base: int = 0
    hidden_tokens: int = 0
    waypoints: tuple[Waypoint, ...] = ()
    cached_tokens: int = 0
    stored_source: str = ""  # the stored bank that was restored for it
    miss: MissReason | None = None
    next_id: int | None = None
    forced: deque[int] = field(default_factory=deque)
    generated: int = 0
    reasoning_tokens: int = 0
    paused: bool = False
    gone: bool = False  # nobody reads the stream any more
    finish: FinishReason | None = None
    error: Ds4grpcError | None = None  # it failed while its slot was being filled
    matched_stop: str = ""
    reply: Reply | None = None
    clock: Clock = field(default_factory=Clock)
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[StepLogprobs] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @staticmethod
    def of(request: GenerationRequest, tokenizer: Tokenizer, max_context: int) -> Sequence:
        """A sequence that waits. One token more than fits can be sampled: the last of a reply is
        never committed."""
        prompt, limit = request.prompt, request.stopping.max_tokens
        most = max_context - len(prompt.ids) + 1
        row = Row(request.sampling)
        if request.sampling.repetition_penalty != 1:
            row.seen = frozenset(prompt.ids.tolist())
        return Sequence(
            request=request,
            parser=ReplyParser(prompt.form, tokenizer, request.stopping.stop),
            row=row,
            open_tokens=prompt.open_tokens,
            max_new=most if limit is None else min(limit, most),
        )

    @property
    def ending(self) -> bool:
        """Whether its end is decided already."""
        return self.finish is not None or self.error is not None

    @property
    def bank(self) -> Slot:
        """The slot; only asked for while there is one."""
        assert self.slot is not None
        return self.slot

    @property
    def reasoning_budget(self) -> int:
        """Most sampled reasoning tokens: unset, half of the tokens stay for the answer."""
        budget = self.request.prompt.form.budget
        return budget if budget is not None else self.max_new - self.max_new // 2

    def adopt(self, placement: Placement, now: float) -> None:
        """Takes its slot, and what the match says of where it starts."""
        prompt, proposal = self.request.prompt, placement.proposal
        self.slot, self.placement, self.clock.placed = placement.slot, placement, now
        placement.slot.last_use = now
        if proposal is None:
            self.target_ids, self.pos_base, self.hidden_tokens = prompt.ids, 0, 0
            self.waypoints = ()
        else:
            match = proposal.match
            known = proposal.bank.content.ids[: match.base]
            self.target_ids = np.concatenate((known, match.suffix))
            self.pos_base, self.hidden_tokens = match.base, match.hidden_tokens
            self.waypoints = match.waypoints
        self.pending = self.target_ids[self.pos_base :].tolist()
        self.prompt_end = len(self.target_ids)
        self.miss = self._miss(proposal)
        # In the client's frame: hidden reasoning makes the effective prompt longer than its own.
        self.cached_tokens = len(prompt.ids) - min(len(prompt.ids), len(self.pending))

    def started(self, placement: Placement, bank_id: str) -> Started:
        """The event that says where it starts; `bank_id` is the bank that is reused."""
        from_disk = placement.admission in (Admission.DISK, Admission.DISK_PARTIAL)
        shows_ids = self.request.output.prompt_token_ids
        return Started(
            prompt_tokens=len(self.request.prompt.ids),
            memory_tokens=0 if from_disk else self.cached_tokens,
            disk_tokens=self.cached_tokens if from_disk else 0,
            hidden_tokens=self.hidden_tokens,
            admission=placement.admission,
            bank_id=bank_id,
            miss_reason=self.miss,
            queue_seconds=max(0.0, self.clock.placed - self.request.arrival),
            pos_base=self.pos_base,
            suffix_tokens=len(self.pending),
            seed=self.request.sampling.seed,
            slot=placement.slot.index,
            prompt_token_ids=tuple(self.target_ids.tolist()) if shows_ids else (),
        )

    def finished(self, bank_id: str) -> Finished:
        """The event that says how it ended; `bank_id` is what the next turn can continue."""
        assert self.finish is not None
        return Finished(self.finish, self.matched_stop, self.usage(), self.timings(), bank_id)

    def accept(self, sampled: int, end_ids: frozenset[int]) -> list[Delta]:
        """Takes a sampled token: sets `next_id`, or `finish` when the reply ends with it.

        Returns what is to be sent now.
        """
        self.next_id = None
        self.generated += 1
        self.row.took(sampled)
        stopping = self.request.stopping
        ends = sampled in stopping.stop_ids or (sampled in end_ids and not stopping.ignore_eos)
        if ends and self.parser.in_reasoning and sampled in end_ids:
            # An end marker inside the block: neither committed nor sent; the block is closed.
            self.reasoning_tokens += 1
            return self._force_close()
        if ends:
            self.finish = FinishReason.STOP
            self.matched_stop = str(sampled) if sampled in stopping.stop_ids else ""
            return self._end()
        if self.parser.in_reasoning:
            self.reasoning_tokens += 1
        deltas = self._deliver(sampled)
        if self.finish is None and self.parser.in_reasoning:
            if self.reasoning_tokens >= self.reasoning_budget and self.generated < self.max_new:
                self.forced.extend(self.request.prompt.form.forced_close)
        if self.finish is None and self.generated >= self.max_new:
            self.finish = FinishReason.LENGTH
            deltas += self._end()
        return deltas

    def accept_forced(self) -> list[Delta]:
        """Takes the next token that the server has decided on."""
        return self._deliver(self.forced.popleft())

    def stop(self, reason: FinishReason) -> list[Delta]:
        """Ends the reply where it stands; what was held back is delivered."""
        self.finish = reason
        return self._end()

    def note_logprobs(self, step: StepLogprobs) -> None:
        self._logprobs.append(step)

    def delivered(self, num_committed: int) -> int:
        """Leading committed reply tokens whose whole text the client has received."""
        return self.parser.delivered_tokens(num_committed)

    def hidden_span(self, num_tokens: int) -> Spans:
        """Where the bank holds this reply's reasoning, of `num_tokens` committed reply tokens."""
        end = min(self.parser.hidden_span[1], num_tokens)
        if not end and not self.open_tokens:
            return Spans()
        return Spans.of([(self.prompt_end - self.open_tokens, self.prompt_end + end)])

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt.ids),
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated,
            reasoning_tokens=self.reasoning_tokens,
        )

    def timings(self) -> Timings:
        clock = self.clock
        return Timings(
            queue=max(0.0, clock.placed - self.request.arrival),
            lookup=clock.lookup_seconds,
            load=clock.load_seconds,
            prefill=max(0.0, clock.first_token - clock.placed) if clock.first_token else 0.0,
            decode=max(0.0, clock.last_token - clock.first_token),
        )

    def _miss(self, proposal: Proposal | None) -> MissReason | None:
        """Why `proposal` is not a full reuse; it need not be the plan's first any more."""
        planned = self.plan.miss if self.plan is not None else None
        if proposal is None:
            return planned or MissReason.NO_RECORD
        if proposal.match.whole:
            return None
        return planned if planned is MissReason.LOAD_SLOWER else proposal.match.miss

    def _force_close(self) -> list[Delta]:
        self.forced.extend(self.request.prompt.form.forced_close)
        if self.generated >= self.max_new:
            self.forced.clear()
            self.finish = FinishReason.LENGTH
            return self._end()
        return self.accept_forced()

    def _deliver(self, token_id: int) -> list[Delta]:
        self.next_id = token_id
        self._token_ids.append(token_id)
        pieces = self.parser.feed(token_id)
        if self.parser.stopped is not None:
            self.finish = FinishReason.STOP
            self.matched_stop = self.parser.stopped
            self.forced.clear()
        return self._deltas(pieces)

    def _end(self) -> list[Delta]:
        self.forced.clear()
        pieces = self.parser.flush() if self.parser.stopped is None else []
        return self._deltas(pieces, last=True)

    def _deltas(self, pieces: list[tuple[Channel, str]], *, last: bool = False) -> list[Delta]:
        """Deltas of what has become complete; token ids travel with the next piece."""
        output = self.request.output
        if not pieces:
            ids_wanted = output.token_ids and bool(self._token_ids)
            if not ids_wanted and not (last and self._logprobs):
                return []
            channel = Channel.REASONING if self.parser.in_reasoning else Channel.TEXT
            pieces = [(channel, "")]
        ids = tuple(self._token_ids) if output.token_ids else ()
        logprobs = tuple(self._logprobs)
        self._token_ids.clear()
        self._logprobs.clear()
        return [
            Delta(channel, text, ids if i == 0 else (), logprobs if i == 0 else ())
            for i, (channel, text) in enumerate(pieces)
        ]
