"""A reply's tokens to reasoning and text, as they come.

Owns where reasoning ends, what is held back, stop strings, and which tokens the client has
received whole. Knows no sampling and no banks. One owner at a time.

    tokens   |  Let |  me | </ | think |> \\n | \\n | Hel | lo |
    raw text    Let    me   </   think   > \\n   \\n   Hel   lo        all that was fed
    spans       [REASONING ][DROPPED                 ][TEXT     ]    what became of it
"""

from __future__ import annotations

import enum
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

from ds4grpc.chat.escape import one_of
from ds4grpc.chat.prompt import Channel, Reply, ReplyForm
from ds4grpc.tokenizer import Detokenizer, Tokenizer

Piece = tuple[Channel, str]

# Goes before and after a control token's spelling in the raw text: no client text and no decoded
# token holds a surrogate, so a marker of text and one of control tokens stay apart.
_CONTROL_START: Final = "\udc00"
_CONTROL_END: Final = "\udc01"
_CONTROL: Final = re.compile(f"({_CONTROL_START}[^{_CONTROL_END}]*{_CONTROL_END})")


class _Phase(enum.Enum):
    START = enum.auto()  # an open marker may still come first
    OPENED = enum.auto()  # white space after the open marker
    REASONING = enum.auto()
    CLOSED = enum.auto()  # white space after the close marker
    TEXT = enum.auto()
    STOPPED = enum.auto()


class _Kind(enum.Enum):
    TEXT = enum.auto()
    REASONING = enum.auto()
    DROPPED = enum.auto()  # markers, and white space around them
    CONTROL = enum.auto()  # other control tokens: never sent, so never received
    CUT = enum.auto()  # from a stop string on


