"""State layouts: what a bank holds, as plain numbers.

Owns `StateLayout`, `Rows` and `Spans`, from which slots, forks, cuts and files work alone. Knows
nothing of tensors, files or models; pure values, any thread.

A row array of a bank with frontier F, seen along its tokens:

    tokens   0 ........ w1-W .. w1 ......... w2-W .. w2 == F
    plain    [======================================]        every row, always
    window              [=======]            [=======]       only W tokens before a resume position
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

Span = tuple[int, int]  # [start, end) in tokens


@dataclass(frozen=True, slots=True)
class Spans:
    """A set of tokens as sorted, disjoint, non-touching [start, end) pairs."""

    pairs: tuple[Span, ...] = ()

    @staticmethod
    def of(pairs: Iterable[Span]) -> Spans:
        """The union of `pairs`; empty pairs are dropped, touching ones joined."""
        joined: list[Span] = []
        for start, end in sorted(pair for pair in pairs if pair[0] < pair[1]):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            else:
                joined.append((start, end))
        return Spans(tuple(joined))

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.pairs)

    def __or__(self, other: Spans) -> Spans:
        return Spans.of(self.pairs + other.pairs)

    def __and__(self, other: Spans) -> Spans:
        return self - (self - other)

    def __sub__(self, other: Spans) -> Spans:
        left: list[Span] = []
        for start, end in self.pairs:
            at = start
            for cut_start, cut_end in other.pairs:
                if cut_end <= at or cut_start >= end:
                    continue
                if cut_start > at:
                    left.append((at, cut_start))
                at = max(at, cut_end)
            if at < end:
                left.append((at, end))
        return Spans(tuple(left))

    def clip(self, start: int, end: int) -> Spans:
        """What lies in [start, end)."""
        return Spans.of((max(a, start), min(b, end)) for a, b in self.pairs)

    def covers(self, start: int, end: int) -> bool:
        """Whether every token of [start, end) is in the set (an empty range always is)."""
        return start >= end or any(a <= start and end <= b for a, b in self.pairs)


@dataclass(frozen=True, slots=True)
class Rows:
    """One append-only array of rows of equal size, one row for each `tokens_per_row` tokens.

    `window` 0: every row is needed to resume. `window` W: only the rows of the W tokens before
    the resume position are. `name` is unique in its layout and made of [a-z0-9._].
    """

    name: str
    row_bytes: int
    tokens_per_row: int = 1
    window: int = 0

    def num_rows(self, num_tokens: int) -> int:
        """Complete rows that `num_tokens` tokens make."""
        return num_tokens // self.tokens_per_row


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What the banks of one architecture and numeric mode hold.

    `layout_id` names it in files and in the fingerprint; equal ids mean equal bytes.
    `tail_bytes` is the size of the state that rows cannot rebuild, kept at single positions;
    0 when there is none.
    """

    layout_id: str
    rows: tuple[Rows, ...]
    tail_bytes: int = 0

    @property
    def alignment(self) -> int:
        """Tokens to which a file's base and a cut without a tail are aligned."""
        return math.lcm(*(rows.tokens_per_row for rows in self.rows)) if self.rows else 1

    @property
    def window(self) -> int:
        """The longest window, in tokens; 0 when no array has one."""
        return max((rows.window for rows in self.rows), default=0)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token costs, windows not counted as bounded."""
        return sum(rows.row_bytes / rows.tokens_per_row for rows in self.rows)

    @property
    def plain_bytes_per_token(self) -> float:
        """Bytes that one more token costs for good: of the arrays without a window."""
        return sum(r.row_bytes / r.tokens_per_row for r in self.rows if not r.window)

    @property
    def point_bytes(self) -> float:
        """Bytes that resuming at one position takes besides plain rows: a window and a tail."""
        return self.window * (self.bytes_per_token - self.plain_bytes_per_token) + self.tail_bytes

    def replay_base(self, cut: int, held: Spans, tails: Collection[int] = ()) -> int:
        """The largest position at or below `cut` from which the model resumes exactly.

        `held` are the tokens whose window rows are at hand, `tails` the positions whose tail is.
        0 needs nothing, so it always qualifies.
        """
        if self.tail_bytes:
            at_tails = (p for p in tails if p <= cut and self._window_held(p, held))
            return max(at_tails, default=0)
        if not self.window:
            return cut - cut % self.alignment
        best = 0
        for start, end in held.pairs:
            position = min(cut, end)
            position -= position % self.alignment
            if position > best and self._window_held(position, held) and position >= start:
                best = position
        return best

    def windows_at(self, positions: Iterable[int]) -> Spans:
        """The union of [p - W, p) over `positions`: what a file keeps of window rows."""
        if not self.window:
            return Spans()
        return Spans.of((max(0, p - self.window), p) for p in positions)

    def _window_held(self, position: int, held: Spans) -> bool:
        return held.covers(max(0, position - self.window), position)
