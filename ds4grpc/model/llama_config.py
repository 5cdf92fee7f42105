"""The numbers of a Llama model, read from a GGUF file and checked.

Owns which metadata and which tensors make a model that `llama` computes right; whatever it would
compute wrong is refused by name. Pure values, start-up only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ds4grpc.errors import ModelError
from ds4grpc.model.gguf import Gguf

ARCHITECTURE: Final = "llama"

_LAYER_TENSORS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the first `dim` values of a head turn by position * base^(-2i/dim) / scale.

    `has_factors`: the file divides each frequency by a factor of its own (Llama 3.1).
    """

    base: float
    dim: int
    scale: float
    has_factors: bool


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """`windows[i]` is the sliding window of layer i in tokens, 0 for full attention."""

    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocabulary_size: int
    max_context: int
    norm_eps: float
    rope: Rope
    windows: tuple[int, ...]
    tied_output: bool

    @staticmethod
    def of(gguf: Gguf) -> LlamaConfig:
        """Reads and checks the numbers of a file. Raises ModelError."""
        fields = _Fields(gguf.metadata)
        fields.refuse_unsupported()
        embedding = gguf.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError("the model has no tensor token_embd.weight of two dimensions")
        hidden_dim = fields.count("embedding_length")
        num_heads = fields.count("attention.head_count")
        num_kv_heads = fields.count("attention.head_count_kv", num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(f"{num_heads} heads do not divide among {num_kv_heads} key heads")
        head_dim = fields.count("attention.key_length", hidden_dim // num_heads)
        if fields.count("attention.value_length", head_dim) != head_dim:
            raise ModelError("keys and values of different length are not supported")
        rope_dim = fields.count("rope.dimension_count", head_dim)
        if rope_dim % 2 or rope_dim > head_dim:
            raise ModelError(f"cannot rotate {rope_dim} values of heads of {head_dim}")
        num_layers = fields.count("block_count")
        return LlamaConfig(
            num_layers=num_layers,
            hidden_dim=hidden_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ffn_dim=fields.count("feed_forward_length"),
            vocabulary_size=embedding.shape[0],
            max_context=fields.count("context_length"),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=Rope(
                base=fields.number("rope.freq_base", 10000.0),
                dim=rope_dim,
                scale=fields.rope_scale(),
                has_factors="rope_freqs.weight" in gguf.tensors,
            ),
            windows=fields.windows(num_layers),
            tied_output="output.weight" not in gguf.tensors,
        )

    def check_tensors(self, gguf: Gguf) -> None:
        """Raises ModelError when a tensor is missing, or there that the model would not use."""
        needed = {"token_embd.weight", "output_norm.weight"}
        needed.update(
            f"blk.{layer}.{name}.weight"
            for layer in range(self.num_layers)
            for name in _LAYER_TENSORS
        )
        if missing := sorted(needed - gguf.tensors.keys()):
            raise ModelError(f"{gguf.path} has no tensor {_few(missing)}")
        unknown = gguf.tensors.keys() - needed - {"output.weight", "rope_freqs.weight"}
        if unknown:
            raise ModelError(
                f"{gguf.path} has tensors that this architecture does not use here: "
                f"{_few(sorted(unknown))}"
            )


class _Fields:
    """Checked access to `llama.*` metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def count(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{ARCHITECTURE}.{name} is {value!r}; a positive integer is needed")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{ARCHITECTURE}.{name} is {value!r}; a positive number is needed")
        return float(value)

    def rope_scale(self) -> float:
        kind = self._value("rope.scaling.type", "none")
        if kind == "none":
            return 1.0
        if kind == "linear":
            return self.number("rope.scaling.factor")
        raise ModelError(f"RoPE scaling {kind!r} is not supported; none and linear are")

    def windows(self, num_layers: int) -> tuple[int, ...]:
        if f"{ARCHITECTURE}.attention.sliding_window" not in self._metadata:
            return (0,) * num_layers
        window = self.count("attention.sliding_window")
        pattern = self._value("attention.sliding_window_pattern", [True] * num_layers)
        if not isinstance(pattern, list) or len(pattern) != num_layers:
            raise ModelError(
                f"{ARCHITECTURE}.attention.sliding_window_pattern is {pattern!r}; "
                f"a list with a value for each of {num_layers} layers is needed"
            )
        return tuple(window if slides else 0 for slides in pattern)

    def refuse_unsupported(self) -> None:
        if self._value("expert_count", 0):
            raise ModelError("models with experts are not supported")

    def _value(self, name: str, default: Any) -> Any:
        value = self._metadata.get(f"{ARCHITECTURE}.{name}", default)
        if value is None:
            raise ModelError(f"the model file has no {ARCHITECTURE}.{name}")
        return value


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
