"""A model file opened: its name, numbers, tokenizer, template and weights.

Owns the way from a path to a loaded model. Knows no slots and no requests; start-up only, and it
blocks on disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds4grpc.errors import ConfigError, ModelError
from ds4grpc.model import registry
from ds4grpc.model.digest import digest_gguf
from ds4grpc.model.gguf import Gguf, read_gguf
from ds4grpc.model.llama import Llama
from ds4grpc.model.llama_config import ARCHITECTURE, LlamaConfig
from ds4grpc.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """How the model's makers want it sampled; None where the file does not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked model file. Its weights are read by `load_model`."""

    path: Path
    name: str  # for clients and metrics: the registry's name or the file's
    title: str  # what the file calls itself, "" when it does not
    architecture: str
    config: LlamaConfig
    tokenizer: Tokenizer
    chat_template: str | None
    generation: GenerationDefaults
    weights_digest: bytes  # SHA-256 of tensors, whatever the metadata around them
    gguf: Gguf


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads all of a model file but its weights, and digests those.

    Raises ModelError: not a model file, damaged, or something in it is not supported.
    """
    gguf = read_gguf(path)
    architecture = gguf.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelError(
            f"{path}: architecture {architecture!r} is not supported; {ARCHITECTURE!r} is"
        )
    config = LlamaConfig.of(gguf)
    config.check_tensors(gguf)
    tokenizer = Tokenizer(gguf.metadata)
    if tokenizer.vocabulary_size != config.vocabulary_size:
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocabulary_size} tokens, the embedding "
            f"{config.vocabulary_size}"
        )
    digests = digest_gguf(gguf, registry.models_folder() / "digests.json")
    registry.check_digest(path, digests.file)
    return Checkpoint(
        path=path,
        name=path.stem,
        title=_text(gguf.metadata, "general.name") or "",
        architecture=ARCHITECTURE,
        config=config,
        tokenizer=tokenizer,
        chat_template=_text(gguf.metadata, "tokenizer.chat_template"),
        generation=_generation_defaults(gguf.metadata),
        weights_digest=digests.weights,
        gguf=gguf,
    )


def load_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_context: int | None = None,
) -> Llama:
    """Reads the weights; `max_context` None serves all that the model was trained for.

    Raises ModelError: a tensor is misshaped or the file changed. ConfigError: `max_context` is
    beyond the model's.
    """
    config = checkpoint.config
    if max_context is not None:
        if not 0 < max_context <= config.max_context:
            raise ConfigError(
                f"--max-context is {max_context}; {checkpoint.name} has {config.max_context}"
            )
        config = dataclasses.replace(config, max_context=max_context)
    return Llama(config, checkpoint.gguf, device=device, dtype=dtype)


def _generation_defaults(metadata: Mapping[str, Any]) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=_number(metadata, "general.sampling.temp"),
        top_p=_number(metadata, "general.sampling.top_p"),
        top_k=_count(metadata, "general.sampling.top_k"),
        min_p=_number(metadata, "general.sampling.min_p"),
        repetition_penalty=_number(metadata, "general.sampling.penalty_repeat"),
    )


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{key} is {value!r}, not text")
    return value


def _number(metadata: Mapping[str, Any], key: str) -> float | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or not value >= 0:
        raise ModelError(f"{key} is {value!r}; a number of at least 0 is needed")
    return float(value)


def _count(metadata: Mapping[str, Any], key: str) -> int | None:
    number = _number(metadata, key)
    return None if number is None else int(number)
