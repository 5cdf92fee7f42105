"""Which device and arithmetic a model runs in. Knows no architecture; start-up only."""

from __future__ import annotations

import torch

from ds4grpc.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """Raises ConfigError: an unknown device, or CUDA where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is unknown; cpu and cuda are known") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name} is not supported; cpu and cuda are")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: no CUDA device, or a build of torch without CUDA")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`name` is `float32`, `bfloat16` or `auto`.

    `auto` is bfloat16 where the hardware multiplies in it (elsewhere it is emulated and
    slower than float32), else float32.
    """
    if name == "auto":
        native = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def numeric_mode(dtype: torch.dtype) -> str:
    """The name of `dtype` in the fingerprint, the layout id and everything people see."""
    return str(dtype).removeprefix("torch.")
