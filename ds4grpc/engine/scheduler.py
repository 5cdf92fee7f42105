"""What the next step runs: every decoding row, and one chunk of one waiting prefill.

Decides by phases and counts alone; holds no tensors. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from ds4grpc.engine.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part in a step: `ids` stand at [start, start + len(ids)) of its slot."""

    sequence: Sequence
    ids: tuple[int, ...]
    start: int
    wants_logits: bool


class Scheduler:
    """Prefills take turns chunk by chunk; decode rows run in every step.

    A chunk is smaller while others run, so that no stream waits long for it and a short prompt
    soon has its turn.
    """

    def __init__(self, *, chunk_alone: int, chunk_shared: int) -> None:
        self._chunk_alone = chunk_alone
        self._chunk_shared = chunk_shared
        self._last_prefill: Sequence | None = None

    def next(self, running: Rows[Sequence]) -> list[Work]:
        """The work of the next step; empty when nothing can run."""
        decoding = [s for s in running if s.phase is Phase.DECODE and not s.paused]
        prefilling = [s for s in running if s.phase is Phase.PREFILL]
        work = [_decode(sequence) for sequence in decoding]
        if prefilling:
            alone = not decoding and len(prefilling) == 1
            sequence = self._turn(prefilling)
            work.append(_chunk(sequence, self._chunk_alone if alone else self._chunk_shared))
        return work

    def _turn(self, prefilling: list[Sequence]) -> Sequence:
        """The prefill after the one that ran last, in the order of their arrival."""
        index = -1
        if self._last_prefill in prefilling:
            index = prefilling.index(self._last_prefill)
        self._last_prefill = prefilling[(index + 1) % len(prefilling)]
        return self._last_prefill


def _decode(sequence: Sequence) -> Work:
    assert sequence.next_id is not None
    return Work(sequence, (sequence.next_id,), sequence.bank.frontier, wants_logits=True)


def _chunk(sequence: Sequence, limit: int) -> Work:
    ids = tuple(sequence.pending[:limit])
    last = len(ids) == len(sequence.pending)
    # Nothing is drawn after a prefill that only stores.
    return Work(sequence, ids, sequence.bank.frontier, last and sequence.max_new > 0)
