"""What a gate believes of a device: a latency model, corrected by what batches really took."""

import bisect
from collections import deque

from tidegate.base.stats import PredictionError
from tidegate.slo.accuracy import KINDS, kind_of, summary
from tidegate.slo.gate import Observation
from tidegate.slo.latency import LatencyModel


class Errors:
    """The last measured times of steps, relative to what was predicted."""

    KEPT = 512
    GUESS = (1.0, 1.05)  # quantiles below and above which there is nothing, before anything was measured

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, ratio: float) -> None:
        self._recent.append(ratio)
        bisect.insort(self._sorted, ratio)
        if len(self._recent) > self.KEPT:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]

    def recent(self) -> list[float]:
        """Ascending."""
        return self._sorted

    def quantile(self, fraction: float) -> float:
        """Of the ratios; a guess while there are too few to tell."""
        count = len(self._sorted)
        if count * (1.0 - fraction) < 1.0:
            return max([self.GUESS[1], *self._sorted[-1:]]) if fraction > 0.5 else self.GUESS[0]
        return self._sorted[min(count - 1, int(count * fraction))]


class Belief:
    """``model`` with one factor a kind of step (``slo.accuracy.KINDS``), which follows the kind's mean error. It is the
    core's, which tells it of each batch; gates read it."""

    WEIGHT = 0.05  # of a new observation

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self._factors: dict[str, float] = {}
        self._errors: dict[str, Errors] = {kind: Errors() for kind in KINDS}

    @property
    def factors(self) -> dict[str, float]:
        """By kind, of those that there were."""
        return dict(self._factors)

    def accuracy(self) -> dict[str, PredictionError]:
        """Of the last steps, factor included, by kind; those that there were."""
        recent = {kind: errors.recent() for kind, errors in self._errors.items()}
        return {kind: summary(abs(1.0 / ratio - 1.0) for ratio in ratios) for kind, ratios in recent.items() if ratios}

    def factor(self, kind: str) -> float:
        """By which steps of this kind take longer than the model says."""
        return self._factors.get(kind, 1.0)

    def guard(self, kind: str, fraction: float) -> float:
        """That ``fraction`` of the steps of a kind took at most so many times what was predicted, factor included."""
        return self._errors[kind].quantile(fraction)

    def observe(self, seen: Observation) -> None:
        kind = kind_of(seen.work, seen.beside)
        predicted = self.model.seconds(seen.work, seen.lane, seen.share, seen.beside)
        factor = self.factor(kind)
        self._errors[kind].add(seen.seconds / (predicted * factor))
        self._factors[kind] = factor + self.WEIGHT * (min(max(seen.seconds / predicted, 0.5), 2.0) - factor)
