"""All stored banks in memory: who they are, who needs whom, who goes first.

Owns the family tree of delta files and the order of eviction. Knows no files and no SQL; `shelf`
keeps the three in step. Event loop only: a change between two awaits is atomic.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ds4grpc.bank import PersistReason, RecordKind, Trust
from ds4grpc.layout import Spans

# A hit counts half as much after six hours, or after as much has been evicted as is stored: so a
# dead favourite goes in the end, on an idle machine as on a busy one. Evictions make the index's
# own clock run ahead. With 1 + heat at some time, banks rank by time + log2(1 + heat) * 6 h: an
# order that does not change as time passes.
HIT_HALF_LIFE_SECONDS = 6 * 3600.0
_NEVER_AGAIN = 1e15  # seconds; what is useless goes before all that is not


@dataclass(slots=True)
class Entry:
    """One stored bank: a row of the catalog and a file. Times are seconds since 1970."""

    bank_id: str
    namespace: bytes
    parent_id: str  # "" when base is 0
    base: int
    frontier: int
    head: int
    size_bytes: int
    reason: PersistReason
    record_kinds: tuple[RecordKind, ...]
    hidden_tokens: int
    trust: Trust
    created_at: float
    last_used_at: float
    windows: Spans = Spans()  # as in the file's header
    tails: tuple[int, ...] = ()
    hits: int = 0
    pinned: bool = False
    hidden: bool = False  # deleted, its rows still needed by children
    verified_at: float | None = None
    ttl_seconds: float | None = None
    superseded: bool = False  # another chain holds all its tokens
    heat: float = 0.0  # hits as they counted at `heated_at`, on the index's clock
    heated_at: float = 0.0
    children: dict[str, None] = field(default_factory=dict)  # ids, most recently used last

    @property
    def worth(self) -> float:
        """What is smallest goes first; without hits, the older one."""
        worth = self.heated_at + HIT_HALF_LIFE_SECONDS * math.log2(1 + self.heat)
        return worth - _NEVER_AGAIN if self.superseded or self.hidden else worth

    def warm(self, gain: float, at: float) -> None:
        """Counts a use at `at`, on the index's clock."""
        newest = max(at, self.heated_at)
        self.heat *= 2 ** ((self.heated_at - newest) / HIT_HALF_LIFE_SECONDS)
        self.heat += gain * 2 ** ((at - newest) / HIT_HALF_LIFE_SECONDS)
        self.heated_at = newest

    def is_expired(self, now: float) -> bool:
        """Whether its time to live is over; a pin outweighs it."""
        if self.ttl_seconds is None or self.pinned:
            return False
        return now >= self.last_used_at + self.ttl_seconds

    def is_usable(self, now: float) -> bool:
        """Whether a later request may continue from it."""
        needed = Trust.COMMITTED | Trust.DURABLE
        good = self.trust & (needed | Trust.QUARANTINED) == needed
        return good and not self.hidden and not self.is_expired(now)


@dataclass(frozen=True, slots=True)
class Move:
    """Another file takes the place of a bank's: what changes of its entry."""

    bank_id: str
    old_base: int
    parent_id: str
    base: int
    size_bytes: int
    windows: Spans
    tails: tuple[int, ...]

    def applied_to(self, entry: Entry) -> Entry:
        """A copy of the entry as it will be, without children."""
        return replace(
            entry,
            parent_id=self.parent_id,
            base=self.base,
            size_bytes=self.size_bytes,
            windows=self.windows,
            tails=self.tails,
            children={},
        )


