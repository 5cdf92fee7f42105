"""Escaped text to ids, by one rule for whole prompts and for the text after a key.

Owns where an encoding is divided, where keys may end (marks), and prompts that are not
conversations. Knows no template and no roles. Immutable once built; any thread, not the event
loop: encoding computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from ds4grpc.bank import Ids
from ds4grpc.chat import escape
from ds4grpc.chat.escape import Escaper, one_of
from ds4grpc.chat.prompt import Prompt
from ds4grpc.chat.visible import Reader
from ds4grpc.tokenizer import ESCAPE, Tokenizer

IDENTITY_DIGEST: Final = hashlib.sha256(b"ds4grpc/identity/%d" % escape.VERSION).digest()[:16]
"""Renderer digest of prompts that no template made."""

# White space and escapes before a control token at which a key may end: the bank may hold any
# part of them. Templates write at most a few; more come from clients and are not worth a mark.
_MAX_BLANKS: Final = 16


class Codec:
    """The tokenizer with the division rule.

    The open marker at the end of a prompt is encoded on its own, so that hidden reasoning starts
    at a token boundary:

        text   [0 ................. open_at)[open_at ... end)     BOS only at 0, and only once
        ids    [BOS? | encode of its own   ][encode of its own]
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.escaper = Escaper(filter(None, tokenizer.controls))
        self.reader = Reader(tokenizer)
        self._controls = one_of(tokenizer.controls)

    def encode_prompt(self, text: bytes, open_at: int = -1) -> Ids:
        """Ids of a whole prompt, BOS included where the tokenizer asks for one.

        `open_at` is the byte offset of the trailing open marker, -1 without one.
        """
        return joined([self.bos(text), *self.encode_pieces(text, (open_at,))])

    def encode_suffix(self, text: bytes, open_at: int = -1) -> Ids:
        """Ids of the text after a key, on its own: the same rule, and no BOS.

        `open_at` is relative to `text`; negative when the open marker is not in it.
        """
        return joined(self.encode_pieces(text, (open_at,)))

    def encode_pieces(self, text: bytes, cuts: Iterable[int]) -> list[list[int]]:
        """Ids of the parts of `text` between ascending byte offsets; those not inside are none."""
        edges = [0, *(cut for cut in cuts if 0 < cut < len(text)), len(text)]
        return self.tokenizer.encode_many(
            text[start:end].decode() for start, end in zip(edges, edges[1:], strict=False)
        )

    def bos(self, text: bytes) -> list[int]:
        """The ids that stand before the encoding of a prompt: BOS, or nothing."""
        bos_id = self.tokenizer.bos_id
        if bos_id is None or not self.tokenizer.add_bos:
            return []
        return [] if text.startswith(self.tokenizer.bos_text.encode()) else [bos_id]

    def marks(self, text: str) -> tuple[int, ...]:
        """Byte offsets in `text` where a key may end, ascending.

        These are the start of each control token, and each place in the blanks before it.
        """
        found: list[int] = []
        bytes_before = 0
        at = 0
        for control in self._controls.finditer(text):
            start = control.start()
            first = start
            while first > at and start - first < _MAX_BLANKS and _is_blank(text[first - 1]):
                first -= 1
            bytes_before += len(text[at:first].encode())
            found.append(bytes_before)
            for blank in text[first:start]:
                bytes_before += len(blank.encode())
                found.append(bytes_before)
            at = start
        return tuple(mark for mark in found if mark > 0)

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Where the control tokens of `text` stand, in characters, ascending."""
        return [control.span() for control in self._controls.finditer(text)]

    def text_prompt(self, text: str) -> Prompt:
        """A prompt that is text: spellings of control tokens in it are control tokens."""
        escaped = text.replace(ESCAPE, ESCAPE * 2)
        data = escaped.encode()
        return Prompt(
            text=data,
            ids=self.encode_prompt(data),
            renderer=IDENTITY_DIGEST,
            marks=self.marks(escaped),
        )

    def ids_prompt(self, ids: Sequence[int]) -> Prompt:
        """A prompt that is ids, taken as they are; it has no text to be found by."""
        return Prompt(text=b"", ids=np.asarray(ids, dtype=np.uint32), renderer=IDENTITY_DIGEST)


def _is_blank(character: str) -> bool:
    return character.isspace() or character == ESCAPE


def joined(pieces: Iterable[list[int]]) -> Ids:
    """The ids of all `pieces`, in order."""
    return np.asarray([token_id for piece in pieces for token_id in piece], dtype=np.uint32)
