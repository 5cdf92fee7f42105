"""The fingerprint: a digest of all that must match for stored state to be valid.

The chat template is no part of it (records carry that); neither is the served context, which
changes no row. Pure, any thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Final

from ds4grpc.layout import StateLayout
from ds4grpc.model.checkpoint import Checkpoint

NUMERICS: Final = 1
"""Raised whenever the same weights and tokens would give rows that differ beyond rounding."""


def fingerprint(checkpoint: Checkpoint, layout: StateLayout, numeric_mode: str) -> bytes:
    """32 bytes: SHA-256 of tagged, length-prefixed parts."""
    numbers = dataclasses.asdict(checkpoint.config)
    del numbers["max_context"]
    parts = {
        "weights": checkpoint.weights_digest,
        "architecture": checkpoint.architecture.encode(),
        "numbers": json.dumps(numbers, sort_keys=True).encode(),
        "tokenizer": checkpoint.tokenizer.digest,
        "mode": numeric_mode.encode(),
        "layout": layout.layout_id.encode(),
        "numerics": str(NUMERICS).encode(),
    }
    digest = hashlib.sha256(b"ds4grpc/fingerprint/1")
    for tag, part in parts.items():
        for data in (tag.encode(), part):
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.digest()
