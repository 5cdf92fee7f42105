"""SmolLM2 in float32 against what transformers computes from the same file (tests/goldens)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from loaded import new_state, smollm2, smollm2_checkpoint

from ds4grpc.model.interface import Chunk, State

TOLERANCE = 1e-3
CHUNK_TOKENS = 512
TOKENS_PER_NEAR_TIE = 2000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Golden = dict[str, npt.NDArray[Any]]


@cache
def goldens() -> dict[str, Golden]:
    """Fields by prompt; see tests/goldens/make_logits.py."""
    prompts: dict[str, Golden] = {}
    with np.load(Path(__file__).parent.parent / "goldens" / "smollm2_logits.npz") as file:
        for key in file.files:
            prompt, _, field = key.rpartition(".")
            prompts.setdefault(prompt, {})[field] = file[key]
    return prompts


PROMPTS = sorted(goldens())


@cache
def prefilled(prompt: str) -> tuple[State, dict[int, torch.Tensor]]:
    """A slot that holds the prompt, and the logits after each golden position and the last."""
    golden = goldens()[prompt]
    ids = golden["ids"].tolist()
    stops = {*golden["at"].tolist(), len(ids) - 1, *range(CHUNK_TOKENS - 1, len(ids), CHUNK_TOKENS)}
    state = new_state(smollm2(), len(ids) + len(golden["greedy"]))
    logits: dict[int, torch.Tensor] = {}
    start = 0
    for stop in sorted(stops):
        logits[stop] = smollm2().forward([Chunk(ids[start : stop + 1], start, state, True)])[0]
        start = stop + 1
    return state, logits


def test_goldens_cover_at_least_ten_prompts() -> None:
    assert len(PROMPTS) >= 10
    assert max(len(golden["ids"]) for golden in goldens().values()) >= 2000


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_encodes_to_the_golden_ids(prompt: str) -> None:
    golden = goldens()[prompt]
    assert smollm2_checkpoint().tokenizer.encode(str(golden["text"])) == golden["ids"].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_equal_transformers(prompt: str) -> None:
    golden = goldens()[prompt]
    _, logits = prefilled(prompt)
    last = logits[len(golden["ids"]) - 1]
    assert (last - torch.from_numpy(golden["last"])).abs().max() < TOLERANCE
    for position, best, values in zip(
        golden["at"].tolist(), golden["at_ids"], golden["at_logits"], strict=True
    ):
        difference = logits[position][best.astype(np.int64)] - torch.from_numpy(values)
        assert difference.abs().max() < TOLERANCE


def test_greedy_ids_equal_transformers(measured: Callable[[str], None]) -> None:
    num_steps = 0
    near_ties = 0
    running = {
        prompt: prefilled(prompt)[1][len(goldens()[prompt]["ids"]) - 1] for prompt in PROMPTS
    }
    for step in range(64):
        chunks = []
        for prompt, logits in list(running.items()):
            golden = goldens()[prompt]
            wanted = int(golden["greedy"][step])
            sampled = int(logits.argmax())
            num_steps += 1
            if sampled != wanted:
                # Only a near tie may end a sequence: the runner-up was as good.
                assert sampled == golden["second"][step]
                assert golden["margin"][step] < TOLERANCE
                near_ties += 1
                del running[prompt]
                continue
            position = len(golden["ids"]) + step
            chunks.append(Chunk([wanted], position, prefilled(prompt)[0], True))
        running = dict(zip(running, smollm2().forward(chunks), strict=True))
    assert near_ties <= num_steps // TOKENS_PER_NEAR_TIE + 1
    measured(f"{num_steps} greedy ids equal, {near_ties} near ties")
