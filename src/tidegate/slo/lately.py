"""For what part of the time something has been so."""

import math


class Lately:
    """The part, of late: what was longer ago than ``memory_s`` counts for little."""

    def __init__(self, memory_s: float) -> None:
        self.part = 0.0
        self._memory_s = memory_s
        self._told: tuple[float, bool] | None = None

    def told(self, now: float, so: bool) -> None:
        """From now on it is so, or not, until told otherwise. ``now`` never falls."""
        if self._told is not None:
            since, was = self._told
            kept = math.exp((since - now) / self._memory_s)
            self.part = kept * self.part + (1.0 - kept) * was
        self._told = now, so
