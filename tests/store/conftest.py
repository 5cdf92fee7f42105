"""A blocking call in the event loop fails the test that makes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    with blockbuster_ctx("ds4grpc") as blockbuster:
        yield blockbuster
