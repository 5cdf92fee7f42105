"""SmolLM2's forward pass: chunks, batches and dtypes agree with one plain pass."""

from __future__ import annotations

import random

import pytest
import torch
from loaded import new_state, smollm2, smollm2_checkpoint

from ds4grpc.model.checkpoint import load_model
from ds4grpc.model.interface import Chunk, State
from ds4grpc.model.llama import Llama

TOLERANCE = 1e-3  # measured: 7e-5
TEXT = "The engine keeps its banks on disk, and a later turn pays only for its new tokens. " * 5


def ids_of(num_tokens: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(17, 49152) for _ in range(num_tokens)]


def prefill(model: Llama, ids: list[int], chunk_tokens: int) -> tuple[State, torch.Tensor]:
    state = new_state(model, len(ids) + 24)
    logits = torch.empty(0)
    for start in range(0, len(ids), chunk_tokens):
        logits = model.forward([Chunk(ids[start : start + chunk_tokens], start, state, True)])
    return state, logits


@pytest.mark.parametrize("chunk_tokens", [1, 13, 64, 128])
def test_chunked_prefill_equals_one_pass(chunk_tokens: int) -> None:
    ids = ids_of(150) if chunk_tokens > 1 else ids_of(20)
    whole_state, whole = prefill(smollm2(), ids, len(ids))
    state, logits = prefill(smollm2(), ids, chunk_tokens)
    assert (logits - whole).abs().max() < TOLERANCE
    for ours, theirs in zip(state.rows, whole_state.rows, strict=True):
        assert (ours[: len(ids)] - theirs[: len(ids)]).abs().max() < TOLERANCE


def test_batch_of_unequal_slots_equals_each_alone() -> None:
    model = smollm2()
    prompts = [ids_of(n, seed=n) for n in (1, 5, 33, 80)]
    alone = []
    for ids in prompts:
        state, _ = prefill(model, ids, 64)
        alone.append(model.forward([Chunk([100], len(ids), state, True)])[0])

    # Three slots decode while the fourth prefills its last 20 tokens and a fifth only prefills.
    states = [prefill(model, ids, 64)[0] for ids in prompts[:3]]
    late, _ = prefill(model, prompts[3][:60], 64)
    quiet = new_state(model, 40)
    chunks = [
        Chunk([100], len(ids), state, True) for ids, state in zip(prompts, states, strict=False)
    ]
    logits = model.forward(
        [
            chunks[0],
            Chunk(ids_of(30), 0, quiet, False),
            *chunks[1:],
            Chunk(prompts[3][60:], 60, late, True),
        ]
    )
    assert logits.shape == (4, model.vocabulary_size)
    for row, wanted in zip(logits[:3], alone, strict=False):
        assert (row - wanted).abs().max() < TOLERANCE
    assert (logits[3] - prefill(model, prompts[3], 64)[1][0]).abs().max() < TOLERANCE
    quiet_alone, _ = prefill(model, ids_of(30), 64)
    for ours, theirs in zip(quiet.rows, quiet_alone.rows, strict=True):
        assert (ours[:30] - theirs[:30]).abs().max() < TOLERANCE


def test_equal_calls_give_equal_bits() -> None:
    ids = ids_of(40)
    first_state, first = prefill(smollm2(), ids, 16)
    second_state, second = prefill(smollm2(), ids, 16)
    assert torch.equal(first, second)
    assert all(
        torch.equal(a[:40], b[:40])
        for a, b in zip(first_state.rows, second_state.rows, strict=True)
    )


def test_no_wanted_logits_gives_an_empty_answer() -> None:
    logits = smollm2().forward([Chunk([5, 6], 0, new_state(smollm2(), 2), False)])
    assert logits.shape == (0, smollm2().vocabulary_size)


def test_bfloat16_stays_near_float32() -> None:
    model = load_model(smollm2_checkpoint(), device=torch.device("cpu"), dtype=torch.bfloat16)
    assert model.layout.layout_id != smollm2().layout.layout_id
    assert model.layout.bytes_per_token * 2 == smollm2().layout.bytes_per_token
    ids = smollm2_checkpoint().tokenizer.encode(TEXT)[:60]
    exact = prefill(smollm2(), ids, 64)[1].log_softmax(-1)
    rounded = prefill(model, ids, 64)[1].log_softmax(-1)
    assert rounded.dtype == torch.float32
    divergence = (exact.exp() * (exact - rounded)).sum()
    assert divergence < 5e-3


def test_weights_are_counted_once_where_output_and_embedding_share() -> None:
    model = smollm2()
    assert model.num_parameters == 134_515_008
    assert model.weight_bytes == 4 * model.num_parameters
