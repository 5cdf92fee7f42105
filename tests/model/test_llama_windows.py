"""The tiny sliding-window model against a naive float64 reference, and its state's contract."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from loaded import load_float32, new_state
from naive_llama import naive_logits
from tiny import TinyShape, write_tiny

from ds4grpc.model.gguf import read_gguf
from ds4grpc.model.interface import Chunk
from ds4grpc.model.llama import Llama

TOLERANCE = 1e-3  # of logits with a deviation of 20
IDS = random.Random(7).choices(range(17, 49152), k=150)  # nine windows

SHAPES = {
    "windows": TinyShape(),
    "plain": TinyShape(window=0),
    "tied": TinyShape(tied=True),
    "one_kv_head": TinyShape(num_kv_heads=1),
    "no_groups": TinyShape(num_kv_heads=4),
    "wide_heads": TinyShape(head_dim=32, rope_dim=32),
    "partly_rotated": TinyShape(rope_dim=8),
    "linear_scaling": TinyShape(rope_scale=4.0),
    "frequency_factors": TinyShape(rope_factors=True, rope_base=500000.0),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return load_float32(write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def all_logits(model: Llama, ids: list[int], chunk_tokens: int) -> torch.Tensor:
    """Logits after the last token of each chunk."""
    state = new_state(model, len(ids))
    rows = [
        model.forward([Chunk(ids[at : at + chunk_tokens], at, state, True)])
        for at in range(0, len(ids), chunk_tokens)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("name", SHAPES)
def test_every_position_equals_the_naive_reference(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", SHAPES[name])
    ids = IDS if name == "windows" else IDS[:50]
    wanted = naive_logits(read_gguf(path), ids)
    assert (all_logits(load_float32(path), ids, 1) - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("chunk_tokens", [2, 7, 15, 16, 17, 40, 129, 150])
def test_chunks_of_any_size_equal_one_by_one(tiny: Llama, chunk_tokens: int) -> None:
    one_by_one = all_logits(tiny, IDS, 1)
    ends = [min(at + chunk_tokens, len(IDS)) - 1 for at in range(0, len(IDS), chunk_tokens)]
    assert (all_logits(tiny, IDS, chunk_tokens) - one_by_one[ends]).abs().max() < TOLERANCE


def test_layout_marks_the_window_of_sliding_layers(tiny: Llama) -> None:
    windows = {rows.name: rows.window for rows in tiny.layout.rows}
    assert windows == {
        **dict.fromkeys(["k.0", "v.0", "k.1", "v.1", "k.3", "v.3"], 16),
        **dict.fromkeys(["k.2", "v.2"], 0),
    }
    assert all(rows.row_bytes == 2 * 16 * 4 for rows in tiny.layout.rows)
    assert tiny.layout.layout_id == "llama-4x2x16-float32-window16.16.0.16"


@pytest.mark.parametrize("position", [1, 15, 16, 17, 100])
def test_resume_needs_only_the_rows_that_the_layout_names(tiny: Llama, position: int) -> None:
    whole = new_state(tiny, len(IDS))
    wanted = tiny.forward([Chunk(IDS, 0, whole, True)])
    resumed = new_state(tiny, len(IDS))  # NaN wherever nothing is copied
    for rows, source, target in zip(tiny.layout.rows, whole.rows, resumed.rows, strict=True):
        first = max(0, position - rows.window) if rows.window else 0
        target[first:position] = source[first:position]
    logits = tiny.forward([Chunk(IDS[position:], position, resumed, True)])
    assert (logits - wanted).abs().max() < TOLERANCE
    for token in range(position, len(IDS)):
        for source, target in zip(whole.rows, resumed.rows, strict=True):
            assert (source[token] - target[token]).abs().max() < TOLERANCE


def test_greedy_text_is_varied(tiny: Llama) -> None:
    state = new_state(tiny, 220)
    logits = tiny.forward([Chunk(IDS[:20], 0, state, True)])
    sampled: list[int] = []
    for position in range(20, 220):
        sampled.append(int(logits[0].argmax()))
        logits = tiny.forward([Chunk(sampled[-1:], position, state, True)])
    assert len(set(sampled)) > 150
