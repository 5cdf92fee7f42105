"""The words of a bank: identity, records, trust, admission kinds. Frozen values, any thread.

Knows no tensors, files or engine. Everything here travels: between engine and store, and into
bank files (`store.format`) and the catalog.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ds4grpc.layout import Spans

Ids = npt.NDArray[np.uint32]  # (T,) token ids


class RecordKind(enum.StrEnum):
    """What a record's key stands for."""

    RAW = "raw"  # everything in the bank replays
    VISIBLE = "visible"  # hidden reasoning is left out of the key
    PROMPT = "prompt"  # the reply is not usable: the key is the prompt's text


class Admission(enum.StrEnum):
    """How a request got its start."""

    COLD = "cold"
    WARM = "warm"
    FORK = "fork"
    PARTIAL_FORK = "partial_fork"
    PARTIAL_TRUNCATE = "partial_truncate"
    DISK = "disk"
    DISK_PARTIAL = "disk_partial"


class MissReason(enum.StrEnum):
    """Why an admission is not a full reuse."""

    NO_RECORD = "no_record"
    KEY_DIFFERS = "key_differs"
    TOKENS_DIFFER = "tokens_differ"
    EVICTED = "evicted"
    OTHER_FINGERPRINT = "other_fingerprint"
    OTHER_RENDERER = "other_renderer"
    TOO_SHORT = "too_short"
    LOAD_SLOWER = "load_slower"
    HIDDEN_OVERFLOW = "hidden_overflow"
    UNSOUND_KEY = "unsound_key"


class PersistReason(enum.StrEnum):
    """Why a bank was written."""

    TURN = "turn"  # a turn ended with enough new tokens
    REST = "rest"  # idle for a while with something new
    EVICT = "evict"  # its slot was taken
    STOP = "stop"  # the server stops
    ADMIN = "admin"  # FlushBanks, ExportBank, ImportBank


class Trust(enum.IntFlag):
    """What has been established about a bank; stored as an integer, shown by name."""

    COMMITTED = 1  # every token up to the frontier was forwarded and kept
    KEYED = 2  # a sound record exists whose renderer digest is the running one
    DURABLE = 4  # bytes and directory entry are synced
    PROVEN = 8  # a later request continued from it and finished without a failed check
    QUARANTINED = 16  # a load, checksum or key check failed

    def names(self) -> tuple[str, ...]:
        return tuple(flag.name for flag in Trust if flag in self and flag.name is not None)


@dataclass(frozen=True, slots=True)
class Waypoint:
    """A place where text and tokens are known to correspond.

    `offset` counts UTF-8 bytes of the key, `position` tokens of the bank.
    """

    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class Record:
    """What makes a bank findable by text.

    `key` is UTF-8 of the escaped render (chat.escape); `renderer` is the digest of what made it.
    `waypoints` ascend in both coordinates; (0, 0) is implied and not listed. For `raw` and
    `visible` the last waypoint stands at the end of the key; a `prompt` key has none there.
    `anchor` is the byte offset of the last control token in the key, 0 without one: a later
    prompt has one there too, while the key itself may end anywhere in a reply.
    """

    kind: RecordKind
    key: bytes
    renderer: bytes  # 16 bytes
    waypoints: tuple[Waypoint, ...] = ()
    anchor: int = 0

    @property
    def end(self) -> Waypoint | None:
        """The waypoint at the end of the key, if there is one."""
        last = self.waypoints[-1] if self.waypoints else None
        return last if last is not None and last.offset == len(self.key) else None

    def upto(self, position: int) -> Record:
        """The same record for a bank cut at `position`: later waypoints are dropped."""
        kept = tuple(w for w in self.waypoints if w.position <= position)
        if len(kept) == len(self.waypoints):
            return self
        return replace(self, waypoints=kept)


@dataclass(frozen=True, slots=True)
class BankContent:
    """What a bank knows of itself besides its rows: ids, records, hidden spans, held windows.

    `ids` are all committed tokens; `hidden` the token spans of reasoning, markers included, as
    the stream parser saw them; `held` the tokens whose window rows are at hand; `head` the
    frontier of the stable head (system and tools), 0 when unknown.
    """

    namespace: bytes  # 32 bytes
    ids: Ids
    records: tuple[Record, ...] = ()
    hidden: Spans = field(default_factory=Spans)
    held: Spans = field(default_factory=Spans)
    tails: tuple[int, ...] = ()
    head: int = 0

    @property
    def frontier(self) -> int:
        return len(self.ids)


def tenant_tag(tenant: str) -> bytes:
    """16 bytes that name a tenant: the first half of all its namespaces."""
    return hashlib.sha256(b"ds4grpc/tenant/1" + tenant.encode()).digest()[:16]


def namespace(tenant: str, salt: bytes) -> bytes:
    """32 bytes that keep tenants and salts apart: the tenant's tag, then SHA-256 of tagged,
    length-prefixed tenant and salt, cut to 16 bytes."""
    digest = hashlib.sha256(b"ds4grpc/namespace/1")
    for part in (tenant.encode(), salt):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return tenant_tag(tenant) + digest.digest()[:16]


def bank_id(space: bytes, fingerprint: bytes, ids: Ids) -> str:
    """32 hex digits that name a bank by what it is a bank of (DESIGN: identity, not bytes)."""
    digest = hashlib.sha256(b"ds4grpc/bank/1")
    digest.update(space)
    digest.update(fingerprint)
    digest.update(np.ascontiguousarray(ids, dtype="<u4").tobytes())
    return digest.hexdigest()[:32]


def common_prefix(left: Ids, right: Ids) -> int:
    """Number of leading tokens that two id arrays share."""
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length


def common_prefix_bytes(left: bytes, right: bytes) -> int:
    """Number of leading bytes that two texts share."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    a = np.frombuffer(left, dtype=np.uint8, count=length)
    b = np.frombuffer(right, dtype=np.uint8, count=length)
    return int(np.flatnonzero(a != b)[0])
