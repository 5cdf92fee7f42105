"""The reader of bank files against damaged and lying files: see tests/fuzz_reader.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LONG = bool(os.environ.get("DS4GRPC_LONG"))
FUZZER = Path(__file__).parents[1] / "fuzz_reader.py"


@pytest.mark.slow
@pytest.mark.timeout(1800 if LONG else 120)
def test_reader_refuses_or_reads_whatever_it_is_given(measured: Callable[[str], None]) -> None:
    """In a process of its own: coverage has to see the reader's modules being imported."""
    num_inputs = 1_000_000 if LONG else 4_000
    command = [sys.executable, str(FUZZER), "--inputs", str(num_inputs)]
    if not LONG:
        command += ["--seed", "1", "--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        measured(line)
    assert done.returncode == 0, done.stdout + done.stderr
