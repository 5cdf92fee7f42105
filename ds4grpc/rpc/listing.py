"""Filters, orders and pages of bank lists. Pure functions over values; raises InvalidRequest.

A page begins after the last row of the one before, wherever that would stand now, and not at a
number of rows: banks that come and go meanwhile shift nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from ds4grpc.bank import Trust
from ds4grpc.errors import InvalidRequest
from ds4grpc.rpc import validate

LOCATIONS = ("resident", "stored", "both")
NUMBERS = ("frontier", "size_bytes", "hits", "base")
TIMES = ("create_time", "last_use_time")
AGES = {"age": "create_time", "idle": "last_use_time"}  # how long ago that was
ORDERS = ("last_use_time", "create_time", "frontier", "size_bytes", "hits", "bank_id")
DEFAULT_PAGE, MAX_PAGE = 100, 1000
MAX_FILTER_CHARACTERS = 1024
MAX_TOKEN_CHARACTERS = 256

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TERM = re.compile(r'([a-z_]+)\s*(=|!=|<=|>=|<|>)\s*("[^"]*"|[A-Za-z0-9_.:+-]+)')
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CHECK_BYTES = 8


@dataclass(frozen=True, slots=True)
class Row:
    """What lists look at. Times are Unix seconds."""

    bank_id: str
    location: str  # one of LOCATIONS
    frontier: int
    base: int
    size_bytes: int
    hits: int
    pinned: bool
    trust: Trust
    create_time: float
    last_use_time: float


Term = Callable[[Row], bool]


@dataclass(frozen=True, slots=True)
class Query:
    """Which rows in which order; rows of equal rank by id."""

    terms: tuple[Term, ...]
    name: str  # one of ORDERS
    descending: bool
    text: bytes  # filter and order as sent: a page of another query is none of this one

    def rank(self, row: Row) -> float | str:
        value: float | str = getattr(row, self.name)
        return value


@dataclass(frozen=True, slots=True)
class Page:
    """`next_page_token` is "" on the last page; `total_size` counts the rows of all pages."""

    rows: list[Row]
    next_page_token: str
    total_size: int


def parse(terms: str, order_by: str, now: float) -> Query:
    """`terms` such as `frontier >= 1000` joined by AND; `order_by` is `name` or `name desc`.
    `now` is what ages count back from, in Unix seconds."""
    validate.at_most("filter", terms, MAX_FILTER_CHARACTERS, "characters")
    name, _, direction = (order_by.strip() or "last_use_time desc").partition(" ")
    direction = direction.strip()
    if name not in ORDERS or direction not in ("", "asc", "desc"):
        raise _wrong("order_by", order_by, f"one of {', '.join(ORDERS)}, then asc or desc")
    parts = re.split(r"\s+AND\s+", terms.strip()) if terms.strip() else []
    text = "\0".join((*parts, name, direction)).encode()
    chosen = tuple(_term(part.strip(), now) for part in parts)
    return Query(chosen, name, direction == "desc", text)


def page(rows: Iterable[Row], query: Query, page_size: int, page_token: str) -> Page:
    """The rows of a query that follow those of the page before."""
    validate.in_range("page_size", page_size, 0, MAX_PAGE)
    size = page_size or DEFAULT_PAGE
    found = [row for row in rows if all(term(row) for term in query.terms)]
    total = len(found)
    if page_token:
        found = _after(found, query, *_decoded(page_token, query))
    found.sort(key=lambda row: row.bank_id)
    found.sort(key=query.rank, reverse=query.descending)
    shown = found[:size]
    return Page(shown, _encoded(shown[-1], query) if len(found) > size else "", total)


def _after(rows: Iterable[Row], query: Query, last: float | str, bank_id: str) -> list[Row]:
    """The rows that stand behind a place in the order."""
    before = operator.gt if query.descending else operator.lt
    return [
        row
        for row in rows
        if before(last, query.rank(row)) or (query.rank(row) == last and row.bank_id > bank_id)
    ]


def _encoded(row: Row, query: Query) -> str:
    place = json.dumps([query.rank(row), row.bank_id]).encode()
    return base64.urlsafe_b64encode(_check(place, query) + place).decode().rstrip("=")


def _decoded(page_token: str, query: Query) -> tuple[float | str, str]:
    """(rank, bank id) of the last row of the page before. The check sees to it that a token of
    another query, or a damaged one, never passes for a place in this one."""
    validate.at_most("page_token", page_token, MAX_TOKEN_CHARACTERS, "characters")
    try:
        data = base64.urlsafe_b64decode(page_token + "=" * (-len(page_token) % 4))
    except (binascii.Error, ValueError):
        data = b""
    check, place = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
    if not place or check != _check(place, query):
        wanted = "the next_page_token of the answer before, with the same filter and order_by"
        raise _wrong("page_token", page_token[:64], wanted)
    last, bank_id = json.loads(place)
    return last, bank_id


def _check(place: bytes, query: Query) -> bytes:
    return hashlib.blake2b(place, key=hashlib.sha256(query.text).digest()).digest()[:_CHECK_BYTES]


def _term(text: str, now: float) -> Term:
    found = _TERM.fullmatch(text)
    if found is None:
        raise _wrong("filter", text, "a term like `frontier >= 1000`; join terms with AND")
    name, sign, value = found.groups()
    value = value.strip('"')
    if name in NUMBERS:
        if not value.isdecimal():
            raise _wrong("filter", text, "a whole number")
        return _compared(name, sign, int(value))
    if name in TIMES:
        return _compared(name, sign, _unix_seconds(text, name, value))
    if name in AGES:
        field, compare, age = AGES[name], _COMPARE[sign], _age_seconds(text, value)
        return lambda row: compare(now - getattr(row, field), age)
    if sign not in ("=", "!="):
        raise _wrong("filter", text, f"= or != with {name}")
    wanted = sign == "="
    if name == "location" and value in LOCATIONS[:2]:
        return lambda row: (row.location in (value, "both")) is wanted
    if name == "location" and value == "both":
        return lambda row: (row.location == "both") is wanted
    if name == "pinned" and value in ("true", "false"):
        return lambda row: (row.pinned is (value == "true")) is wanted
    if name == "trust" and value.upper() in Trust.__members__:
        flag = Trust[value.upper()]
        return lambda row: (flag in row.trust) is wanted
    raise _wrong(
        "filter",
        text,
        "location (resident, stored, both), pinned (true, false), trust"
        f" ({', '.join(t.lower() for t in Trust.__members__)}) or"
        f" {', '.join((*NUMBERS, *TIMES, *AGES))}",
    )


def _compared(name: str, sign: str, limit: float) -> Term:
    compare = _COMPARE[sign]
    return lambda row: compare(getattr(row, name), limit)


def _unix_seconds(term: str, name: str, value: str) -> float:
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        age = next(age for age, field in AGES.items() if field == name)
        wanted = f'a time like {name} < "2026-12-01T08:00:00Z"; for how long ago, `{age} > 2h`'
        raise _wrong("filter", term, wanted)
    return at.timestamp()


def _age_seconds(term: str, value: str) -> float:
    found = _DURATION.fullmatch(value)
    if found is None:
        raise _wrong("filter", term, "a duration such as 90s, 30m, 2h or 7d")
    return float(found[1]) * _SECONDS[found[2]]


def _wrong(field: str, value: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field} {value!r} is not understood; send {wanted}", field=field, reason="NOT_UNDERSTOOD"
    )
