"""The Llama architecture: grouped-query attention, rotary positions, SwiGLU, sliding windows.

Owns its numbers, its state layout and its forward pass. Knows no slots, no scheduling and no
tokenizer; the engine thread runs it. Letters: N tokens of a call, E embedding, F feed-forward,
H heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ds4grpc.layout import Rows, StateLayout
from ds4grpc.model.attention import attend
from ds4grpc.model.gguf import Gguf, TensorReader
from ds4grpc.model.interface import Chunk, State
from ds4grpc.model.llama_config import LlamaConfig
from ds4grpc.model.numerics import numeric_mode


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer; those that read the same input are one matrix. Norms are float32."""

    attention_norm: torch.Tensor  # (E,)
    qkv: torch.Tensor  # ((H + 2K) * D, E)
    attention_out: torch.Tensor  # (E, H * D)
    ffn_norm: torch.Tensor  # (E,)
    gate_up: torch.Tensor  # (2F, E)
    down: torch.Tensor  # (E, F)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.attention_norm, self.qkv, self.attention_out)
        yield from (self.ffn_norm, self.gate_up, self.down)


class Llama:
    """A loaded Llama; fulfils `interface.Model`.

    In bfloat16 the matrices and the rows are bfloat16, while norms, rotation, the residual stream
    and the logits stay float32. Raises ModelError when the file's tensors are not those of
    `config`.
    """

    def __init__(
        self, config: LlamaConfig, gguf: Gguf, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        config.check_tensors(gguf)
        self.config = config
        self.device = device
        self.dtype = dtype
        self.numeric_mode = numeric_mode(dtype)
        self.layout = state_layout(config, dtype)
        self.vocabulary_size = config.vocabulary_size
        self.max_context = config.max_context
        self.num_parameters = sum(info.num_values for info in gguf.tensors.values())
        # torch has no CPU product of bfloat16 matrices with a float32 result, and logits rounded
        # to 8 bits would decide between near tokens by rounding.
        head_dtype = torch.float32 if device.type == "cpu" else dtype
        with gguf.open() as reader:
            load = _Loader(reader, device)
            vocabulary = (config.vocabulary_size, config.hidden_dim)
            if config.tied_output:
                self._head = load.matrix(head_dtype, {"token_embd.weight": vocabulary})
                self._embedding = self._head
            else:
                self._head = load.matrix(head_dtype, {"output.weight": vocabulary})
                self._embedding = load.matrix(dtype, {"token_embd.weight": vocabulary})
            self._norm = load.vector("output_norm.weight", config.hidden_dim)
            self._layers = [_load_layer(load, config, dtype, i) for i in range(config.num_layers)]
            factors = (
                load.vector("rope_freqs.weight", config.rope.dim // 2)
                if config.rope.has_factors
                else None
            )
        self._rotations = _rotations(config, factors, device)
        weights = {self._head, self._embedding, self._norm}
        weights.update(tensor for layer in self._layers for tensor in layer.tensors())
        self.weight_bytes = sum(tensor.nbytes for tensor in weights)

    def bind(self, planes: Sequence[torch.Tensor]) -> State:
        """See `Model.bind`; the views are (max_rows, K, D)."""
        shape = (-1, self.config.num_kv_heads, self.config.head_dim)
        return State(tuple(plane.view(self.dtype).view(shape) for plane in planes))

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """See `Model.forward`. Projections run over the tokens of all chunks, attention apart."""
        spans: list[tuple[int, int]] = []  # of each chunk, in the N tokens of this call
        end = 0
        for chunk in chunks:
            spans.append((end, end + len(chunk.ids)))
            end += len(chunk.ids)
        ids = torch.tensor([i for chunk in chunks for i in chunk.ids], device=self.device)
        rotations = torch.cat(
            [self._rotations[chunk.start : chunk.start + len(chunk.ids)] for chunk in chunks]
        ).unsqueeze(1)  # (N, 1, R / 2)

        x = F.embedding(ids, self._embedding).float()  # (N, E)
        for index, layer in enumerate(self._layers):
            heads = self._project(layer, x, rotations)  # (N, H + 2K, D)
            attended = [
                self._attend(index, chunk, heads[a:b])
                for chunk, (a, b) in zip(chunks, spans, strict=True)
            ]
            mixed = attended[0] if len(attended) == 1 else torch.cat(attended)  # (N, H * D)
            x += F.linear(mixed, layer.attention_out)
            gate, up = F.linear(self._normed(x, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
            x += F.linear(F.silu(gate).mul_(up), layer.down)

        wanted = [b - 1 for chunk, (_, b) in zip(chunks, spans, strict=True) if chunk.want_logits]
        return self._logits(x[wanted])

    def _project(self, layer: _Layer, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of all tokens, the first two rotated: (N, H + 2K, D)."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = F.linear(self._normed(x, layer.attention_norm), layer.qkv).view(
            -1, num_rotated + config.num_kv_heads, config.head_dim
        )
        # GGUF stores Llama's projections so that neighbours in a head turn as one pair: a complex
        # product. In float32 it happens in place; other dtypes go through a float32 copy.
        turning = heads[:, :num_rotated, : config.rope.dim]
        turned = turning.float()
        torch.view_as_complex(turned.view(*turned.shape[:2], -1, 2)).mul_(rotations)
        if turned is not turning:
            turning.copy_(turned)
        return heads

    def _attend(self, index: int, chunk: Chunk, heads: torch.Tensor) -> torch.Tensor:
        """Writes one chunk's rows of layer `index` and attends to the slot: (N, H * D)."""
        config = self.config
        keys, values = chunk.state.rows[2 * index], chunk.state.rows[2 * index + 1]
        queries, new_keys, new_values = torch.split(
            heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        stop = chunk.start + len(chunk.ids)
        keys[chunk.start : stop] = new_keys
        values[chunk.start : stop] = new_values
        return attend(queries, keys, values, start=chunk.start, window=config.windows[index])

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps).to(self.dtype)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(x, self._norm.shape, self._norm, self.config.norm_eps)
        if self._head.dtype == torch.float32:
            return F.linear(x, self._head)
        return torch.mm(x.to(self._head.dtype), self._head.T, out_dtype=torch.float32)


def state_layout(config: LlamaConfig, dtype: torch.dtype) -> StateLayout:
    """Two arrays a layer, `k.<layer>` (rotated) and `v.<layer>`; a row is one token's (K, D)."""
    row_bytes = config.num_kv_heads * config.head_dim * dtype.itemsize
    layout_id = (
        f"llama-{config.num_layers}x{config.num_kv_heads}x{config.head_dim}-{numeric_mode(dtype)}"
    )
    if any(config.windows):
        layout_id += "-window" + ".".join(map(str, config.windows))
    rows = tuple(
        Rows(f"{letter}.{layer}", row_bytes, window=window)
        for layer, window in enumerate(config.windows)
        for letter in "kv"
    )
    return StateLayout(layout_id, rows)


class _Loader:
    """Reads weights from one open file onto one device."""

    def __init__(self, reader: TensorReader, device: torch.device) -> None:
        self._reader = reader
        self._device = device

    def matrix(self, dtype: torch.dtype, parts: dict[str, tuple[int, int]]) -> torch.Tensor:
        """The tensors of the given names and shapes as one matrix, below each other."""
        num_columns = next(iter(parts.values()))[1]
        out = torch.empty(sum(rows for rows, _ in parts.values()), num_columns, dtype=dtype)
        start = 0
        for name, (num_rows, _) in parts.items():
            self._reader.read(name, out[start : start + num_rows])
            start += num_rows
        return out.to(self._device)

    def vector(self, name: str, length: int) -> torch.Tensor:
        out = torch.empty(length)
        self._reader.read(name, out)
        return out.to(self._device)


def _load_layer(load: _Loader, config: LlamaConfig, dtype: torch.dtype, index: int) -> _Layer:
    width = config.hidden_dim
    query_dim = config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    at = f"blk.{index}."
    return _Layer(
        attention_norm=load.vector(f"{at}attn_norm.weight", width),
        qkv=load.matrix(
            dtype,
            {
                f"{at}attn_q.weight": (query_dim, width),
                f"{at}attn_k.weight": (kv_dim, width),
                f"{at}attn_v.weight": (kv_dim, width),
            },
        ),
        attention_out=load.matrix(dtype, {f"{at}attn_output.weight": (width, query_dim)}),
        ffn_norm=load.vector(f"{at}ffn_norm.weight", width),
        gate_up=load.matrix(
            dtype,
            {
                f"{at}ffn_gate.weight": (config.ffn_dim, width),
                f"{at}ffn_up.weight": (config.ffn_dim, width),
            },
        ),
        down=load.matrix(dtype, {f"{at}ffn_down.weight": (width, config.ffn_dim)}),
    )


def _rotations(
    config: LlamaConfig, factors: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """exp(i * angle) of every position: (max_context, R / 2) complex64.

    Angles are made in float64: at position 8,192 float32 would be off by 5e-4.
    """
    rope = config.rope
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
    frequencies = rope.base**-exponents / rope.scale
    if factors is not None:
        frequencies /= factors.cpu().double()
    angles = torch.outer(torch.arange(config.max_context, dtype=torch.float64), frequencies)
    return torch.complex(angles.cos().float(), angles.sin().float()).to(device)
