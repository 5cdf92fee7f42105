"""Attention of one chunk over one slot's rows.

Owns the forms that are fastest on each device; all compute the same thing. Knows no layers and no
position encoding; the engine thread runs it. Letters: N tokens of the chunk, T rows it sees,
H heads, K key/value heads, G = H / K heads a group, D head size, W window.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

# Queries that share one band mask: cost per query grows with the window plus this.
_WINDOW_BLOCK: Final = 128


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, start: int, window: int
) -> torch.Tensor:
    """Causal attention of queries at positions [start, start + N).

    `queries` (N, H, D); `keys` and `values` (>= start + N, K, D), a slot's rows with those of the
    chunk already written. Token t sees rows [0, t], with a window [t - W + 1, t]. Returns
    (N, H * D).
    """
    num_tokens, num_heads, head_dim = queries.shape
    stop = start + num_tokens
    num_groups = keys.shape[1]
    grouped = queries.view(num_tokens, num_groups, num_heads // num_groups, head_dim)
    if window and stop > window:
        out = _in_window(grouped, keys, values, start, window)
    elif queries.device.type == "cpu":
        out = _causal_cpu(grouped, keys[:stop], values[:stop], start)
    else:
        out = _masked(grouped, keys[:stop], values[:stop], _band(grouped, stop, start, 0))
    return out.reshape(num_tokens, num_heads * head_dim)


def _causal_cpu(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
) -> torch.Tensor:
    # (N, K, G, D), (T, K, D) -> (N, K, G, D)
    num_tokens = queries.shape[0]
    if num_tokens == 1:
        return _all_rows(queries, keys, values)[0]
    # The triangle of the chunk itself and the rectangle before it need no mask each; merging them
    # by their logsumexp is exact to 3e-8 in float32 and 1.1 to 1.5 times as fast as one mask.
    own, own_lse = _flash(
        queries.permute(1, 2, 0, 3),  # (K, G, N, D)
        _per_head(keys[start:], queries),
        _per_head(values[start:], queries),
        is_causal=True,
    )
    own = own.permute(2, 0, 1, 3)  # (N, K, G, D)
    if not start:
        return own
    before, before_lse = _all_rows(queries, keys[:start], values[:start])
    share = torch.sigmoid(own_lse.permute(2, 0, 1) - before_lse).unsqueeze(-1).to(own.dtype)
    return torch.lerp(before, own, share)


def _all_rows(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query over every row, no mask: (N, K, G, D) and logsumexp (N, K, G)."""
    num_tokens, num_groups, group, head_dim = queries.shape
    # A group's heads share their keys: as rows of one query they read them once.
    out, lse = _flash(
        queries.permute(1, 0, 2, 3).reshape(1, num_groups, num_tokens * group, head_dim),
        keys.permute(1, 0, 2).unsqueeze(0),
        values.permute(1, 0, 2).unsqueeze(0),
    )
    out = out.view(num_groups, num_tokens, group, head_dim)
    return out.permute(1, 0, 2, 3), lse.view(num_groups, num_tokens, group).permute(1, 0, 2)


def _flash(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, H, N, D), (B, H, T, D) -> (B, H, N, D) and the logsumexp of the scores, (B, H, N)."""
    result: tuple[torch.Tensor, torch.Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, is_causal
        )
    )
    return result


def _per_head(rows: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    # (N, K, D) -> (K, G, N, D) without a copy
    return rows.permute(1, 0, 2).unsqueeze(1).expand(-1, queries.shape[2], -1, -1)


def _in_window(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int
) -> torch.Tensor:
    # Query blocks over the rows each can see:     rows  first = a - W + 1 .. a .. b
    #                                              queries               [a, b)
    blocks: list[torch.Tensor] = []
    for offset in range(0, queries.shape[0], _WINDOW_BLOCK):
        block = queries[offset : offset + _WINDOW_BLOCK]
        at = start + offset
        first = max(0, at - window + 1)
        stop = at + block.shape[0]
        mask = _band(block, stop - first, at - first, window)
        blocks.append(_masked(block, keys[first:stop], values[first:stop], mask))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _masked(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    # (N, K, G, D), (T, K, D), (N, T) -> (N, K, G, D)
    out = F.scaled_dot_product_attention(
        queries.permute(1, 2, 0, 3), _per_head(keys, queries), _per_head(values, queries), mask
    )
    return out.permute(2, 0, 1, 3)


def _band(queries: torch.Tensor, num_rows: int, lead: int, window: int) -> torch.Tensor | None:
    """Additive mask (N, T) for queries at rows lead, lead + 1, …; None when all see all rows."""
    num_tokens = queries.shape[0]
    if num_tokens == 1 and (not window or num_rows <= window):
        return None
    visible = torch.ones(num_tokens, num_rows, dtype=torch.bool, device=queries.device).tril(lead)
    if window:
        visible = visible.triu(lead - window + 1)
    mask = torch.zeros(num_tokens, num_rows, dtype=queries.dtype, device=queries.device)
    return mask.masked_fill_(~visible, float("-inf"))
