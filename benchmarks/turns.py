"""`make bench`: what turns cost, on a server of its own with default settings.

Three thinking turns of a long preamble. Prints the table of `ds4grpc bench turns`, and last one
JSON object, which `--record` appends to benchmarks/results/ with date, commit and machine.

    python benchmarks/turns.py [--preamble TOKENS] [--record]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LEAST_SPEEDUP = 30.0


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A server with default settings on ports of its own; yields its address."""
    command = [sys.executable, "-m", "ds4grpc", "serve", "--kv-disk-dir", str(folder)]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            if line.startswith("ready"):
                break
        else:
            raise SystemExit("the server did not start; run `ds4grpc serve` to see why")
        yield line.split("grpc ")[1].split()[0]
    finally:
        process.terminate()
        process.wait(120)


def turns(address: str, *options: str) -> dict[str, Any]:
    """Runs the suite and shows its table; returns its facts."""
    command = [sys.executable, "-m", "ds4grpc", "bench", "turns", "--server", address, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *table, facts = done.stdout.splitlines()
    sys.stdout.write("\n".join(table) + "\n")
    found: dict[str, Any] = json.loads(facts)
    return found


def machine() -> str:
    """The class of machine: processor, cores, system."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description="What turns cost, on a server of its own.")
    parser.add_argument("--preamble", type=int, default=6000, help="tokens (default 6000)")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as address:
        facts = turns(address, "--preamble", str(asked.preamble))
    facts |= {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "command": f"make bench ARGS='--preamble {asked.preamble}'",
    }
    speedup = facts["first_token_speedup"]
    verdict = "reached" if speedup >= LEAST_SPEEDUP else "NOT reached"
    sys.stdout.write(
        f"first token of turn 2: {speedup:.1f} times sooner than of turn 1"
        f" (at least {LEAST_SPEEDUP:.0f}: {verdict})\n"
    )
    text = json.dumps(facts)
    if asked.record:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / "turns.jsonl").open("a") as file:
            file.write(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
