"""The queue of requests that wait for a slot: in order of arrival, looked up when one is near.

Owns waiting sequences and their plans (and so the leases in them). Knows no steps and no replies.
Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ds4grpc.bank import common_prefix
from ds4grpc.engine.admission import Placement, Placer
from ds4grpc.engine.messages import Planned, WantPlan
from ds4grpc.engine.reuse import Plan, Rates, ResidentBank
from ds4grpc.engine.sequence import Phase, Sequence
from ds4grpc.engine.slots import Slots, SlotState

# A request looks up again at most this often when banks have changed while it waited.
_MAX_REPLANS = 3
# Waiting for another sequence's prefill pays only when it computes this much for both.
_MIN_SHARED_TOKENS = 128
_MAX_LOAD_FAILURES = 2
# While `max_tokens` is unset, hidden reasoning may take the context except this much.
_UNSET_REPLY_TOKENS = 1024


class Intake:
    """Waiting sequences on their way to a slot."""

    def __init__(
        self,
        slots: Slots,
        placer: Placer,
        *,
        max_context: int,
        bytes_per_token: float,
        emit: Callable[[WantPlan], None],
        store_version: Callable[[], int],
    ) -> None:
        self._slots = slots
        self._placer = placer
        self._max_context = max_context
        self._bytes_per_token = bytes_per_token
        self._emit = emit
        self._store_version = store_version
        self._waiting: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def return_to_front(self, sequence: Sequence) -> None:
        """A sequence whose slot could not be filled waits again, before all others."""
        sequence.phase = Phase.WAITING
        self._waiting.insert(0, sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Takes a sequence out; returns whether it was waiting."""
        if sequence not in self._waiting:
            return False
        self._waiting.remove(sequence)
        drop_plan(sequence)
        return True

    def planned(self, sequence: Sequence, plan: Plan) -> None:
        """A lookup has ended."""
        sequence.phase = Phase.WAITING
        sequence.plan = plan
        sequence.clock.lookup_seconds += plan.seconds

    def place(
        self, running: Iterable[Sequence], rates: Rates, now: float
    ) -> Iterator[tuple[Sequence, Placement]]:
        """Sequences that get a slot now. One that is being looked up holds its place in line."""
        live = list(running)
        places = self._placer.available()
        for sequence in list(self._waiting):
            if places <= 0:
                return
            if sequence.phase is Phase.WAITING:
                if sequence.plan is None:
                    self._look_up(sequence, rates)
                elif self._is_computed_by_another(sequence, live):
                    sequence.deferred = True
                    continue
                elif sequence.deferred or self._is_stale(sequence, sequence.plan):
                    sequence.deferred = False
                    self._look_up(sequence, rates)
                else:
                    placement = self._try_place(sequence, sequence.plan, live, now)
                    if placement is None:
                        return
                    self._waiting.remove(sequence)
                    live.append(sequence)
                    yield sequence, placement
            places -= 1

    def residents(self, namespace: bytes | None = None) -> tuple[ResidentBank, ...]:
        """Snapshots of the resident banks of a namespace, or of all."""
        return tuple(
            ResidentBank(
                slot.index,
                slot.generation,
                slot.content(),
                in_use=slot.state is SlotState.ACTIVE or slot.readers > 0,
                pinned=slot.pinned,
                last_use=slot.last_use,
            )
            for slot in self._slots
            if slot.state in (SlotState.IDLE, SlotState.ACTIVE)
            and slot.frontier > 0
            and namespace in (None, slot.namespace)
        )

    def _look_up(self, sequence: Sequence, rates: Rates) -> None:
        drop_plan(sequence)
        sequence.phase = Phase.PLANNING
        sequence.num_lookups += 1
        request = sequence.request
        reply = min(sequence.max_new, self._max_context - len(request.prompt.ids))
        if request.stopping.max_tokens is None:
            reply = min(reply, _UNSET_REPLY_TOKENS)
        resident = () if request.cache.bypass else self.residents(request.cache.namespace)
        # Restores that failed twice are enough: the third try computes.
        use_store = not request.cache.bypass and sequence.load_failures < _MAX_LOAD_FAILURES
        self._emit(WantPlan(request, resident, self._slots.version, reply, rates, use_store))

    def _is_stale(self, sequence: Sequence, plan: Plan) -> bool:
        """Whether banks have changed since the lookup, so that another may find more."""
        if sequence.num_lookups > _MAX_REPLANS:
            return False
        seen = (plan.resident_version, plan.store_version)
        return seen != (self._slots.version, self._store_version())

    def _is_computed_by_another(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether a running prefill is computing what this one would have to compute, too."""
        request, plan = sequence.request, sequence.plan
        if request.cache.bypass or plan is None:
            return False
        best = plan.proposals[0].match.base if plan.proposals else 0
        for other in running:
            if other.phase is not Phase.PREFILL or other.gone:
                continue
            if other.bank.namespace != request.cache.namespace:
                continue
            shared = common_prefix(request.prompt.ids, other.target_ids)
            if shared - max(best, other.bank.frontier) >= _MIN_SHARED_TOKENS:
                return True
        return False

    def _try_place(
        self, sequence: Sequence, plan: Plan, running: list[Sequence], now: float
    ) -> Placement | None:
        promised = sum(map(self._promise, running))
        if not self._placer.make_room(self._promise(sequence), promised):
            return None
        cache = sequence.request.cache
        # No lookup asks for the empty namespace, so nobody finds what a bypassing request holds.
        return self._placer.place(plan, b"" if cache.bypass else cache.namespace, now=now)

    def _promise(self, sequence: Sequence) -> int:
        """Bytes that a sequence may grow to."""
        tokens = len(sequence.request.prompt.ids) + sequence.max_new
        return int(min(tokens, self._max_context) * self._bytes_per_token)


def drop_plan(sequence: Sequence) -> None:
    """Forgets a sequence's plan and ends the leases in it."""
    if sequence.plan is not None:
        sequence.plan.release()
        sequence.plan = None


def refuse(message: Planned) -> None:
    """A lookup's result that nobody waits for any more."""
    if message.plan is not None:
        message.plan.release()
