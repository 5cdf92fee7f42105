"""A Llama written for plainness: float64, whole sequences, full masks, one head at a time.

It shares no code with `ds4grpc.model.llama`, so the two agree only when both are right.
"""

from __future__ import annotations

import math

import torch

from ds4grpc.model.gguf import Gguf
from ds4grpc.model.llama_config import LlamaConfig


def naive_logits(gguf: Gguf, ids: list[int]) -> torch.Tensor:
    """Logits after every token of `ids`: (T, V) float64."""
    config = LlamaConfig.of(gguf)
    weights: dict[str, torch.Tensor] = {}
    with gguf.open() as reader:
        for name, info in gguf.tensors.items():
            out = torch.empty(info.shape)
            reader.read(name, out)
            weights[name] = out.double()

    x = weights["token_embd.weight"][ids]  # (T, E)
    for layer in range(config.num_layers):
        at = f"blk.{layer}."
        h = _norm(x, weights[f"{at}attn_norm.weight"], config)
        queries = _heads(h @ weights[f"{at}attn_q.weight"].T, config.num_heads)
        keys = _heads(h @ weights[f"{at}attn_k.weight"].T, config.num_kv_heads)
        values = _heads(h @ weights[f"{at}attn_v.weight"].T, config.num_kv_heads)
        group = config.num_heads // config.num_kv_heads
        factors = weights.get("rope_freqs.weight")
        mixed = [
            _attention(
                _rotated(queries[head], config, factors),
                _rotated(keys[head // group], config, factors),
                values[head // group],
                config.windows[layer],
            )
            for head in range(config.num_heads)
        ]
        x = x + torch.cat(mixed, dim=-1) @ weights[f"{at}attn_output.weight"].T
        h = _norm(x, weights[f"{at}ffn_norm.weight"], config)
        gate = h @ weights[f"{at}ffn_gate.weight"].T
        up = h @ weights[f"{at}ffn_up.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ weights[f"{at}ffn_down.weight"].T
    x = _norm(x, weights["output_norm.weight"], config)
    return x @ weights.get("output.weight", weights["token_embd.weight"]).T


def _norm(x: torch.Tensor, weight: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + config.norm_eps) * weight


def _heads(x: torch.Tensor, num_heads: int) -> list[torch.Tensor]:
    return list(x.chunk(num_heads, dim=-1))


def _rotated(x: torch.Tensor, config: LlamaConfig, factors: torch.Tensor | None) -> torch.Tensor:
    # Pairs (0, 1), (2, 3), … of the first `dim` values turn by position * frequency.
    dim = config.rope.dim
    pairs = torch.arange(dim // 2).double()
    frequencies = config.rope.base ** (-2 * pairs / dim) / config.rope.scale
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.arange(len(x)).double().unsqueeze(1) * frequencies  # (T, dim / 2)
    a, b = x[:, 0:dim:2], x[:, 1:dim:2]
    out = x.clone()
    out[:, 0:dim:2] = a * angles.cos() - b * angles.sin()
    out[:, 1:dim:2] = a * angles.sin() + b * angles.cos()
    return out


def _attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int
) -> torch.Tensor:
    scores = queries @ keys.T / math.sqrt(queries.shape[-1])  # (T, T)
    ages = torch.arange(len(keys)).unsqueeze(1) - torch.arange(len(keys))  # query - key
    hidden = (ages < 0) | (ages >= window) if window else ages < 0
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, dim=-1) @ values
