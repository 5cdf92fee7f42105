"""Lookup hashes: how a prompt finds banks among any number of them.

Owns what is hashed and where. All digests are keyed with the namespace, so those of two
namespaces never meet and none can be computed from a guessed text without it. Pure functions.

Two running hashes, of token ids and of key text, are read off at fixed strides:

    ids   |....256....|....512....|....768..^      a bank stores those in (base, frontier]
    text  |..1 KiB..|..2 KiB..|    ^ and at each waypoint and the anchor of each record

A running hash at an offset stands for everything before it, so one equal digest is one equal
prefix. What a bank shares with its parent is stored with the parent only, and text ahead of the
first waypoint not at all: there the ids say the same. So no digest belongs to many banks, but
for an anchor, which all replies to one prompt share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ds4grpc.bank import BankContent, Ids, Record
from ds4grpc.engine.banks import MatchQuery

DIGEST_BYTES = 16
IDS_STRIDE = 256  # tokens
TEXT_STRIDE = 1024  # bytes
# What one lookup asks for at most, of each sort: it bounds the statement, and with strides
# doubled beyond it a hit at half the depth is the worst that a huge prompt gets.
MAX_LOOKUP_DIGESTS = 512
MAX_LOOKUP_MARKS = 256


@dataclass(frozen=True, slots=True)
class Mark:
    """A digest that leads to a bank. `position` is how many tokens a hit delivers at least."""

    digest: bytes
    position: int


def bank_marks(
    namespace: bytes, ids: Ids, records: Sequence[Record], base: int, head: int
) -> list[Mark]:
    """What to store for a bank whose file starts at `base`; `head` tokens lie ahead of every
    anchor."""
    multiples = range(IDS_STRIDE * (base // IDS_STRIDE + 1), len(ids) + 1, IDS_STRIDE)
    positions = [*multiples, *([len(ids)] if len(ids) % IDS_STRIDE else [])]
    found = dict(zip(_ids_digests(namespace, ids, positions), positions, strict=True))
    for record in records:
        for digest, position in _record_digests(namespace, record, base, len(ids), head):
            found[digest] = max(position, found.get(digest, 0))
    return [Mark(digest, position) for digest, position in found.items()]


def query_digests(query: MatchQuery) -> list[bytes]:
    """What to look up for a prompt; at most a little over a thousand digests. A head may be a bank
    of its own, which has no text and may be shorter than a stride."""
    positions = sorted({*_bounded(IDS_STRIDE, len(query.ids)), query.head} - {0})
    digests = list(_ids_digests(query.namespace, query.ids, positions))
    if not query.exact:
        marks = query.marks[-MAX_LOOKUP_MARKS:]
        offsets = sorted({*_bounded(TEXT_STRIDE, len(query.text)), *marks})
        digests.extend(_text_digests(query.namespace, query.text, offsets))
    return digests


def parent_digests(content: BankContent) -> list[bytes]:
    """What to look up for the bank that a new one continues: also where an earlier turn or the
    head may have ended, since a bank stores its ids' digest at its frontier too."""
    positions = {*_bounded(IDS_STRIDE, content.frontier), content.head}
    points = [point.position for record in content.records for point in record.waypoints]
    positions.update(sorted(set(points))[-MAX_LOOKUP_MARKS:])
    return list(_ids_digests(content.namespace, content.ids, sorted(positions - {0})))


def _bounded(stride: int, length: int) -> range:
    """The multiples of `stride` up to `length`, thinned by doubling until they are few enough."""
    while length // stride > MAX_LOOKUP_DIGESTS:
        stride *= 2
    return range(stride, length + 1, stride)


def _ids_digests(namespace: bytes, ids: Ids, positions: Iterable[int]) -> Iterable[bytes]:
    data = memoryview(np.ascontiguousarray(ids, dtype="<u4").tobytes())
    return _running(b"ds4grpc/ids", namespace, data, (position * 4 for position in positions))


def _text_digests(namespace: bytes, text: bytes, offsets: Iterable[int]) -> Iterable[bytes]:
    return _running(b"ds4grpc/text", namespace, memoryview(text), offsets)


def _record_digests(
    namespace: bytes, record: Record, base: int, frontier: int, head: int
) -> Iterable[tuple[bytes, int]]:
    """(digest, tokens delivered at least) for what a record's key has that the parent's has not:
    waypoints past the base, and strides after the last waypoint at or below it; and its anchor.
    What stands at the frontier is the bank's own, also where its file has no rows."""
    positions = {point.offset: point.position for point in record.waypoints if point.offset}
    strides = range(TEXT_STRIDE, len(record.key) + 1, TEXT_STRIDE)
    # Records of earlier turns are in the files of those turns, with their anchors.
    is_new = record.end is None or record.end.position > base or base == frontier
    anchors = {record.anchor} - {0} if is_new else set()
    offsets = sorted({*positions, *strides, *anchors})
    position = 0
    for offset, digest in zip(offsets, _text_digests(namespace, record.key, offsets), strict=True):
        is_waypoint = offset in positions
        position = positions.get(offset, position)
        if offset in anchors:
            # Past what leads there: ahead of the many banks that share it and go on otherwise.
            yield digest, max(position, head) + 1
        elif position > base or (position == base > 0 and not (is_waypoint and base < frontier)):
            yield digest, position


def _running(
    person: bytes, namespace: bytes, data: memoryview, offsets: Iterable[int]
) -> Iterable[bytes]:
    """The digest of data[:offset] for each of the ascending offsets."""
    running = hashlib.blake2b(digest_size=DIGEST_BYTES, key=namespace, person=person)
    at = 0
    for offset in offsets:
        running.update(data[at:offset])
        at = offset
        yield running.copy().digest()
