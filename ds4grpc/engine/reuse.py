"""The admission cascade: which bank a prompt continues, and from where.

Pure functions over snapshots of banks; runs in a worker thread. Knows no slots' states beyond
what a snapshot says, and moves nothing: the engine decides at admission and validates again.

    bank ids   [0 ............ p ........ cut ......... frontier)
    prompt         text[:o] ───┘ text[o:] encoded on its own
                               (o, p): the last waypoint that text and key share
    base <= cut: where the model resumes exactly; everything after it is prefilled (the suffix)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds4grpc.bank import (
    BankContent,
    Ids,
    MissReason,
    Record,
    RecordKind,
    Waypoint,
    common_prefix,
    common_prefix_bytes,
)
from ds4grpc.chat.prompt import Prompt
from ds4grpc.engine.banks import StoredBank
from ds4grpc.layout import StateLayout

# A shorter partial match is not worth a copy or a bank's tail, unless it is half of the prompt:
# most conversations of one template share this much by its opening alone.
MIN_PARTIAL_TOKENS = 32
# A bank that is reused whole goes before another branch's that delivers so little more: it needs
# no copy, or a shorter load.
WHOLE_ADVANTAGE_TOKENS = 32
# A stored bank is loaded unless recomputing is predicted this many times faster: predictions
# err, and loading leaves the engine to others.
RECOMPUTE_ADVANTAGE = 1.5


@dataclass(frozen=True, slots=True)
class ResidentBank:
    """Snapshot of a slot's bank. `in_use`: a sequence runs in it, so it can only be forked."""

    slot: int
    generation: int
    content: BankContent
    in_use: bool
    pinned: bool
    last_use: float


@dataclass(frozen=True, slots=True)
class Match:
    """How far one bank serves a prompt. Positions are tokens of the bank."""

    cut: int
    base: int
    suffix: Ids  # (S,) tokens to prefill after `base`; S >= 1
    waypoints: tuple[Waypoint, ...]  # inherited; offsets are in the prompt's text
    hidden_tokens: int
    whole: bool  # nothing of the bank was missed: its frontier or its newest key is reached
    miss: MissReason | None  # why it is not whole


@dataclass(frozen=True, slots=True)
class Proposal:
    """A bank and its match."""

    bank: ResidentBank | StoredBank
    match: Match


@dataclass(frozen=True, slots=True)
class Plan:
    """What a lookup found, best first. `leases` are all stored candidates, to be released."""

    proposals: tuple[Proposal, ...]
    miss: MissReason | None
    leases: tuple[StoredBank, ...]
    resident_version: int
    store_version: int
    seconds: float

    def release(self) -> None:
        """Ends all leases; idempotent, any thread."""
        for lease in self.leases:
            lease.release()


