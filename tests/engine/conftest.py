"""The tiny model for all engine tests; a blocking call in the event loop fails its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from inprocess import TinyModel
from loaded import load_float32
from tiny import write_tiny

from ds4grpc.chat.prompts import Prompts
from ds4grpc.model.checkpoint import open_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    checkpoint = open_checkpoint(path)
    prompts = Prompts(checkpoint.tokenizer, checkpoint.chat_template)
    return TinyModel(checkpoint, load_float32(path), prompts)


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    with blockbuster_ctx("ds4grpc") as blockbuster:
        yield blockbuster
