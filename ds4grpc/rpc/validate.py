"""Checks of request fields that several services share; each raises InvalidRequest.

Messages name the field's proto path, the value seen, the limit and what to do. Pure functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sized

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from ds4grpc.errors import InvalidRequest

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def in_range(field: str, value: float, low: float, high: float) -> None:
    """Refuses a number outside [low, high], and NaN."""
    if not low <= value <= high:
        raise InvalidRequest(
            f"{field} is {_spelled(value)}; send a number from {_spelled(low)} to {_spelled(high)}",
            field=field,
            reason="OUT_OF_RANGE",
            metadata={"value": _spelled(value), "low": _spelled(low), "high": _spelled(high)},
        )


def _spelled(value: float) -> str:
    """Whole numbers with all their digits: an id is 1000000, not 1e+06."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def known_enum(field: str, value: int, enum: EnumTypeWrapper) -> None:
    """Refuses a number that the enum does not name; proto3 lets such numbers through."""
    if value not in enum.values():
        raise InvalidRequest(
            f"{field} is {value}, which {enum.DESCRIPTOR.name} does not have; send one of"
            f" {', '.join(enum.keys())}",
            field=field,
            reason="UNKNOWN_ENUM_VALUE",
            metadata={"value": str(value)},
        )


def at_most(field: str, items: Sized, limit: int, unit: str) -> None:
    """Refuses more than `limit` items; `unit` is their plural, such as `messages`."""
    if len(items) > limit:
        raise InvalidRequest(
            f"{field} has {len(items):,} {unit}; the limit is {limit:,}",
            field=field,
            reason="TOO_LONG",
            metadata={"value": str(len(items)), "limit": str(limit)},
        )


def positive_seconds(field: str, duration: Duration) -> float:
    """The duration in seconds. Refuses zero, negative and malformed ones."""
    seconds = duration.seconds + duration.nanos / 1e9
    if not (math.isfinite(seconds) and seconds > 0 and 0 <= duration.nanos < 10**9):
        raise InvalidRequest(
            f"{field} is {seconds:g} s; send a duration above 0, or leave it out",
            field=field,
            reason="OUT_OF_RANGE",
            metadata={"value": f"{seconds:g}", "low": "0"},
        )
    return seconds


def request_id(field: str, value: str) -> None:
    """Refuses an id that is not 1 to 128 characters of [A-Za-z0-9._-]."""
    if REQUEST_ID.fullmatch(value) is None:
        raise InvalidRequest(
            f"{field} has {len(value):,} characters; send 1 to 128 of A-Z a-z 0-9 . _ -",
            field=field,
            reason="MALFORMED_ID",
            metadata={"value": str(len(value)), "limit": "128"},
        )
