"""Fixtures that several areas share: the default model's file, and running servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process import ServerProcess, server

from ds4grpc.model import registry


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
