"""What a gate believes of a device: a latency model, corrected by what batches really took."""

import bisect
from collections import deque

from tidegate.base.stats import PredictionError
from tidegate.slo.accuracy import KINDS, kind_of, summary
from tidegate.slo.gate import Observation
from tidegate.slo.latency import LatencyModel


class Errors:
    """The last measured times of a lane's batches, relative to what was predicted."""

    KEPT = 1024
    GUESS = (1.0, 1.05)  # quantiles below and above which there is nothing, before anything was measured

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, ratio: float) -> None:
        self._recent.append(ratio)
        bisect.insort(self._sorted, ratio)
        if len(self._recent) > self.KEPT:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]

    def quantile(self, fraction: float) -> float:
        """Of the ratios; a guess while there are too few to tell."""
        count = len(self._sorted)
        if count * (1.0 - fraction) < 1.0:
            return max([self.GUESS[1], *self._sorted[-1:]]) if fraction > 0.5 else self.GUESS[0]
        return self._sorted[min(count - 1, int(count * fraction))]


class Belief:
    """``model`` with one factor a lane, which follows the lane's mean error. The core's, which tells it of each batch;
    gates read it."""

    WEIGHT = 0.05  # of a new observation
    RECENT = 512  # steps of a kind, for ``accuracy``

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self._factors: dict[str, float] = {}
        self._errors: dict[str, Errors] = {}
        self._misses: dict[str, deque[float]] = {kind: deque(maxlen=self.RECENT) for kind in KINDS}

    @property
    def factors(self) -> dict[str, float]:
        """By lane, of those that have run."""
        return dict(self._factors)

    def accuracy(self) -> dict[str, PredictionError]:
        """Of the last steps, factor included, by kind; those that there were."""
        return {kind: summary(misses) for kind, misses in self._misses.items() if misses}

    def factor(self, lane: str) -> float:
        """By which the lane's batches take longer than the model says."""
        return self._factors.get(lane, 1.0)

    def guard(self, lane: str, fraction: float) -> float:
        """That ``fraction`` of the lane's batches took at most so many times what was predicted, factor included."""
        return self._errors.setdefault(lane, Errors()).quantile(fraction)

    def observe(self, seen: Observation) -> None:
        predicted = self.model.seconds(seen.work, seen.lane, seen.share, seen.beside)
        factor = self.factor(seen.lane)
        self._errors.setdefault(seen.lane, Errors()).add(seen.seconds / (predicted * factor))
        self._misses[kind_of(seen.work, seen.beside)].append(abs(predicted * factor / seen.seconds - 1.0))
        self._factors[seen.lane] = factor + self.WEIGHT * (min(max(seen.seconds / predicted, 0.5), 2.0) - factor)
