"""What a server reads from the model file before it serves, and how it presents the model.

Owns the way from the options to a loaded model. Blocking; runs in a worker thread.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ds4grpc import __version__
from ds4grpc.chat.prompts import Prompts
from ds4grpc.config import MB, ServeConfig
from ds4grpc.engine.memory import trim_heap
from ds4grpc.engine.request import Sampling
from ds4grpc.errors import ModelNotFound
from ds4grpc.model import registry
from ds4grpc.model.checkpoint import Checkpoint, load_model, open_checkpoint
from ds4grpc.model.fingerprint import fingerprint
from ds4grpc.model.llama import Llama
from ds4grpc.model.numerics import resolve_device, resolve_dtype
from ds4grpc.v1 import generation_pb2, model_pb2


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is read from the model file before anything serves."""

    checkpoint: Checkpoint
    model: Llama
    prompts: Prompts
    fingerprint: bytes
    kv_bytes: int  # most memory for resident banks


def load(config: ServeConfig) -> Loaded:
    """Finds (pulling a known model on first use), checks and loads the model. Blocks."""
    torch.set_num_threads(config.num_threads())
    device = resolve_device(
        ("cuda" if torch.cuda.is_available() else "cpu")
        if config.device == "auto"
        else config.device
    )
    checkpoint = open_checkpoint(_model_file(config.model))
    model = load_model(
        checkpoint,
        device=device,
        dtype=resolve_dtype(config.dtype, device),
        max_context=config.max_context,
    )
    prompts = Prompts(checkpoint.tokenizer, checkpoint.chat_template)
    trim_heap()  # what loading used and freed
    return Loaded(
        checkpoint=checkpoint,
        model=model,
        prompts=prompts,
        fingerprint=fingerprint(checkpoint, model.layout, model.numeric_mode),
        kv_bytes=config.kv_memory_bytes(),
    )


def _model_file(name: str) -> Path:
    try:
        return registry.resolve(name)
    except ModelNotFound:
        if name not in registry.KNOWN:
            raise
    known = registry.KNOWN[name]
    _say(f"fetching {known.title} ({known.license}), once")
    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if (tenth := done * 10 // max(total, 1)) > shown:
            shown = tenth
            _say(f"  {done / MB:,.0f} of {total / MB:,.0f} MB")

    return registry.pull(name, progress)


def default_sampling(checkpoint: Checkpoint) -> Sampling:
    """The model's generation config over temperature 1 and no filters."""
    found = dataclasses.asdict(checkpoint.generation)
    return Sampling(**{name: value for name, value in found.items() if value is not None})


def describe(config: ServeConfig, loaded: Loaded) -> model_pb2.Model:
    checkpoint, model = loaded.checkpoint, loaded.model
    sampling = default_sampling(checkpoint)
    thinks = loaded.prompts.default_thinking
    return model_pb2.Model(
        name=checkpoint.name,
        architecture=checkpoint.architecture,
        fingerprint=loaded.fingerprint.hex(),
        dtype=model.numeric_mode,
        device=model.device.type,
        num_parameters=model.num_parameters,
        vocabulary_size=model.vocabulary_size,
        max_context_tokens=model.max_context,
        num_slots=config.slots,
        kv_bytes_per_token=model.layout.bytes_per_token,
        renderer=loaded.prompts.renderer_digest,
        default_thinking=(
            generation_pb2.THINKING_MODE_ENABLED
            if thinks
            else generation_pb2.THINKING_MODE_DISABLED
        ),
        default_sampling=generation_pb2.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
        ),
        end_token_ids=sorted(checkpoint.tokenizer.end_ids),
        server_version=__version__,
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
