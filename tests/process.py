"""A real `ds4grpc serve` process for tests: started, asked, stopped, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

READY = re.compile(r"ready in ([\d.]+) s \| grpc (\S+)(?: \| admin (\S+))? \| metrics (\S+)")
START_SECONDS = 60.0
STOP_SECONDS = 60.0


def num_threads() -> int:
    """CPU threads that one test process, or one server of it, computes with."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, len(os.sched_getaffinity(0)) // workers)


def metrics_of(url: str) -> dict[str, float]:
    """What a metrics page holds: samples by their text form."""
    with urllib.request.urlopen(url, timeout=10) as page:
        text = page.read().decode()
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name] = float(value)
    return samples


class ServerProcess:
    """One server on ports of its own. `log` holds what it wrote to stderr so far."""

    def __init__(self, folder: Path, *options: str, model: str = "smollm2", **env: str) -> None:
        """Starts the server and waits until it says that it is ready."""
        command = [
            *(sys.executable, "-m", "ds4grpc", "serve", "--model", model),
            *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
            *("--threads", str(num_threads())),
            *(() if "--no-kv-disk" in options else ("--kv-disk-dir", str(folder))),
            # On some machines the default is bfloat16, in which warm need not equal cold.
            *(() if "--dtype" in options else ("--dtype", "float32")),
            *options,
        ]
        self.folder = folder
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**_environment(), **env},
        )
        self._lines: list[str] = []
        self.ready_line = ""
        self._ready = threading.Event()
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        if not self._ready.wait(START_SECONDS) or not self.ready_line:
            self.kill()
            raise RuntimeError(f"the server did not get ready:\n{self.log}")
        found = READY.search(self.ready_line)
        assert found is not None, self.ready_line
        self.ready_seconds = float(found[1])
        self.target = found[2]
        self.metrics_url = found[4]

    @property
    def log(self) -> str:
        return "".join(self._lines)

    @property
    def pid(self) -> int:
        return self.process.pid

    def metrics(self) -> dict[str, float]:
        """Samples by their text form, such as `ds4grpc_slots{state="free"}`."""
        return metrics_of(self.metrics_url)

    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"the server did not stop:\n{self.log}") from None

    def wait(self) -> int:
        """Waits for a process that was told to end; returns its exit code."""
        code = self.process.wait(STOP_SECONDS)
        self._join()
        return code

    def kill(self) -> None:
        """SIGKILL: nothing is stored any more."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(10)
        self._join()

    async def until_generating(self) -> None:
        """Returns when the first token of this server's life has been sampled."""
        for _ in range(1000):
            if self.metrics()["ds4grpc_generated_tokens_total"]:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("nothing is generated")

    def wait_for_log(self, pattern: str, seconds: float = 10.0) -> str:
        """The first log line that matches, as soon as there is one."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in list(self._lines):
                if re.search(pattern, line):
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no log line matches {pattern!r} in:\n{self.log[-4000:]}")

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready"):
                self.ready_line = line.strip()
                self._ready.set()
        self._ready.set()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _environment() -> dict[str, str]:
    """This process's, without the variables of our own: `serve` refuses those it does not know."""
    return {k: v for k, v in os.environ.items() if not k.startswith("DS4GRPC_")}


@contextlib.contextmanager
def server(
    folder: Path, *options: str, model: str = "smollm2", **env: str
) -> Iterator[ServerProcess]:
    """A server for one block; killed if it is still there at the end."""
    started = ServerProcess(folder, *options, model=model, **env)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()