class ReplyParser:
    """Feeds on one token id at a time and returns what can be sent.

    Only the first block is reasoning. Text is held back while it may be the start of a marker or
    of a stop string, or white space before a close marker. The first stop string to become
    complete ends the text before it; a control token between its characters keeps it from
    matching. How the reply is divided into tokens does not change the pieces joined.
    """

    def __init__(self, form: ReplyForm, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped: str | None = None
        """The stop string that was found; feed nothing more then."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._open = _forms(form.open_marker, tokenizer)
        self._close = _forms(form.close_marker, tokenizer)
        self._stop = tuple(filter(None, stop))
        self._raw: list[str] = []
        self._held = ""  # the end of the raw text that is not yet decided on
        self._ends: list[int] = []  # by token: raw characters up to its end
        self._unfinished: list[bool] = []  # by token: it ends inside a character
        self._length = 0  # raw characters so far
        self._decided = 0  # those that are not held
        self._ready: list[Piece] = []
        self._spans: list[tuple[int, _Kind]] = []  # (end, kind), ascending, joined
        self._reasoned = form.reasoning_open
        self._closed_at: int | None = None  # raw characters up to the close marker's end
        if form.reasoning_open:
            self._phase = _Phase.OPENED
        else:
            self._phase = _Phase.START if self._open else _Phase.TEXT

    @property
    def in_reasoning(self) -> bool:
        return self._phase in (_Phase.OPENED, _Phase.REASONING)

    @property
    def hidden_span(self) -> tuple[int, int]:
        """[start, end) of the reply's tokens that are reasoning, markers included; (0, 0): none.

        The token in which the close marker ends is the last one, whatever else it holds.
        """
        if not self._reasoned:
            return 0, 0
        if self._closed_at is None:
            return 0, len(self._ends)
        return 0, bisect_left(self._ends, self._closed_at) + 1

    def feed(self, token_id: int) -> list[Piece]:
        """Takes the next token and returns what is now ready to be sent."""
        text = self._detokenizer.feed(token_id)
        if self._tokenizer.is_control(token_id):
            spelling = self._tokenizer.token_bytes(token_id).decode(errors="replace")
            text = f"{self._detokenizer.flush()}{_CONTROL_START}{spelling}{_CONTROL_END}"
        self._append(text)
        self._ends.append(self._length)
        self._unfinished.append(self._detokenizer.pending)
        return self._decide(final=False)

    def flush(self) -> list[Piece]:
        """The reply has ended: returns what was held back."""
        self._append(self._detokenizer.flush())
        return self._decide(final=True)

    def delivered_tokens(self, num_committed: int) -> int:
        """How many of the first `num_committed` tokens the client has received whole.

        Markers and dropped white space count as received, held text and control tokens do not.
        """
        limit = self._received()
        count = num_committed
        while count and (self._ends[count - 1] > limit or self._unfinished[count - 1]):
            count -= 1
        return count

    def reply(self, num_tokens: int) -> Reply:
        """The reply cut to its first `num_tokens` tokens."""
        end = self._ends[num_tokens - 1] if num_tokens else 0
        raw = "".join(self._raw)
        parts: dict[_Kind, list[str]] = {kind: [] for kind in _Kind}
        start = 0
        for stop, kind in self._spans:
            if start >= end:
                break
            parts[kind].append(raw[start : min(stop, end)])
            start = stop
        closed = self._closed_at is not None and self._closed_at <= end
        return Reply(
            text="".join(parts[_Kind.TEXT]),
            reasoning="".join(parts[_Kind.REASONING]),
            reasoning_open=self._reasoned and not closed,
            control_inside=bool(parts[_Kind.CONTROL]),
        )

    def _append(self, text: str) -> None:
        if text:
            self._raw.append(text)
            self._held += text
            self._length += len(text)

    def _received(self) -> int:
        """Raw characters from the start that the client has received, or that were dropped."""
        start = 0
        for end, kind in self._spans:
            if kind in (_Kind.CONTROL, _Kind.CUT):
                return start
            start = end
        return start

    def _decide(self, *, final: bool) -> list[Piece]:
        """Decides on as much of the held text as can be; `final`: on all of it."""
        while self._held and self._step(final=final):
            pass
        ready, self._ready = self._ready, []
        return ready

    def _step(self, *, final: bool) -> bool:
        """Decides on some of the held text; False when the rest has to wait."""
        match self._phase:
            case _Phase.START:
                return self._start(final=final)
            case _Phase.OPENED | _Phase.CLOSED:
                return self._skip_blanks()
            case _Phase.REASONING:
                return self._reason(final=final)
            case _Phase.TEXT:
                return self._answer(final=final)
            case _Phase.STOPPED:
                self._take(len(self._held), _Kind.CUT)
                return False

    def _start(self, *, final: bool) -> bool:
        rest = self._held.lstrip()
        for form in self._open:
            if rest.startswith(form):
                self._take(len(self._held) - len(rest) + len(form), _Kind.DROPPED)
                self._reasoned = True
                self._phase = _Phase.OPENED
                return True
        if not final and (not rest or any(form.startswith(rest) for form in self._open)):
            return False
        self._phase = _Phase.TEXT
        return True

    def _skip_blanks(self) -> bool:
        self._take(len(self._held) - len(self._held.lstrip()), _Kind.DROPPED)
        if not self._held:
            return False
        self._phase = _Phase.REASONING if self._phase is _Phase.OPENED else _Phase.TEXT
        return True

    def _reason(self, *, final: bool) -> bool:
        # The leftmost match: the form of control tokens has the spelling inside it.
        starts = [at for form in self._close if (at := self._held.find(form)) >= 0]
        if not starts:
            waiting = 0 if final else _overlap(self._held, self._close)
            settled = self._held[: len(self._held) - waiting]
            self._send(settled if final else settled.rstrip(), _Kind.REASONING)
            return False
        body = self._held[: min(starts)].rstrip()
        marker = next(f for f in self._close if self._held.startswith(f, min(starts)))
        self._send(body, _Kind.REASONING)
        self._take(min(starts) - len(body) + len(marker), _Kind.DROPPED)
        self._closed_at = self._decided
        self._phase = _Phase.CLOSED
        return True

    def _answer(self, *, final: bool) -> bool:
        run, control = _CONTROL.match(self._held), _CONTROL.search(self._held)
        if run is not None:
            self._take(run.end(), _Kind.CONTROL)
            return True
        text = self._held if control is None else self._held[: control.start()]
        found = _first(text, self._stop)
        if found is not None:
            start, end = found
            self.stopped = next(stop for stop in self._stop if text[start:end] == stop)
            self._take(start, _Kind.TEXT)
            self._phase = _Phase.STOPPED
            return True
        waiting = 0 if final or control is not None else _overlap(text, self._stop)
        self._take(len(text) - waiting, _Kind.TEXT)
        return control is not None

    def _send(self, text: str, kind: _Kind) -> None:
        """Takes `text`, the start of the held text, as `kind`, but for the controls in it."""
        for i, part in enumerate(_CONTROL.split(text)):
            self._take(len(part), _Kind.CONTROL if i % 2 else kind)

    def _take(self, length: int, kind: _Kind) -> None:
        if length == 0:
            return
        text, self._held = self._held[:length], self._held[length:]
        self._decided += length
        if self._spans and self._spans[-1][1] is kind:
            self._spans.pop()
        self._spans.append((self._decided, kind))
        channel = _CHANNELS.get(kind)
        if channel is None:
            return
        if self._ready and self._ready[-1][0] is channel:
            text = self._ready.pop()[1] + text
        self._ready.append((channel, text))


_CHANNELS: Final = {_Kind.TEXT: Channel.TEXT, _Kind.REASONING: Channel.REASONING}


def _forms(marker: str, tokenizer: Tokenizer) -> tuple[str, ...]:
    """How `marker` may stand in the raw text: of plain text, and of control tokens."""
    if not marker:
        return ()
    controls = one_of(tokenizer.controls)
    tagged = controls.sub(rf"{_CONTROL_START}\g<0>{_CONTROL_END}", marker)
    return (marker,) if tagged == marker else (tagged, marker)


def _first(text: str, targets: Iterable[str]) -> tuple[int, int] | None:
    """Where the first of `targets` to become complete stands in `text`."""
    ends = [(start + len(target), start) for target in targets if (start := text.find(target)) >= 0]
    if not ends:
        return None
    end, start = min(ends)
    return start, end


def _overlap(text: str, targets: Iterable[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a longer target."""
    longest = 0
    for target in targets:
        for length in range(min(len(target) - 1, len(text)), longest, -1):
            if text.endswith(target[:length]):
                longest = length
                break
    return longest
