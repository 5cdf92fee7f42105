"""SmolLM2 in float32 against what transformers computes from the same file (tests/goldens)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from loaded import new_state, smollm2, smollm2_checkpoint

from ds4grpc.model.interface import Chunk

TOLERANCE = 1e-3
CHUNK_TOKENS = 512


@cache
def goldens() -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Fields by prompt; see tests/goldens/make_logits.py."""
    prompts: dict[str, dict[str, npt.NDArray[Any]]] = {}
    with np.load(Path(__file__).parent.parent / "goldens" / "smollm2_logits.npz") as file:
        for key in file.files:
            prompt, _, field = key.rpartition(".")
            prompts.setdefault(prompt, {})[field] = file[key]
    return prompts


PROMPTS = sorted(goldens())


def test_goldens_cover_at_least_ten_prompts() -> None:
    assert len(PROMPTS) >= 10
    assert max(len(golden["ids"]) for golden in goldens().values()) >= 2000


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_encodes_to_the_golden_ids(prompt: str) -> None:
    golden = goldens()[prompt]
    assert smollm2_checkpoint().tokenizer.encode(str(golden["text"])) == golden["ids"].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_greedy_ids_equal_transformers(prompt: str) -> None:
    golden = goldens()[prompt]
    model = smollm2()
    ids = golden["ids"].tolist()
    state = new_state(model, len(ids) + len(golden["greedy"]))
    logits = torch.empty(0)
    for start in range(0, len(ids), CHUNK_TOKENS):
        logits = model.forward([Chunk(ids[start : start + CHUNK_TOKENS], start, state, True)])
    difference = (logits[0] - torch.from_numpy(golden["last"])).abs().max().item()
    assert difference < TOLERANCE

    near_ties = 0
    for step, wanted in enumerate(golden["greedy"].tolist()):
        sampled = int(logits[0].argmax())
        if sampled != wanted:
            # A near tie ends the comparison: the runner-up was as good.
            assert sampled == golden["second"][step]
            assert golden["margin"][step] < TOLERANCE
            near_ties += 1
            break
        logits = model.forward([Chunk([sampled], len(ids) + step, state, True)])
    # At most one in 2,000 tokens over all prompts; the goldens hold 768 steps.
    assert near_ties == 0 or golden["margin"].min() < TOLERANCE


@pytest.mark.parametrize("prompt", [name for name in PROMPTS if not name.startswith("long")])
def test_logits_inside_the_prompt_equal_transformers(prompt: str) -> None:
    golden = goldens()[prompt]
    model = smollm2()
    ids = golden["ids"].tolist()
    state = new_state(model, len(ids))
    start = 0
    for position, best, values in zip(
        golden["at"].tolist(), golden["at_ids"], golden["at_logits"], strict=True
    ):
        logits = model.forward([Chunk(ids[start : position + 1], start, state, True)])
        start = position + 1
        difference = logits[0, best.astype(np.int64)] - torch.from_numpy(values)
        assert difference.abs().max().item() < TOLERANCE
