"""A small random Llama with sliding windows and SmolLM2's real vocabulary, written as GGUF.

What slots, cuts, files and crashes are tested with beside SmolLM2, so that nothing comes to rely
on plain attention. Its text is noise, but varied: scales make attention matter and logits sharp,
so that greedy runs neither cycle nor meet near ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, TokenType
from sources import smollm2_file

from ds4grpc.model.gguf import read_gguf

_SEED = 20261130
_LOGIT_SCALE = 20.0  # standard deviation: two leading tokens are then about 4 apart


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Numbers of a tiny model; the defaults are those of `write_tiny`'s checkpoint."""

    num_layers: int = 4
    hidden_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    ffn_dim: int = 128
    max_context: int = 4096
    window: int = 16
    sliding: tuple[bool, ...] = (True, True, False, True)
    rope_base: float = 10000.0
    rope_dim: int = 16
    rope_scale: float = 1.0
    rope_factors: bool = False
    tied: bool = False


def write_tiny(
    path: Path,
    shape: TinyShape | None = None,
    *,
    template: str | None = None,
    controls: tuple[str, ...] = (),
    also: Callable[[GGUFWriter], None] | None = None,
    extra: dict[str, npt.NDArray[np.float32]] | None = None,
    leave_out: str = "",
) -> Path:
    """Writes the checkpoint to `path` and returns it; the same arguments give the same bytes.

    `template` replaces SmolLM2's chat template, `controls` are control tokens added for it, the
    first of which ends replies, and `also` may add metadata. `extra` adds tensors, or replaces
    some; `leave_out` names one that is not written.
    """
    shape = shape or TinyShape()
    writer = GGUFWriter(path, "llama")
    _write_numbers(writer, shape)
    _write_vocabulary(writer, template, controls)
    if also is not None:
        also(writer)
    for name, tensor in {**_tensors(shape, len(controls)), **(extra or {})}.items():
        if name != leave_out:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_numbers(writer: GGUFWriter, shape: TinyShape) -> None:
    writer.add_name("tiny")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden_dim)
    writer.add_feed_forward_length(shape.ffn_dim)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.rope_dim)
    if shape.rope_scale != 1:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", shape.rope_scale)
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_array("llama.attention.sliding_window_pattern", list(shape.sliding))


def _write_vocabulary(writer: GGUFWriter, template: str | None, controls: tuple[str, ...]) -> None:
    vocabulary = _vocabulary()
    tokens = vocabulary["tokenizer.ggml.tokens"]
    end_id = len(tokens) if controls else vocabulary["tokenizer.ggml.eos_token_id"]
    writer.add_tokenizer_model(vocabulary["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(vocabulary["tokenizer.ggml.pre"])
    writer.add_token_list([*tokens, *controls])
    writer.add_token_types(
        [*vocabulary["tokenizer.ggml.token_type"], *(TokenType.CONTROL for _ in controls)]
    )
    writer.add_token_merges(vocabulary["tokenizer.ggml.merges"])
    writer.add_bos_token_id(vocabulary["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(end_id)
    writer.add_chat_template(template or vocabulary["tokenizer.chat_template"])


@cache
def _vocabulary() -> dict[str, Any]:
    return dict(read_gguf(smollm2_file()).metadata)


def _tensors(shape: TinyShape, num_controls: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    random = np.random.default_rng(_SEED)

    def matrix(num_rows: int, num_columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        scale = gain / math.sqrt(num_columns)
        return random.standard_normal((num_rows, num_columns), dtype=np.float32) * np.float32(scale)

    def norm(length: int) -> npt.NDArray[np.float32]:
        return 1 + 0.1 * random.standard_normal(length, dtype=np.float32)

    width = shape.hidden_dim
    query_dim = shape.num_heads * shape.head_dim
    kv_dim = shape.num_kv_heads * shape.head_dim
    num_tokens = len(_vocabulary()["tokenizer.ggml.tokens"]) + num_controls
    tensors = {
        "token_embd.weight": matrix(num_tokens, width, _LOGIT_SCALE if shape.tied else 1.0),
        "output_norm.weight": norm(width),
    }
    if not shape.tied:
        tensors["output.weight"] = matrix(num_tokens, width, _LOGIT_SCALE)
    if shape.rope_factors:
        tensors["rope_freqs.weight"] = np.linspace(1, 8, shape.rope_dim // 2, dtype=np.float32)
    for layer in range(shape.num_layers):
        at = f"blk.{layer}."
        tensors |= {
            f"{at}attn_norm.weight": norm(width),
            # Scores with a deviation of about 4: attention picks a few tokens out of all.
            f"{at}attn_q.weight": matrix(query_dim, width, 2.0),
            f"{at}attn_k.weight": matrix(kv_dim, width, 2.0),
            f"{at}attn_v.weight": matrix(kv_dim, width, 2.0),
            f"{at}attn_output.weight": matrix(width, query_dim, 2.0),
            f"{at}ffn_norm.weight": norm(width),
            f"{at}ffn_gate.weight": matrix(shape.ffn_dim, width),
            f"{at}ffn_up.weight": matrix(shape.ffn_dim, width),
            f"{at}ffn_down.weight": matrix(width, shape.ffn_dim),
        }
    return tensors
