"""Drawing tokens from logits, one row at a time and the same alone as in a batch.

Knows logits, options and counters; no sequences, no text. Engine thread, on the host: numpy in
one thread, because a hundred small parallel regions a token cost more than they save.

Noise is a pure function of (seed, output index, token id), so a row draws the same token whatever
else is in its batch, on any device: token = argmax(logit / temperature + Gumbel(u)), with u from
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; counter =
token id, output index; key = seed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds4grpc.engine.request import Sampling, StepLogprobs, TokenLogprob

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_MASK = np.uint64(_LOW)
_SHIFT = np.uint64(32)
# The likeliest tokens are looked at first for top-p: nearly always enough, and sorting a whole
# vocabulary costs ten times as much.
_LIKELIEST = 1024


@dataclass(slots=True)
class Row:
    """What one row needs to draw: its options and what it has seen.

    `index` counts sampled tokens. `counts` are generated token ids with their number, `seen` the
    distinct ids of the prompt; both are only kept when a penalty needs them.
    """

    options: Sampling
    index: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    seen: frozenset[int] = frozenset()

    @property
    def penalised(self) -> bool:
        options = self.options
        return (
            options.frequency_penalty != 0
            or options.presence_penalty != 0
            or options.repetition_penalty != 1
        )

    def took(self, token_id: int) -> None:
        """Notes a drawn token."""
        self.index += 1
        if self.penalised:
            self.counts[token_id] = self.counts.get(token_id, 0) + 1


def philox(token_ids: npt.NDArray[np.int64], index: int, seed: int) -> Words:
    """First word of Philox4x32-10 for each token id, in [0, 2^32).

    Counter words are (token id, index low, index high, 0), key words (seed low, seed high).
    """
    c0 = token_ids.astype(np.uint64)
    c1: Words = np.full_like(c0, index & _LOW)
    c2: Words = np.full_like(c0, (index >> 32) & _LOW)
    c3: Words = np.zeros_like(c0)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        c0 *= _MULTIPLIERS[0]  # 32 x 32 -> 64 bits: high and low words of the product
        c2 *= _MULTIPLIERS[1]
        c1 ^= c2 >> _SHIFT
        c1 ^= np.uint64(k0)
        c3 ^= c0 >> _SHIFT
        c3 ^= np.uint64(k1)
        c2 &= _MASK
        c0 &= _MASK
        c0, c1, c2, c3 = c1, c2, c3, c0
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0


def sample(logits: Floats, rows: Sequence[Row]) -> list[int]:
    """Draws one token for each row.

    logits: (B, V) float32; rows: B. Ties go to the lowest id. Does not change `logits`.
    """
    return [_sample_row(logits[i], row) for i, row in enumerate(rows)]


def _sample_row(logits: Floats, row: Row) -> int:
    """One token from logits (V,)."""
    options = row.options
    logits = _adjusted(logits, row)
    if options.temperature == 0:
        return int(logits.argmax())
    scaled = logits / np.float32(options.temperature)
    kept = _kept(scaled, options)  # (K,) token ids, ascending
    uniform = (philox(kept, row.index, options.seed).astype(np.float64) + 0.5) * 2.0**-32
    scores = scaled[kept] - np.log(-np.log(uniform))
    return int(kept[scores.argmax()])


def _adjusted(logits: Floats, row: Row) -> Floats:
    """Logits with penalties and bias; a copy when there are any."""
    options = row.options
    if not row.penalised and not options.logit_bias:
        return logits
    logits = logits.copy()
    seen = row.seen.union(row.counts)
    if options.repetition_penalty != 1 and seen:
        ids = np.fromiter(seen, dtype=np.int64)
        values = logits[ids]
        penalty = np.float32(options.repetition_penalty)
        logits[ids] = np.where(values > 0, values / penalty, values * penalty)
    if row.counts and (options.frequency_penalty or options.presence_penalty):
        ids = np.fromiter(row.counts, dtype=np.int64)
        counts = np.fromiter(row.counts.values(), dtype=np.float32)
        logits[ids] -= counts * np.float32(options.frequency_penalty)
        logits[ids] -= np.float32(options.presence_penalty)
    for token_id, bias in options.logit_bias.items():
        logits[token_id] += np.float32(bias)
    return logits


def _kept(scaled: Floats, options: Sampling) -> npt.NDArray[np.int64]:
    """Ids that top-k, top-p and min-p leave, applied in that order: (K,) ascending."""
    vocabulary = len(scaled)
    top_k = options.top_k if 0 < options.top_k < vocabulary else 0
    min_p_floor = np.log(options.min_p) if options.min_p > 0 else -np.inf
    if not top_k and options.top_p >= 1:
        if options.min_p <= 0:
            return np.arange(vocabulary)
        return np.flatnonzero(scaled >= scaled.max() + min_p_floor)
    ids = _likeliest(scaled, top_k or min(_LIKELIEST, vocabulary))
    if options.top_p < 1:
        weights = np.exp((scaled[ids] - scaled[ids[0]]).astype(np.float64))
        everything = scaled[ids] if top_k else scaled
        total = np.exp((everything - scaled[ids[0]]).astype(np.float64)).sum()
        if not top_k and weights.sum() < options.top_p * total:
            ids = _likeliest(scaled, vocabulary)
            weights = np.exp((scaled[ids] - scaled[ids[0]]).astype(np.float64))
        above = weights.cumsum() - weights  # mass above each token: the first always stays
        ids = ids[above < options.top_p * total]
    if options.min_p > 0:
        ids = ids[scaled[ids] >= scaled[ids[0]] + min_p_floor]
    return np.sort(ids)


def _likeliest(scaled: Floats, count: int) -> npt.NDArray[np.int64]:
    """The `count` ids with the largest logits, best first, ties by lowest id."""
    if count < len(scaled):
        ids = np.argpartition(scaled, len(scaled) - count)[len(scaled) - count :]
        ids = np.sort(ids)
    else:
        ids = np.arange(len(scaled))
    return ids[np.argsort(-scaled[ids], kind="stable")]


def step_logprobs(
    logits: Floats, sampled: int, num_top: int, token_bytes: Callable[[int], bytes]
) -> StepLogprobs:
    """Log probabilities of one step from logits (V,), before sampling options.

    `token_bytes` maps each id to its bytes.
    """
    shifted = (logits - logits.max()).astype(np.float64)
    logprobs = shifted - np.log(np.exp(shifted).sum())
    return StepLogprobs(
        sampled=TokenLogprob(sampled, token_bytes(sampled), float(logprobs[sampled])),
        top=tuple(
            TokenLogprob(int(i), token_bytes(int(i)), float(logprobs[i]))
            for i in _likeliest(logits, num_top)
        )
        if num_top
        else (),
    )
