"""The engine's log lines: one an admission, one a finished request. Pure functions."""

from __future__ import annotations

from ds4grpc.engine.request import Finished, Started
from ds4grpc.logs import Line, line


def admit(request_id: str, started: Started, seconds: float) -> Line:
    """`seconds` from arrival to the start of prefill."""
    return line(
        "admit",
        admission=started.admission,
        slot=started.slot,
        pos_base=started.pos_base,
        suffix=started.suffix_tokens,
        hidden=started.hidden_tokens or None,
        miss=started.miss_reason,
        seconds=seconds,
        request=request_id,
    )


def finish(request_id: str, finished: Finished) -> Line:
    usage, timings = finished.usage, finished.timings
    return line(
        "finish",
        reason=finished.finish_reason,
        prompt=usage.prompt_tokens,
        cached=usage.cached_tokens,
        generated=usage.generated_tokens,
        reasoning=usage.reasoning_tokens or None,
        queue=timings.queue,
        lookup=timings.lookup,
        load=timings.load,
        prefill=timings.prefill,
        decode=timings.decode,
        bank=finished.bank_id or None,
        request=request_id,
    )
