"""Sampling: noise is Philox's, options filter as they say, and a row does not know its batch."""

from __future__ import annotations

import numpy as np
import pytest

from ds4grpc.engine.request import Sampling
from ds4grpc.engine.sampler import Row, philox, sample, step_logprobs


def reference_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> int:
    """Philox4x32-10 in plain integers, written from the paper's round function."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[0]


def logits(seed: int, vocabulary: int = 5000) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, vocabulary).astype(np.float32)


def test_philox_matches_the_published_vector() -> None:
    # Random123's known-answer file: counter 0, key 0.
    assert int(philox(np.array([0]), 0, 0)[0]) == 0x6627E8D5
    assert reference_philox((0, 0, 0, 0), (0, 0)) == 0x6627E8D5


@pytest.mark.parametrize("seed", [1, 2**32 + 5, 2**64 - 1])
@pytest.mark.parametrize("index", [0, 7, 2**33])
def test_philox_equals_the_reference(seed: int, index: int) -> None:
    ids = np.array([0, 1, 49151, 2**31])
    expected = [
        reference_philox((int(i), index % 2**32, index >> 32, 0), (seed % 2**32, seed >> 32))
        for i in ids
    ]
    assert philox(ids, index, seed).tolist() == expected


def test_sample_draws_the_same_alone_and_in_a_batch() -> None:
    rows = [Row(Sampling(seed=s, top_p=0.9 + s / 100, top_k=s * 10), index=s) for s in range(6)]
    batch = np.stack([logits(s) for s in range(6)])
    together = sample(batch, rows)
    assert together == [sample(batch[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def test_sample_greedy_takes_the_lowest_of_equal_ids() -> None:
    flat = np.zeros((1, 100), dtype=np.float32)
    flat[0, [7, 50]] = 1.0
    assert sample(flat, [Row(Sampling(temperature=0))]) == [7]


def test_sample_follows_the_distribution() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    row_logits = np.log(probabilities).astype(np.float32)[None]
    draws = [sample(row_logits, [Row(Sampling(seed=9), index=i)])[0] for i in range(4000)]
    shares = np.bincount(draws, minlength=4) / len(draws)
    assert np.abs(shares - probabilities).max() < 0.03


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.79), {0, 1}),
        (Sampling(top_p=0.81), {0, 1, 2}),
        (Sampling(top_p=0.01), {0}),
        (Sampling(min_p=0.29), {0, 1, 2}),
        (Sampling(min_p=0.31), {0, 1}),
        (Sampling(top_k=3, min_p=0.5), {0, 1}),
        # After top-k 2 the two hold all the mass: top-p 0.9 keeps both.
        (Sampling(top_k=2, top_p=0.9), {0, 1}),
    ],
)
def test_sample_filters_keep_exactly_what_they_say(options: Sampling, allowed: set[int]) -> None:
    row_logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]])).astype(np.float32)
    drawn = {sample(row_logits, [Row(options, index=i)])[0] for i in range(300)}
    assert drawn == allowed


def test_sample_top_p_beyond_the_likeliest_keeps_the_whole_mass() -> None:
    flat = np.zeros((1, 5000), dtype=np.float32)
    drawn = {sample(flat, [Row(Sampling(top_p=0.999), index=i)])[0] for i in range(200)}
    assert max(drawn) > 3000


def test_penalties_and_bias_change_the_greedy_choice() -> None:
    row_logits = np.array([[2.0, 1.9, 1.0, -1.0]], dtype=np.float32)

    def greedy(row: Row) -> int:
        return sample(row_logits, [row])[0]

    assert greedy(Row(Sampling(temperature=0, presence_penalty=0.5), counts={0: 1})) == 1
    assert greedy(Row(Sampling(temperature=0, frequency_penalty=0.06), counts={0: 2})) == 1
    assert greedy(Row(Sampling(temperature=0, repetition_penalty=1.5), seen=frozenset({0}))) == 1
    assert greedy(Row(Sampling(temperature=0, logit_bias={3: 5.0}))) == 3
    assert row_logits.tolist() == [[2.0, pytest.approx(1.9), 1.0, -1.0]], "logits were changed"


def test_step_logprobs_are_of_the_model_not_of_the_options() -> None:
    row_logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    step = step_logprobs(row_logits, 2, 2, lambda i: bytes([65 + i]))
    assert step.sampled.logprob == pytest.approx(np.log(0.2))
    assert [(t.token_id, t.token) for t in step.top] == [(0, b"A"), (1, b"B")]
