"""`serve --kv-disk-write-mb-per-s`: banks are written slowly, and nobody waits for that."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from client import connect
from process import server
from tiny import write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RATE_MB = 0.1
# As many bytes as take some seconds: 256 of plain rows a token, and a window.
PROMPT_TOKENS = 3000


async def test_bank_is_written_at_its_pace_and_holds_up_neither_replies_nor_a_stop(
    tmp_path: Path,
) -> None:
    model = str(write_tiny(tmp_path / "tiny.gguf"))
    options = ("--kv-cache-min-tokens", "16", "--kv-disk-write-mb-per-s", str(RATE_MB))
    ids = [1000 + number % 900 + number for number in range(PROMPT_TOKENS)]
    with server(tmp_path / "banks", *options, model=model) as running:
        async with connect(running.target) as client:
            began = time.monotonic()
            await client.tokens(ids, max_tokens=0)
            for seed in range(5):  # while it is written
                asked = time.monotonic()
                await client.tokens([seed + 5, *range(300, 340)], max_tokens=8)
                assert time.monotonic() - asked < 4.0
            assert "bank persisted" not in running.log
            line = running.wait_for_log("bank persisted", 30.0)
            seconds = time.monotonic() - began
            num_bytes = int(re.search(r"bytes=(\d+)", line)[1])  # type: ignore[index]
            # What is written last, a header of a few pages, is not waited for.
            assert (num_bytes - 16384) / seconds <= RATE_MB * 2**20
            # One that would take as long again, were the server not told to stop.
            await client.tokens(ids[::-1], max_tokens=0)
        stopping = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - stopping < 8.0
    with server(tmp_path / "banks", *options, model=model) as running:
        async with connect(running.target) as client:
            for again in (ids, ids[::-1]):
                reply = await client.tokens([*again, 7], max_tokens=4)
                assert reply.started.disk_tokens >= PROMPT_TOKENS - 64
        assert running.stop() == 0
