"""The tiny model for all engine tests; a blocking call in the event loop fails its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from blockbuster import BlockBuster, blockbuster_ctx
from inprocess import TinyModel
from tiny import write_tiny

from ds4grpc.chat.prompts import Prompts
from ds4grpc.model.checkpoint import load_model, open_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    checkpoint = open_checkpoint(write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))
    model = load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    return TinyModel(checkpoint, model, Prompts(checkpoint.tokenizer, checkpoint.chat_template))


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    with blockbuster_ctx("ds4grpc") as blockbuster:
        yield blockbuster
