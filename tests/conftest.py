"""What all tests share: the default model's file, running servers, and how tests run together.

`make test` runs in several processes. A test that measures time or memory is marked `alone`:
nothing else runs beside it.
"""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from process import ServerProcess, num_threads, server

from ds4grpc.model import registry

torch.set_num_threads(num_threads())

# The same for every worker, and for every other run of this user.
_LOCKS = Path(tempfile.gettempdir()) / f"ds4grpc-tests-{os.getuid()}"
_MEASURED = "measured"


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Waits for its turn before any time-out of the test begins to count."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with _room(exclusive=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def _room(*, exclusive: bool) -> Iterator[None]:
    """A readers-writer lock over processes; the turnstile keeps readers from starving a writer."""
    _LOCKS.mkdir(exist_ok=True)
    with ExitStack() as stack:
        room = stack.enter_context((_LOCKS / "room").open("w"))
        with (_LOCKS / "turnstile").open("w") as turnstile:
            fcntl.flock(turnstile, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_channel_is_left() -> Iterator[None]:
    """gRPC ends with its last channel, and waits for that: were it collected some time later, it
    would block the event loop of a test that knows nothing of it."""
    yield
    gc.collect()


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a line of figures that the run prints at its end."""
    return lambda line: request.node.user_properties.append((_MEASURED, line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {line}"
        for report in reports
        if report.when == "call"
        for name, line in report.user_properties
        if name == _MEASURED
    ]
    if lines:
        terminalreporter.section(_MEASURED)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2's file, fetched on first use as `ds4grpc serve` would."""
    return registry.pull("smollm2", lambda done, total: None)


@pytest.fixture(scope="session")
def smollm2_server(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server for tests that only talk to one; whatever they leave in it stays."""
    with server(tmp_path_factory.mktemp("shared")) as running:
        yield running


@pytest.fixture(scope="session")
def cold_server(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The second process: an empty folder, asked with cache.bypass only, in float32."""
    folder = tmp_path_factory.mktemp("cold")
    with server(folder, "--slots", "2", "--dtype", "float32") as running:
        yield running
        assert not list(folder.glob("*/??/*.bank")), "the cold server kept something"
