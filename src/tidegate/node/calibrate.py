"""From measured steps to a latency model, within a time: the most important steps first, then more of them, then some
of random sizes that the model has not been fitted to, for its error.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tidegate.base.stats import PredictionError
from tidegate.node.measure import Measure
from tidegate.node.probes import Alone, Both, Probe, Reach, Trial, least, more, unseen
from tidegate.slo.accuracy import errors_by_kind, summary
from tidegate.slo.latency import LatencyModel, Padding, Sample, Work, fit, relative_errors

UNSEEN_FRACTION = 0.2  # of the time
LEAST_UNSEEN = 5  # samples, with fewer of which the error is that of the samples fitted to
LEAST_PROGRESS = 4  # the least counts as a fourth of all, until more time has passed than that
LONGEST = 2.0  # slices' set time; a step that takes longer is not asked for
LEAST_OF_PART = {"P": 2, "D": 3}  # samples of a lane alone on its part, for the part to count


class Measured(msgspec.Struct, frozen=True):
    """A latency model and how good it is."""

    model: LatencyModel
    samples: int  # that it was fitted to
    unseen: int  # others, that it was judged by; 0: it was judged by the same
    error: PredictionError
    by_kind: dict[str, PredictionError]

    def __str__(self) -> str:
        others = f"{self.unseen} other steps" if self.unseen else "the same"
        return (
            f"fitted to {self.samples} steps, off by {self.error.p50:.1%} (p50), {self.error.p95:.1%} (p95) on {others}"
        )


class Calibration:
    """One run. ``samples`` were fitted to, ``unseen`` were not."""

    def __init__(
        self, measure: Measure, clock: Callable[[], float], seconds: float, slice_seconds: float, padding: Padding,
        progress: Callable[[float], None],
    ) -> None:  # fmt: skip
        """``seconds``: after which no batch is launched any more; but the least is measured however long it takes."""
        self.samples: list[Sample] = []
        self.unseen: list[Sample] = []
        self._measure, self._clock, self._progress = measure, clock, progress
        self._padding = padding
        self._slice_s, self._longest_s = slice_seconds, LONGEST * slice_seconds
        self._start_s, self._seconds = clock(), seconds

    def run(self, reach: Reach, fine: bool = False, seed: int = 0) -> Measured:
        """``fine``: a grid for when there is time. ``seed``: of the random sizes."""
        few = least(reach)
        for i, trial in enumerate(few):
            self._progress(max(self._passed, i / LEAST_PROGRESS / len(few)))
            self.samples += self._measure.trial(trial, lambda: False)
        first = fit(self.samples, self._padding)
        usual = first.whole.most_new(Work(), 0, reach.new, self._slice_s, reach.least_new)
        reach = reach._replace(usual_new=max(usual, reach.least_new))
        self._go_on(first, more(reach, fine), 1.0 - UNSEEN_FRACTION, self.samples)
        self.samples = sound(self.samples)
        model = fit(self.samples, self._padding)
        divided = {round(division.share, 3) for division in model.divisions}
        reach = reach._replace(shares=tuple(share for share in reach.shares if round(share, 3) in divided))
        # Where the grid was done early, this is too.
        self._go_on(model, unseen(reach, seed), min(1.0, self._passed / (1.0 - UNSEEN_FRACTION)), self.unseen)
        judged = self.unseen if len(self.unseen) >= LEAST_UNSEEN else self.samples
        return Measured(
            fit([*self.samples, *self.unseen], self._padding),  # better still than the one that is judged
            len(self.samples),
            len(self.unseen) if judged is self.unseen else 0,
            summary(relative_errors(model, judged)),
            errors_by_kind(model, judged),
        )

    def _go_on(self, model: LatencyModel, trials: Iterable[Trial], until: float, samples: list[Sample]) -> None:
        """With those trials that do not take too long, until so much of the time has passed."""
        for trial in trials:
            if self._passed >= until:
                return
            self._progress(self._passed)
            if self._affordable(model, trial):
                samples += self._measure.trial(trial, lambda: self._passed >= until)

    @property
    def passed_s(self) -> float:
        return self._clock() - self._start_s

    @property
    def _passed(self) -> float:
        """Fraction of the time."""
        return self.passed_s / self._seconds if self._seconds > 0 else 1.0

    def _affordable(self, model: LatencyModel, trial: Trial) -> bool:
        def seconds(lane: str, share: float, probe: Probe) -> float:
            return model.seconds(probe.work, lane, share, beside=False)

        match trial:
            case Alone(lane, share, probe):
                return seconds(lane, share, probe) <= self._longest_s
            case Both(share, prefill, decode):
                return max(seconds("P", share, prefill), seconds("D", 1.0 - share, decode)) <= self._longest_s


def sound(samples: Sequence[Sample]) -> list[Sample]:
    """Without those of divisions that there was no time to measure well enough."""

    def division(sample: Sample) -> float:
        return round(sample.share if sample.lane == "P" else 1.0 - sample.share, 3)

    parts = [s for s in samples if s.share < 1.0]
    alone = Counter((division(s), s.lane) for s in parts if not s.beside)
    beside = Counter((division(s), s.lane) for s in parts if s.beside)
    good = {
        share
        for share in map(division, parts)
        if all(alone[share, lane] >= few and beside[share, lane] for lane, few in LEAST_OF_PART.items())
    }
    return [s for s in samples if s.share >= 1.0 or division(s) in good]
