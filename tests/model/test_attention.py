"""`attend` against softmax written out, over odd shapes, offsets, windows and dtypes."""

from __future__ import annotations

import math

import pytest
import torch

from ds4grpc.model.attention import attend

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 3e-2}


def reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
    for token in range(num_tokens):
        stop = start + token + 1
        first = max(0, stop - window) if window else 0
        for head in range(num_heads):
            seen = keys[first:stop, head // group].double()
            scores = seen @ queries[token, head].double() / math.sqrt(head_dim)
            weights = torch.softmax(scores, dim=0)
            out[token, head] = weights @ values[first:stop, head // group].double()
    return out.reshape(num_tokens, -1)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("window", [0, 1, 16])
@pytest.mark.parametrize(
    ("num_tokens", "start"),
    [(1, 0), (1, 1), (1, 15), (1, 16), (1, 200), (2, 0), (16, 0), (17, 0), (7, 100), (300, 33)],
)
def test_attend_equals_the_reference(
    num_tokens: int, start: int, window: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_tokens + start)
    heads = torch.randn(num_tokens, 9 + 3 + 3, 64, dtype=dtype)
    queries = heads[:, :9]  # as in a model: a part of the projection
    # Rows past the chunk, and before the window, must not be read.
    keys, values = torch.full((2, start + num_tokens + 5, 3, 64), torch.nan, dtype=dtype)
    first = max(0, start - window + 1) if window else 0
    for rows in (keys, values):
        rows[first : start + num_tokens] = torch.randn(start + num_tokens - first, 3, 64)
    out = attend(queries, keys, values, start=start, window=window)
    wanted = reference(queries, keys, values, start, window)
    assert out.dtype == dtype
    assert (out.double() - wanted).abs().max() < TOLERANCES[dtype]
