"""Digests of model files, remembered for big ones.

Owns what counts as "the same weights": the tensor table and data, not the metadata around them,
so that a corrected chat template keeps its banks. Blocks on disk; any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ds4grpc.model.gguf import Gguf

_BLOCK_BYTES: Final = 1 << 20
# Two SHA-256 read about 0.7 GB/s: up to here a start waits at most 3 s for them.
_REMEMBER_FROM_BYTES: Final = 2 << 30
_MAX_REMEMBERED: Final = 64


@dataclass(frozen=True, slots=True)
class FileDigests:
    """SHA-256 of the whole file and of the weights in it, 32 bytes each."""

    file: bytes
    weights: bytes


def digest_gguf(
    gguf: Gguf, memory: Path, *, remember_from: int = _REMEMBER_FROM_BYTES
) -> FileDigests:
    """The digests of a GGUF file.

    Those of files of at least `remember_from` bytes are kept in `memory`, a JSON file, under the
    file's inode, size and modification time. Raises ModelError: the file cannot be read.
    """
    if gguf.stamp.size < remember_from:
        return _compute(gguf)
    key = f"{gguf.stamp.inode}:{gguf.stamp.size}:{gguf.stamp.mtime_ns}"
    remembered = _read_memory(memory)
    if key in remembered:
        file, weights = remembered[key]
        return FileDigests(bytes.fromhex(file), bytes.fromhex(weights))
    digests = _compute(gguf)
    remembered[key] = [digests.file.hex(), digests.weights.hex()]
    _write_memory(memory, dict(list(remembered.items())[-_MAX_REMEMBERED:]))
    return digests


def _compute(gguf: Gguf) -> FileDigests:
    infos = sorted(gguf.tensors.values(), key=lambda info: info.offset)
    data_start = infos[0].offset if infos else gguf.stamp.size
    table = [[i.name, list(i.shape), i.kind.name, i.offset - data_start] for i in infos]
    whole = hashlib.sha256()
    weights = hashlib.sha256(b"ds4grpc/weights/1" + json.dumps(table).encode() + b"\0")
    position = 0
    with gguf.open() as reader:
        for block in reader.blocks(_BLOCK_BYTES):
            whole.update(block)
            weights.update(block[max(0, data_start - position) :])
            position += len(block)
    return FileDigests(whole.digest(), weights.digest())


def _read_memory(memory: Path) -> dict[str, list[str]]:
    """What is remembered; nothing when the file is missing or damaged: it only saves time."""
    try:
        remembered = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(remembered, dict):
        return {}
    return {
        key: value
        for key, value in remembered.items()
        if isinstance(value, list) and len(value) == 2 and all(_is_digest(item) for item in value)
    }


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef")


def _write_memory(memory: Path, remembered: dict[str, list[str]]) -> None:
    # Without room or rights for it the next start computes again.
    with contextlib.suppress(OSError):
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=memory.parent, prefix=f"{memory.name}.")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(remembered, file)
            os.replace(name, memory)
        except OSError:
            os.unlink(name)
