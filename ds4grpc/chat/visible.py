"""Visible text: what of a text or of a bank can be seen in every replay of a conversation.

Owns what counts as visible (not reasoning, not markers, not white space), and the comparison of
a key with a bank's tokens. Knows no template. Immutable once built; any thread; it computes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

import numpy as np

from ds4grpc.bank import Ids, common_prefix_bytes
from ds4grpc.chat.escape import one_of
from ds4grpc.layout import Spans
from ds4grpc.tokenizer import ESCAPE, Tokenizer, unescape

# Before the spelling of a control token, to tell it from text: no text holds a surrogate.
_CONTROL: Final = "\udc00"
# Markers in the comparison of a key with a bank: single bytes that UTF-8 never has.
_OPEN: Final = 0xFE
_CLOSE: Final = 0xFF
_CONTROL_BYTE: Final = 0xFD


@dataclass(frozen=True, slots=True)
class Visible:
    """The visible characters of a text, and where they stand in it.

    `runs` are (place in `characters`, its length, place in the text, its length there): equal
    lengths go character by character, others as a whole.
    """

    characters: str
    runs: tuple[tuple[int, int, int, int], ...]

    def end_of(self, count: int) -> int | None:
        """Where the first `count` visible characters end in the text; None: inside a whole."""
        if count == 0:
            return 0
        first, length, place, length_there = self.runs[
            bisect_right(self.runs, count - 1, key=lambda run: run[0]) - 1
        ]
        if length == length_there:
            return place + count - first
        return place + length_there if count == first + length else None

    def count_before(self, offset: int) -> int:
        """How many visible characters end at or before `offset` in the text."""
        index = bisect_right(self.runs, offset, key=lambda run: run[2]) - 1
        if index < 0:
            return 0
        first, length, place, length_there = self.runs[index]
        if offset >= place + length_there:
            return first + length
        return first + offset - place if length == length_there else first


class Reader:
    """Reads texts and banks of one tokenizer, with one family's markers ("" for none)."""

    def __init__(self, tokenizer: Tokenizer, open_marker: str = "", close_marker: str = "") -> None:
        self._tokenizer = tokenizer
        self._controls = one_of(tokenizer.controls)
        self._control_ids = np.asarray(sorted(tokenizer.controls.values()), dtype=np.uint32)
        # A family whose close marker also ends turns must not lose the end of a turn.
        self._close_ends_turn = tokenizer.controls.get(close_marker, -1) in tokenizer.end_ids
        structure = (
            f"(?P<open>{re.escape(open_marker) or '(?!)'})"
            f"|(?P<close>{re.escape(close_marker) or '(?!)'})"
            f"|(?P<control>{self._controls.pattern})"
        )
        self._structure = re.compile(structure)
        self._atoms = re.compile(rf"{structure}|(?P<space>\s+)|(?P<escape>{ESCAPE}{ESCAPE}?)")
        self._open_form = self._anyhow(open_marker)
        self._close_form = self._anyhow(close_marker)
        # Bytes without a token vanish in encoding, so they are in a text but never in a bank.
        # From 0xF5 on bytes are in no UTF-8, and stand for markers here.
        single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocabulary_size)}
        self._lost = bytes(b for b in range(0xF5) if bytes([b]) not in single)

    def visible(self, text: str) -> Visible:
        """The visible part of escaped `text`.

        Left out: white space; reasoning blocks of real (not escaped) markers, which hold no
        control token; lone markers. Control tokens count as one whole each.
        """
        parts: list[str] = []
        runs: list[tuple[int, int, int, int]] = []
        length = 0
        opened: tuple[int, int] | None = None  # (runs, characters) at an open marker
        at = 0

        def add(shown: str, place: int, length_there: int) -> None:
            nonlocal length
            if shown:
                parts.append(shown)
                runs.append((length, len(shown), place, length_there))
                length += len(shown)

        for atom in self._atoms.finditer(text):
            add(text[at : atom.start()], at, atom.start() - at)
            at = atom.end()
            whole = atom.group()
            match atom.lastgroup:
                case "open":
                    opened = opened or (len(runs), length)
                case "close" if opened is not None:
                    num_runs, length = opened
                    del runs[num_runs:], parts[num_runs:]
                    opened = None
                case "close" if self._close_ends_turn:
                    add(_CONTROL + whole, atom.start(), len(whole))
                case "control":
                    opened = None
                    add(_CONTROL + whole, atom.start(), len(whole))
                case "escape" if len(whole) == 2:
                    add(ESCAPE, atom.start(), 2)
        add(text[at:], at, len(text) - at)
        return Visible("".join(parts), tuple(runs))

    def control_ends(self, text: str) -> list[int]:
        """Where the control tokens of escaped `text` end that are no part of a marker."""
        atoms = self._structure.finditer(text)
        return [atom.end() for atom in atoms if atom.lastgroup == "control"]

    def same_text(self, key: str, ids: Ids) -> bool:
        """Whether escaped `key` is all the text of `ids`, white space aside."""
        return self._bare(self._tag_key(key)) == self._bare(self._tag_ids(ids))

    def agrees(self, key: str, ids: Ids, hidden: Spans, *, whole: bool = True) -> bool:
        """Whether escaped `key` and the tokens `ids` are the same visible text.

        `hidden` are the spans of `ids` that hold reasoning. Both sides are read alike: spellings
        of markers are markers, escaped or not, and what one side has between two of them the
        other may lack. Not `whole`: the ids may go on after the key.
        """
        left = self._marked(self._tag_key(key))
        right = self._marked(self._shown(ids, hidden))
        return _agree(left, right, whole=whole)

    def _shown(self, ids: Ids, hidden: Spans) -> str:
        """The text of `ids` without hidden reasoning; what its last token holds more stays."""
        parts: list[str] = []
        at = 0
        for start, end in hidden.clip(0, len(ids)).pairs:
            parts.append(self._tag_ids(ids[at:start]))
            closed = self._close_form.search(reasoning := self._tag_ids(ids[start:end]))
            if closed is not None:
                parts.append(reasoning[closed.end() :])
            at = end
        parts.append(self._tag_ids(ids[at:]))
        return "".join(parts)

    def _tag_key(self, key: str) -> str:
        """Unescaped text with control tokens tagged."""
        parts: list[str] = []
        at = 0
        for control in self._controls.finditer(key):
            parts += (unescape(key[at : control.start()]), _CONTROL, control.group())
            at = control.end()
        parts.append(unescape(key[at:]))
        return "".join(parts)

    def _tag_ids(self, ids: Ids) -> str:
        """The text of `ids` with control tokens tagged."""
        parts: list[str] = []
        at = 0
        for place in np.flatnonzero(np.isin(ids, self._control_ids)).tolist():
            parts += (
                self._tokenizer.decode(ids[at:place].tolist()),
                _CONTROL,
                self._tokenizer.decode([int(ids[place])]),
            )
            at = place + 1
        parts.append(self._tokenizer.decode(ids[at:].tolist()))
        return "".join(parts)

    def _anyhow(self, marker: str) -> re.Pattern[str]:
        """Matches a marker in tagged text, of control tokens or spelled as text."""
        if not marker:
            return re.compile("(?!)")
        parts: list[str] = []
        at = 0
        for control in self._controls.finditer(marker):
            parts += (re.escape(marker[at : control.start()]), f"{_CONTROL}?")
            parts.append(re.escape(control.group()))
            at = control.end()
        parts.append(re.escape(marker[at:]))
        return re.compile("".join(parts))

    def _bare(self, tagged: str) -> bytes:
        """Tagged text without white space and lost bytes, a control token as one byte more."""
        data = "".join(tagged.split()).encode("utf-8", "surrogatepass")
        data = data.translate(None, self._lost)
        for surrogate, byte in _BYTES.items():
            data = data.replace(surrogate, bytes([byte]))
        return data

    def _marked(self, tagged: str) -> bytes:
        """`_bare` with markers as one byte each."""
        tagged = self._open_form.sub("\udc01", tagged)
        return self._bare(self._close_form.sub("\udc02", tagged))


