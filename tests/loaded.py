"""Models loaded once a test run, and slots for them.

Cached functions and not fixtures, so that parametrized and property tests can use them too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from sources import smollm2_file

from ds4grpc.model.checkpoint import Checkpoint, load_model, open_checkpoint
from ds4grpc.model.interface import State
from ds4grpc.model.llama import Llama


@cache
def smollm2_checkpoint() -> Checkpoint:
    return open_checkpoint(smollm2_file())


@cache
def smollm2() -> Llama:
    """SmolLM2 in float32 on the CPU."""
    return load_float32(smollm2_checkpoint().path)


def load_float32(path: Path) -> Llama:
    checkpoint = open_checkpoint(path)
    return load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32)


def new_state(model: Llama, num_tokens: int) -> State:
    """A slot's state with room for `num_tokens`, filled with NaN: rows not written show."""
    return model.bind(
        [
            torch.full((num_tokens, rows.row_bytes), 0xFF, dtype=torch.uint8)
            for rows in model.layout.rows
        ]
    )
