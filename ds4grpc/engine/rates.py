"""How fast this process prefills and loads, as measured: what a restore is weighed with.

Owns the averages. Knows no banks. Engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4grpc.engine.reuse import Rates

# How much of an average a new measurement leaves of the old ones.
_KEPT = 0.8
# A disk that was slow is believed to be twice as fast after this long without a load: what is not
# tried would be slow for ever. So a request may pay for one slow load now and then.
_BELIEF_SECONDS = 30.0


@dataclass(slots=True)
class Average:
    """Units a second, large measurements weighing more: small ones are mostly waiting."""

    units: float = 0.0
    seconds: float = 0.0

    def add(self, units: float, seconds: float) -> None:
        self.units = _KEPT * self.units + units
        self.seconds = _KEPT * self.seconds + seconds

    @property
    def per_second(self) -> float | None:
        """None until there is a measurement."""
        return self.units / self.seconds if self.seconds > 0 else None


class Measured:
    """The averages of one engine."""

    def __init__(self) -> None:
        self._prefill = Average()
        self._load = Average()
        self._last_load = 0.0  # bytes a second
        self._loaded_at = 0.0

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds > 0:
            self._prefill.add(num_tokens, seconds)

    def loaded(self, num_bytes: int, seconds: float, now: float) -> None:
        if num_bytes > 0 and seconds > 0:
            self._load.add(num_bytes, seconds)
            self._last_load = num_bytes / seconds
            self._loaded_at = now

    def rates(self, now: float) -> Rates:
        """What a lookup at this moment reckons with. Of the average load and the last one the
        faster counts: a disk that is well again is well at once."""
        load = self._load.per_second
        if load is not None:
            load = max(load, self._last_load)
            load *= 2.0 ** min(50.0, (now - self._loaded_at) / _BELIEF_SECONDS)
        return Rates(self._prefill.per_second, load)