_BYTES: Final = {
    "\udc00".encode("utf-8", "surrogatepass"): _CONTROL_BYTE,
    "\udc01".encode("utf-8", "surrogatepass"): _OPEN,
    "\udc02".encode("utf-8", "surrogatepass"): _CLOSE,
}


def _agree(left: bytes, right: bytes, *, whole: bool) -> bool:
    """Whether two texts differ by nothing but markers and what stands between two of them.

    Where they part, the block that one is in ends, or a marker that only one has is passed over
    with the block that it opens. Nothing outside blocks is ever skipped.
    """
    i = j = 0
    while True:
        shared = common_prefix_bytes(left[i:], right[j:])
        i, j = i + shared, j + shared
        if i == len(left) and (j == len(right) or not whole):
            return True
        inside_left, inside_right = _block_end(left, i), _block_end(right, j)
        if inside_left is not None or inside_right is not None:
            moved = (inside_left or i, inside_right or j)
            if moved != (i, j):
                i, j = moved
                continue
        if i < len(left) and left[i] in (_OPEN, _CLOSE):
            i = _after_marker(left, i)
        elif j < len(right) and right[j] in (_OPEN, _CLOSE):
            j = _after_marker(right, j)
        else:
            return False


def _block_end(text: bytes, at: int) -> int | None:
    """The close marker of the block that `at` is inside of; None outside of blocks."""
    opened = text.rfind(_OPEN, 0, at)
    if opened < 0 or max(text.rfind(_CLOSE, 0, at), text.rfind(_CONTROL_BYTE, 0, at)) > opened:
        return None
    return _close_after(text, at)


def _after_marker(text: bytes, at: int) -> int:
    """The end of the block that the marker at `at` opens, or of the marker."""
    closed = _close_after(text, at + 1) if text[at] == _OPEN else None
    return at + 1 if closed is None else closed + 1


def _close_after(text: bytes, at: int) -> int | None:
    """The next close marker from `at` on, unless a control token comes first."""
    closed = text.find(_CLOSE, at)
    return closed if closed >= 0 and text.find(_CONTROL_BYTE, at, closed) < 0 else None


def trailing_space(text: str) -> str:
    """The white space that ends `text`."""
    return text[len(text.rstrip()) :]


def shared_space(left: str, right: str) -> int:
    """How many characters of white space two texts begin with alike."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b or not a.isspace():
            break
        count += 1
    return count
