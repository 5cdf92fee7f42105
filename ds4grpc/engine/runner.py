"""One step on the model: work in, logits out, each failure kept to its own sequence.

The only place that hands tensors to the model. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch

from ds4grpc.engine.scheduler import Work
from ds4grpc.model.interface import Chunk, Model


class Runner:
    """Runs steps of a model."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def run(
        self, work: Rows[Work]
    ) -> tuple[list[npt.NDArray[np.float32] | None], list[Exception | None]]:
        """Runs one step: for each work its logits (V,) where wanted, and its error where it failed.

        When the step as a whole fails, each work runs alone, so that only the culprit is hurt:
        writing the same rows twice changes nothing.
        """
        try:
            return self._forward(work), [None] * len(work)
        except Exception as error:  # any failure of a kernel or an allocation
            if len(work) == 1:
                return [None], [error]
        logits: list[npt.NDArray[np.float32] | None] = []
        errors: list[Exception | None] = []
        for one in work:
            try:
                logits += self._forward([one])
                errors.append(None)
            except Exception as error:
                logits.append(None)
                errors.append(error)
        return logits, errors

    def _forward(self, work: Rows[Work]) -> list[npt.NDArray[np.float32] | None]:
        chunks = [
            Chunk(list(w.ids), w.start, w.sequence.bank.model_state, w.wants_logits) for w in work
        ]
        with torch.inference_mode():
            rows = self._model.forward(chunks)
            host = rows.numpy() if rows.device.type == "cpu" else rows.cpu().numpy()
        if not np.isfinite(host).all():
            raise ArithmeticError("the model's logits are not finite")
        drawn = iter(host)
        return [next(drawn) if w.wants_logits else None for w in work]
