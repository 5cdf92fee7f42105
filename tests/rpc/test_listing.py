"""Filters, orders and pages of bank lists, over rows that come and go."""

import random
from datetime import UTC, datetime

import pytest

from ds4grpc.bank import Trust
from ds4grpc.errors import InvalidRequest
from ds4grpc.rpc.listing import ORDERS, Page, Row, page, parse

NOW = 1_800_000_000.0
ORDER_BYS = ["", *(f"{name}{way}" for name in ORDERS for way in ("", " desc"))]


def row(number: int, *, used: float = 0.0, **more: object) -> Row:
    facts: dict[str, object] = {
        **{"location": "stored", "frontier": 100 * (number % 7), "base": 0, "size_bytes": number},
        **{"hits": number % 3, "pinned": number % 2 == 0, "trust": Trust.COMMITTED},
        **{"create_time": NOW - 1000 - number % 11, "last_use_time": NOW - used - number % 5},
    }
    return Row(f"{number:032x}", **{**facts, **more})  # type: ignore[arg-type]


def ids(found: Page) -> list[int]:
    return [int(each.bank_id, 16) for each in found.rows]


@pytest.mark.parametrize("order_by", ORDER_BYS)
def test_pages_while_banks_come_and_go_skip_none_and_show_none_twice(order_by: str) -> None:
    draw = random.Random(order_by)
    rows = {number: row(number) for number in draw.sample(range(1000), 200)}
    stayed, token = set(rows), ""
    shown: list[int] = []
    while True:
        found = page(rows.values(), parse("", order_by, NOW), 9, token)
        assert found.total_size == len(rows)
        shown += ids(found)
        for number in draw.sample(sorted(rows), 3):  # also those just shown, and the last of them
            del rows[number]
            stayed.discard(number)
        for number in draw.sample(range(1000, 9999), 3):
            rows[number] = row(number)
        token = found.next_page_token
        if not token:
            break
    assert len(shown) == len(set(shown))
    assert stayed <= set(shown)


@pytest.mark.parametrize("order_by", ORDER_BYS)
def test_pages_one_after_the_other_are_the_whole_order(order_by: str) -> None:
    rows = [row(number) for number in range(50)]
    query = parse("", order_by, NOW)
    token, shown = "", list[Row]()
    while not shown or token:
        found = page(rows, query, 7, token)
        shown += found.rows
        token = found.next_page_token
    ranks = [query.rank(each) for each in shown]
    assert ranks == sorted(ranks, reverse=order_by.endswith("desc") or not order_by)
    assert sorted(each.bank_id for each in shown) == [each.bank_id for each in rows]


def test_page_token_of_another_query_or_a_damaged_one_is_refused() -> None:
    rows = [row(number) for number in range(10)]
    token = page(rows, parse("hits >= 0", "frontier", NOW), 4, "").next_page_token
    for terms, order_by in (("hits >= 1", "frontier"), ("hits >= 0", "frontier desc")):
        with pytest.raises(InvalidRequest, match="page_token"):
            page(rows, parse(terms, order_by, NOW), 4, token)
    query = parse("hits >= 0", "frontier", NOW)
    last = "A" if token[-1] != "A" else "Q"
    for wrong in ("4", "é", "=", token[:-1], token + "AAAA", token[:-1] + last, "A" * 400):
        with pytest.raises(InvalidRequest, match="page_token"):
            page(rows, query, 4, wrong)


@pytest.mark.parametrize(
    ("terms", "wanted"),
    [
        ("", [0, 1, 2, 3]),
        ("idle > 2h", [2, 3]),
        ("idle >= 90m AND idle < 1d", [1, 2]),
        ("age > 1000s", [1, 2, 3]),
        ("age > 0.5d", []),
        (f'last_use_time < "{datetime.fromtimestamp(NOW - 5000, UTC).isoformat()}"', [1, 2, 3]),
        (f"last_use_time >= {datetime.fromtimestamp(NOW - 5000, UTC):%Y-%m-%dT%H:%M:%SZ}", [0]),
        (f'create_time = "{datetime.fromtimestamp(NOW - 1002, UTC).isoformat()}"', [2]),
        ("pinned = true AND hits = 0", [0]),
        ("pinned != true", [1, 3]),
        ("size_bytes <= 1", [0, 1]),
        ("trust = committed", [0, 1, 2, 3]),
        ("trust = proven", []),
    ],
)
def test_filter_chooses(terms: str, wanted: list[int]) -> None:
    rows = [row(n, used=used) for n, used in enumerate((60, 5400, 10_000, 100_000))]
    assert ids(page(rows, parse(terms, "bank_id", NOW), 0, "")) == wanted


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ("last_use_time < 2h", "for how long ago, `idle > 2h`"),
        ("create_time > 2026-12-01", "for how long ago, `age > 2h`"),
        ("create_time > 2026-12-01T08:00:00", "create_time < "),
        ("idle > 2", "a duration such as"),
        ("idle > -2h", "a duration such as"),
        ("hits >= -1", "a whole number"),
        ("hits >= ²", "a term like"),
        ("pinned > true", "= or != with pinned"),
        ("color = red", "location (resident, stored, both)"),
        ("hits = 1 OR hits = 2", "join terms with AND"),
        ("hits = 1 AND", "join terms with AND"),
        ("x" * 1025, "the limit is 1,024"),
    ],
)
def test_filter_that_is_not_understood_says_what_is(terms: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(terms, "", NOW)
    assert says in refused.value.message


def test_unknown_order_and_page_size_are_refused() -> None:
    for order_by in ("color", "hits up", "desc"):
        with pytest.raises(InvalidRequest, match="order_by"):
            parse("", order_by, NOW)
    with pytest.raises(InvalidRequest, match="page_size"):
        page([], parse("", "", NOW), 1001, "")