@dataclass(frozen=True, slots=True)
class Lookup:
    """One prompt that looks for banks.

    `encode` encodes the prompt's text from a byte offset on its own (chat's suffix rule).
    `reply_tokens` is the room that the reply needs; `exact` ignores keys and waypoints.
    """

    prompt: Prompt
    encode: Callable[[int], Ids]
    layout: StateLayout
    max_context: int
    reply_tokens: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured speeds; None until there is a first measurement."""

    prefill_tokens_per_second: float | None = None
    load_bytes_per_second: float | None = None


def rank(
    lookup: Lookup,
    resident: Sequence[ResidentBank],
    stored: Sequence[StoredBank],
    sound: Callable[[StoredBank, Record], bool],
    rates: Rates,
) -> tuple[tuple[Proposal, ...], MissReason | None]:
    """The cascade: proposals by tokens really delivered, and why the first is not whole.

    `sound` checks a record that came from a file again.
    """
    encoded: dict[int, Ids] = {0: lookup.prompt.ids}

    def encode(offset: int) -> Ids:
        if offset not in encoded:
            encoded[offset] = lookup.encode(offset)
        return encoded[offset]

    residents = [
        Proposal(bank, match)
        for bank in resident
        if (match := match_bank(lookup, bank.content, bank.content.records, encode))
    ]
    residents.sort(
        key=lambda p: (
            _rank(p.match),
            isinstance(p.bank, ResidentBank) and not p.bank.in_use,
            p.bank.last_use if isinstance(p.bank, ResidentBank) else 0.0,
        ),
        reverse=True,
    )
    from_disk = []
    for bank in stored:
        records = tuple(
            record
            for record in bank.content.records
            if record.renderer != lookup.prompt.renderer or sound(bank, record)
        )
        match = match_bank(lookup, bank.content, records, encode)
        if match:
            from_disk.append(Proposal(bank, match))
    from_disk.sort(key=lambda p: _rank(p.match), reverse=True)

    worth = [p for p in residents if _worth(p.match, lookup)]
    best = worth[0].match.base if worth else 0
    longer = [p for p in from_disk if p.match.base > best and _worth(p.match, lookup)]
    loads = [p for p in longer if not _recompute_wins(p, best, rates)]
    ranked = (*loads, *worth)
    if len(loads) < len(longer):
        return ranked, MissReason.LOAD_SLOWER
    if ranked:
        return ranked, ranked[0].match.miss
    shared = max((p.match for p in (*residents, *from_disk)), key=_rank, default=None)
    if shared is None:
        return (), MissReason.NO_RECORD
    return (), MissReason.TOO_SHORT if shared.base else shared.miss


def _rank(match: Match) -> tuple[int, bool]:
    return match.base + WHOLE_ADVANTAGE_TOKENS * match.whole, match.whole


def match_bank(
    lookup: Lookup,
    content: BankContent,
    records: Sequence[Record],
    encode: Callable[[int], Ids],
) -> Match | None:
    """The best match of one bank, or None when it shares nothing with the prompt."""
    best: Match | None = None
    overflowed = False
    for record, waypoint in _starts(lookup, records):
        tail = encode(waypoint.offset)
        if not len(tail):
            continue
        if waypoint.position + len(tail) + lookup.reply_tokens > lookup.max_context:
            overflowed = overflowed or waypoint.position > 0
            if waypoint.position > 0:
                continue  # hidden reasoning takes the room: only what fits is taken
        match = _match_at(lookup, content, record, waypoint, tail)
        if best is None or match.base > best.base:
            best = match
    if best is None or best.cut == 0:
        return None
    if best.base >= _whole_from(lookup, content, records):
        best = replace(best, whole=True)
    if overflowed and not best.whole:
        return replace(best, miss=MissReason.HIDDEN_OVERFLOW)
    if best.whole or len(best.suffix) == 1:  # more cannot be reused
        return best
    return replace(best, miss=_reason(lookup, records))


def _starts(lookup: Lookup, records: Sequence[Record]) -> Iterator[tuple[Record | None, Waypoint]]:
    """Where a comparison of ids may start: waypoints in the text shared with a key, and 0."""
    seen: set[Waypoint] = set()
    if not lookup.exact:
        for record in records:
            if record.renderer != lookup.prompt.renderer:
                continue
            shared = common_prefix_bytes(lookup.prompt.text, record.key)
            for waypoint in reversed(record.waypoints):
                if waypoint.offset <= shared and waypoint.offset < len(lookup.prompt.text):
                    if waypoint not in seen:
                        seen.add(waypoint)
                        yield record, waypoint
                    room = lookup.max_context - lookup.reply_tokens
                    if waypoint.position + len(lookup.prompt.ids) <= room:
                        break  # it surely fits: earlier ones deliver less
    yield None, Waypoint(0, 0)


def _match_at(
    lookup: Lookup,
    content: BankContent,
    record: Record | None,
    waypoint: Waypoint,
    tail: Ids,
) -> Match:
    start = waypoint.position
    # At least one token is prefilled, or there are no logits to draw from.
    shared = min(common_prefix(content.ids[start:], tail), len(tail) - 1)
    cut = start + shared
    base = lookup.layout.replay_base(cut, content.held, content.tails)
    suffix = (
        tail[base - start :] if base >= start else np.concatenate((content.ids[base:start], tail))
    )
    inherited: tuple[Waypoint, ...] = ()
    hidden_tokens = 0
    if record is not None:
        inherited = tuple(w for w in record.waypoints if w.position <= start)
        if record.kind is not RecordKind.RAW:
            hidden_tokens = max(0, start + len(tail) - len(lookup.prompt.ids))
    return Match(
        cut=cut,
        base=base,
        suffix=suffix,
        waypoints=inherited,
        hidden_tokens=min(hidden_tokens, base),
        whole=False,
        miss=None,
    )


def _whole_from(lookup: Lookup, content: BankContent, records: Sequence[Record]) -> int:
    """From which base on a bank is reused whole: the end of its newest key when the prompt goes
    on from there (what the bank holds beyond is the reply of another request), else its frontier.
    """
    usable = [r for r in records if r.end is not None and r.renderer == lookup.prompt.renderer]
    newest = max((r.end.position for r in usable if r.end is not None), default=0)
    if lookup.exact or not any(
        r.end.position == newest and lookup.prompt.text.startswith(r.key)
        for r in usable
        if r.end is not None
    ):
        return content.frontier
    return newest


def _reason(lookup: Lookup, records: Sequence[Record]) -> MissReason:
    """Why the best match of a bank ends before its frontier."""
    text = lookup.prompt.text
    usable = [record for record in records if record.renderer == lookup.prompt.renderer]
    if not usable:
        return MissReason.OTHER_RENDERER if records and text else MissReason.TOKENS_DIFFER
    for record in usable:
        if record.end is not None and text.startswith(record.key):
            return MissReason.TOKENS_DIFFER
    if any(record.end is None and text.startswith(record.key) for record in usable):
        return MissReason.UNSOUND_KEY  # the turn that this one follows has no key
    return MissReason.KEY_DIFFERS


def _worth(match: Match, lookup: Lookup) -> bool:
    if match.base <= 0:
        return False
    return (
        match.whole or match.base >= MIN_PARTIAL_TOKENS or 2 * match.base >= len(lookup.prompt.ids)
    )


def _recompute_wins(proposal: Proposal, resident_base: int, rates: Rates) -> bool:
    if rates.prefill_tokens_per_second is None or rates.load_bytes_per_second is None:
        return False
    assert not isinstance(proposal.bank, ResidentBank)
    base = proposal.match.base
    load_seconds = proposal.bank.load_bytes(base) / rates.load_bytes_per_second
    compute_seconds = (base - resident_base) / rates.prefill_tokens_per_second
    return load_seconds > RECOMPUTE_ADVANTAGE * compute_seconds
