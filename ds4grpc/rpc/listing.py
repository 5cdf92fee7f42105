"""Filters, orders and pages of bank lists. Pure functions over values; raises InvalidRequest."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds4grpc.bank import Trust
from ds4grpc.errors import InvalidRequest
from ds4grpc.rpc import validate

LOCATIONS = ("resident", "stored", "both")
NUMBERS = ("frontier", "size_bytes", "hits", "base")
ORDERS = ("last_use_time", "create_time", "frontier", "size_bytes", "hits", "bank_id")
DEFAULT_PAGE, MAX_PAGE = 100, 1000

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TERM = re.compile(r"([a-z_]+)\s*(=|!=|<=|>=|<|>)\s*([A-Za-z0-9_.]+)")
MAX_FILTER_CHARACTERS = 1024


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


def matches(row: Row, terms: Sequence[Callable[[Row], bool]]) -> bool:
    return all(term(row) for term in terms)


def parse_filter(text: str) -> list[Callable[[Row], bool]]:
    """Terms such as `frontier >= 1000` joined by AND."""
    validate.at_most("filter", text, MAX_FILTER_CHARACTERS, "characters")
    if not text.strip():
        return []
    return [_term(part.strip()) for part in re.split(r"\s+AND\s+", text.strip())]


def _term(text: str) -> Callable[[Row], bool]:
    found = _TERM.fullmatch(text)
    if found is None:
        raise _wrong("filter", text, "a term like `frontier >= 1000`; join terms with AND")
    name, sign, value = found.groups()
    if name in NUMBERS:
        if not value.isdigit():
            raise _wrong("filter", text, "a whole number")
        compare, limit = _COMPARE[sign], int(value)
        return lambda row: compare(getattr(row, name), limit)
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
        f" ({', '.join(t.lower() for t in Trust.__members__)}) or {', '.join(NUMBERS)}",
    )


def ordered(rows: Sequence[Row], order_by: str) -> list[Row]:
    """`name` or `name desc`; banks of equal rank by id."""
    name, _, direction = (order_by.strip() or "last_use_time desc").partition(" ")
    direction = direction.strip()
    if name not in ORDERS or direction not in ("", "asc", "desc"):
        raise _wrong("order_by", order_by, f"one of {', '.join(ORDERS)}, then asc or desc")
    by_id = sorted(rows, key=lambda row: row.bank_id)
    return sorted(by_id, key=lambda row: getattr(row, name), reverse=direction == "desc")


def page(rows: Sequence[Row], page_size: int, page_token: str) -> tuple[Sequence[Row], str]:
    """One page, and the token of the next ("" when there is none)."""
    validate.in_range("page_size", page_size, 0, MAX_PAGE)
    size = page_size or DEFAULT_PAGE
    if page_token and re.fullmatch(r"[0-9]{1,9}", page_token) is None:
        raise _wrong("page_token", page_token[:64], "the next_page_token of the answer before")
    start = int(page_token or 0)
    after = start + size
    return rows[start:after], str(after) if after < len(rows) else ""


def _wrong(field: str, value: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field} {value!r} is not understood; send {wanted}", field=field, reason="NOT_UNDERSTOOD"
    )
