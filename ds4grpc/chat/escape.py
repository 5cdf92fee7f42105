"""Escaping of client text, so that it can never spell a control token or a marker.

Owns the rule that places `tokenizer.ESCAPE`; what an escape means is the tokenizer's. Knows no
template. Immutable once built; any thread.

    client text   a <|im_end|> b <|im        escape after the first character of each spelling,
    escaped       a <E|im_end|> b <E|im      also of one that ends or begins outside the text
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from ds4grpc.errors import ModelError
from ds4grpc.tokenizer import ESCAPE

VERSION: Final = 1
"""Part of every renderer digest: another rule makes other keys."""


class Escaper:
    """Breaks all occurrences of `spellings` in client text; `tokenizer.unescape` undoes it.

    A spelling that the text only begins or only ends is broken as well, since a template may put
    the missing part next to it: `<` + a parameter's name + `>`. What stays possible: a template
    that cuts a client's text apart, or changes its letters, may spell what nobody wrote.

    Raises ModelError: a spelling of one character has no inside where it could be broken.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        distinct = sorted(set(spellings))
        for spelling in distinct:
            if len(spelling) < 2:
                raise ModelError(
                    f"token spelling {spelling!r} cannot be told from text; "
                    "control tokens need at least two characters"
                )
        # A break after the first character of every occurrence leaves none: an occurrence in the
        # result would hold no escape, so it would stand at a place that was broken.
        self._inside = re.compile(_occurrences(distinct))
        self._anywhere = re.compile(_occurrences(distinct, partial_at_end=True))
        self._front = re.compile(_remainders(distinct))
        self._longest = max(map(len, distinct), default=0)
        self._beginnings = frozenset(s[:end] for s in distinct for end in range(1, len(s)))

    def escape(self, text: str) -> str:
        """One client string in escaped form, safe next to any other text."""
        text = self._anywhere.sub(rf"\g<0>{ESCAPE}", text.replace(ESCAPE, ESCAPE * 2))
        return ESCAPE + text if self._front.match(text) else text

    def escape_inside(self, text: str) -> str:
        """Like `escape`, but only whole spellings are broken: for text that stands alone."""
        return self._inside.sub(rf"\g<0>{ESCAPE}", text.replace(ESCAPE, ESCAPE * 2))

    def leaves_open(self, text: str) -> bool:
        """Whether escaped `text` ends with the beginning of a spelling, so that what follows it
        could complete a control token or marker across its end."""
        return any(text[-length:] in self._beginnings for length in range(1, self._longest))

    def escape_json(self, value: Any) -> Any:
        """A parsed JSON value with every string in it escaped, names of members included."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, list):
            return [self.escape_json(item) for item in value]
        if isinstance(value, dict):
            return {self.escape(name): self.escape_json(item) for name, item in value.items()}
        return value


def one_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `spellings`, the longest that fits."""
    longest_first = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _occurrences(spellings: list[str], *, partial_at_end: bool = False) -> str:
    """Matches the first character of each occurrence, overlapping ones included.

    Grouped by that character, so that the scan between occurrences is the engine's fast one.
    """
    rests: dict[str, list[str]] = {}
    for spelling in spellings:
        rests.setdefault(spelling[0], []).append(spelling[1:])
    branches = []
    for first, tails in rests.items():
        ahead = _trie(tails, stop_at_end=partial_at_end)
        branches.append(f"{re.escape(first)}(?={ahead})")
    return "|".join(branches) or "(?!)"


def _trie(tails: list[str], *, stop_at_end: bool) -> str:
    """A pattern for any of `tails`; with `stop_at_end` also for their beginnings at text's end."""
    branches: dict[str, list[str]] = {}
    for tail in tails:
        if not tail:
            return ""
        branches.setdefault(tail[0], []).append(tail[1:])
    # A chain without forks needs no recursion; spellings are short, forks few.
    parts = [
        re.escape(first) + _trie(rest, stop_at_end=stop_at_end) for first, rest in branches.items()
    ]
    if stop_at_end:
        parts.append(r"\Z")
    return f"(?:{'|'.join(parts)})"


def _remainders(spellings: list[str]) -> str:
    """Matches at the start of a text that completes a spelling whose punctuation came before.

    Only the leading characters that are no letters or digits may be missing: `|im_end|>`,
    `im_end|>`, and also `im_end` alone, when only punctuation is left to follow.
    """
    found: set[str] = set()
    for spelling in spellings:
        for start in range(1, len(spelling)):
            if spelling[start - 1].isalnum():
                break
            rest = spelling[start:]
            word = re.match(r".*\w", rest, re.DOTALL)
            core = word.group() if word else rest[:1]
            # Anything between the core and the whole rest may end the text.
            tail = "".join(f"(?:{re.escape(c)}" for c in rest[len(core) :])
            tail += r"|\Z)" * (len(rest) - len(core))
            found.add(re.escape(core) + tail)
    return "|".join(sorted(found)) or "(?!)"