class Index:
    """Every entry, by id."""

    def __init__(self, bytes_per_token: float = 0.0) -> None:
        self.num_bytes = 0  # of all files
        self._bytes_per_token = bytes_per_token  # of rows; 0: all files count as equally dense
        self._ahead_seconds = 0.0  # of the index's clock
        # Few of very many, which nobody may look for one by one on the event loop.
        self._pinned: set[str] = set()
        self._hidden: set[str] = set()
        self.mortal: set[str] = set()  # those with a time to live
        self._entries: dict[str, Entry] = {}
        # (worth, id) of every leaf, and stale pairs: checked when they come up.
        self._leaves: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def num_hidden(self) -> int:
        return len(self._hidden)

    def hidden(self) -> list[Entry]:
        """Banks that are deleted and whose rows are still needed."""
        return [self._entries[bank_id] for bank_id in self._hidden]

    def get(self, bank_id: str) -> Entry | None:
        return self._entries.get(bank_id)

    def add(self, entry: Entry) -> None:
        """Its parent must be there already, itself not."""
        assert entry.bank_id not in self._entries
        self._entries[entry.bank_id] = entry
        self.num_bytes += entry.size_bytes
        if not entry.heated_at:
            entry.heated_at = entry.last_used_at + self._ahead_seconds
            entry.heat = entry.hits * self._density(entry)
        if entry.hidden:
            self._hidden.add(entry.bank_id)
        if entry.pinned:
            self._pinned.add(entry.bank_id)
        if entry.ttl_seconds is not None:
            self.mortal.add(entry.bank_id)
        if entry.parent_id:
            parent = self._entries[entry.parent_id]
            if parent.children:  # a branch more: the rows below it are shared
                self._warm_chain(parent, entry.heated_at)
            parent.children[entry.bank_id] = None
        if not entry.children:
            self._push(entry)

    def remove(self, entry: Entry) -> None:
        """It must have no children left."""
        assert not entry.children
        del self._entries[entry.bank_id]
        self.num_bytes -= entry.size_bytes
        self._hidden.discard(entry.bank_id)
        self._pinned.discard(entry.bank_id)
        self.mortal.discard(entry.bank_id)
        self._leave(entry)

    def _leave(self, entry: Entry) -> None:
        parent = self._entries.get(entry.parent_id)
        if parent is not None:
            parent.children.pop(entry.bank_id, None)
            if not parent.children:
                self._push(parent)

    def move(self, entry: Entry, move: Move) -> None:
        """Its file is another one from now on; the new parent must be there already."""
        self._leave(entry)
        self.num_bytes += move.size_bytes - entry.size_bytes
        entry.parent_id = move.parent_id
        entry.base = move.base
        entry.size_bytes = move.size_bytes
        entry.windows = move.windows
        entry.tails = move.tails
        parent = self._entries.get(entry.parent_id)
        if parent is not None:  # as the least recently used: what it holds, the parent holds too
            parent.children = {entry.bank_id: None, **parent.children}

    def set_pinned(self, entry: Entry, *, pinned: bool) -> None:
        entry.pinned = pinned
        _put(self._pinned, entry.bank_id, pinned)
        self._push(entry)

    def set_hidden(self, entry: Entry, *, hidden: bool) -> None:
        entry.hidden = hidden
        _put(self._hidden, entry.bank_id, hidden)
        self._push(entry)

    def set_superseded(self, entry: Entry) -> None:
        """Another chain holds all its tokens."""
        entry.superseded = True
        self._push(entry)

    def set_ttl(self, entry: Entry, ttl_seconds: float | None) -> None:
        entry.ttl_seconds = ttl_seconds
        _put(self.mortal, entry.bank_id, ttl_seconds is not None)

    def take_over(self, entry: Entry, old: Entry) -> None:
        """An entry that was made anew from its file gets what its life had brought."""
        entry.hits, entry.last_used_at = old.hits, old.last_used_at
        entry.verified_at = old.verified_at
        entry.heat, entry.heated_at, entry.superseded = old.heat, old.heated_at, old.superseded
        entry.trust |= old.trust & Trust.PROVEN
        self.set_ttl(entry, old.ttl_seconds)
        self._push(entry)

    def used(self, entry: Entry, now: float) -> None:
        entry.hits += 1
        entry.last_used_at = max(now, entry.last_used_at)
        parent = self._entries.get(entry.parent_id)
        if parent is not None:
            parent.children[entry.bank_id] = parent.children.pop(entry.bank_id)
        self._warm_chain(entry, now + self._ahead_seconds)
        self._push(entry)

    def _warm_chain(self, entry: Entry, at: float) -> None:
        """Counts a use of a bank and of those whose rows it needs."""
        for each in self.chain(entry):
            each.warm(self._density(each), at)

    def _density(self, entry: Entry) -> float:
        """Tokens that a hit saves by its file, for the bytes it takes: 1 where all are rows."""
        if not self._bytes_per_token:
            return 1.0
        rows_bytes = (entry.frontier - entry.base) * self._bytes_per_token
        return min(1.0, rows_bytes / entry.size_bytes)

    def chain(self, entry: Entry) -> list[Entry]:
        """The banks whose files hold its rows, root first, itself last."""
        found = [entry]
        while found[-1].parent_id:
            found.append(self._entries[found[-1].parent_id])
        found.reverse()
        return found

    def descendants(self, entry: Entry) -> list[Entry]:
        """Everything that needs its rows, itself included, each after its parent."""
        found = [entry]
        for each in found:  # grows as it goes
            found.extend(self._entries[child] for child in each.children)
        return found

    def children(self, entry: Entry) -> Iterator[Entry]:
        """Its children, most recently used first. A popular head has as many as there are banks:
        take few."""
        return (self._entries[child] for child in reversed(entry.children))

    def order_children(self) -> None:
        """Sorts what was added in another order than that of use."""
        for entry in self:
            if len(entry.children) > 1:
                theirs = sorted(entry.children, key=lambda child: self._entries[child].last_used_at)
                entry.children = dict.fromkeys(theirs)

    def protected_bytes(self, bank_ids: Iterable[str]) -> int:
        """Bytes of the files that pinned banks and `bank_ids` need: no eviction frees them."""
        kept: set[str] = set()
        for bank_id in (*self._pinned, *bank_ids):
            at = self._entries.get(bank_id)
            while at is not None and at.bank_id not in kept:
                kept.add(at.bank_id)
                at = self._entries.get(at.parent_id)
        return sum(self._entries[bank_id].size_bytes for bank_id in kept)

    def pop_victim(self, spared: Collection[str]) -> Entry | None:
        """Removes the leaf that is worth least; never a pinned one, never one of `spared`."""
        held_back: list[tuple[float, str]] = []
        victim: Entry | None = None
        while victim is None and self._leaves:
            pair = heapq.heappop(self._leaves)
            entry = self._entries.get(pair[1])
            if entry is None or entry.children or entry.pinned or entry.worth != pair[0]:
                continue  # stale: pushed again when that changed, or will be when it changes
            if entry.bank_id in spared:
                held_back.append(pair)
            else:
                victim = entry
        for pair in held_back:
            heapq.heappush(self._leaves, pair)
        if victim is not None:
            self._ahead_seconds += HIT_HALF_LIFE_SECONDS * victim.size_bytes / self.num_bytes
            self.remove(victim)
        return victim

    def _push(self, entry: Entry) -> None:
        heapq.heappush(self._leaves, (entry.worth, entry.bank_id))
        if len(self._leaves) > 64 + 2 * len(self._entries):
            self._leaves = [(each.worth, each.bank_id) for each in self if not each.children]
            heapq.heapify(self._leaves)


def _put(among: set[str], bank_id: str, belongs: bool) -> None:
    (among.add if belongs else among.discard)(bank_id)
