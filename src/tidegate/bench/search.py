"""Which rates to try in the search for the highest one that passes."""

import math

_MOST_STEP = 2.0


class Search:
    """Outward from ``start`` by a factor, until one rate has passed and a higher one has failed; then between these
    two, at their geometric mean, until they differ by a share of ``precision`` at most.

    Rates stay between ``lowest`` and ``highest``. Each step outward is as long as all before together (galloping),
    but at most a doubling; the first is by ``step``.
    """

    def __init__(
        self, start: float, *, precision: float, lowest: float, highest: float, step: float = _MOST_STEP
    ) -> None:
        self._start = min(max(start, lowest), highest)
        self._precision = precision
        self._lowest = lowest
        self._highest = highest
        self._step = step
        self._tried: list[tuple[float, bool]] = []

    def learn(self, rate: float, passed: bool) -> None:
        self._tried.append((rate, passed))

    @property
    def low(self) -> float:
        """The highest rate that has passed, below all that have failed; 0 for none."""
        high = self.high
        return max((rate for rate, passed in self._tried if passed and (high is None or rate < high)), default=0.0)

    @property
    def high(self) -> float | None:
        """The lowest rate that has failed."""
        return min((rate for rate, passed in self._tried if not passed), default=None)

    @property
    def bracketed(self) -> bool:
        """Whether a rate has passed and a higher one has failed."""
        return self.low > 0 and self.high is not None

    def next_rate(self) -> float | None:
        """None when the search is over."""
        low, high = self.low, self.high
        if not self._tried:
            return self._start
        if high is None:
            return min(low * self._outward(), self._highest) if low < self._highest else None
        if not low:
            return max(high / self._outward(), self._lowest) if high > self._lowest else None
        return math.sqrt(low * high) if high > low * (1 + self._precision) else None

    def _outward(self) -> float:
        step = self._step
        self._step = min(_MOST_STEP, step * step)
        return step
