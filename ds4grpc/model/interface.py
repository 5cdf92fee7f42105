"""What the engine needs of any model: chunks of tokens in, logits out, state in borrowed planes.

Protocols and plain values. Knows no architecture, no file and no slot; the engine thread runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds4grpc.layout import StateLayout


@dataclass(frozen=True, slots=True)
class State:
    """One slot's memory as a model sees it: `rows[i]` views `layout.rows[i]`, first axis rows."""

    rows: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Chunk:
    """Tokens of one sequence at positions [start, start + len(ids)), at least one.

    Rows [0, start) of `state` are committed (of window arrays: the last window of them); forward
    writes the rows of these tokens. A state appears at most once in a call.
    """

    ids: list[int]
    start: int
    state: State
    want_logits: bool


class Model(Protocol):
    """A loaded model. One thread at a time."""

    @property
    def layout(self) -> StateLayout: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def numeric_mode(self) -> str:
        """Names the arithmetic for the fingerprint and for people: `float32`, `bfloat16`."""
        ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def max_context(self) -> int:
        """The most tokens of one sequence; a chunk must end at or before it."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...

    def bind(self, planes: Sequence[torch.Tensor]) -> State:
        """A slot's memory as a state; once a slot.

        `planes[i]`: uint8 (max_rows, row_bytes) for `layout.rows[i]`, on the model's device.
        """
        ...

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Runs all chunks as one batch and writes their rows.

        Returns float32 (C, V): for each chunk that wants logits, in order, those after its last
        token.
        """
        ...
