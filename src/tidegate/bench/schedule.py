"""A workload that changes in time: one workload for some seconds, then another, also at other rates."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from tidegate.bench.traces import Trace
from tidegate.bench.workloads import Workload


class Step(NamedTuple):
    """``seconds`` are infinite for a last step that does not end. ``rate``: in requests per second; None where all
    steps have the same."""

    workload: Workload | Trace
    seconds: float
    rate: float | None = None


class Schedule(NamedTuple):
    """Its steps one after another, and again from the first unless the last does not end. Either all steps end and have
    rates, or none has."""

    steps: Sequence[Step]

    @property
    def period_s(self) -> float | None:
        """After which it repeats itself; None when it does not."""
        seconds = math.fsum(step.seconds for step in self.steps)
        return seconds if math.isfinite(seconds) else None

    @property
    def lead_s(self) -> float:
        """Until the last step has begun, or the first turn has ended."""
        return math.fsum(step.seconds for step in self.steps if math.isfinite(step.seconds))

    @property
    def mean_rate(self) -> float | None:
        """Of all steps, in requests per second; None where they have no rates."""
        requests = [step.seconds * step.rate for step in self.steps if step.rate is not None]
        return math.fsum(requests) / self.lead_s if requests else None

    def step_at(self, at_s: float) -> int:
        """The index of the step that a request at this time belongs to."""
        ends_s = list(accumulate(step.seconds for step in self.steps))
        within_s = at_s % ends_s[-1] if math.isfinite(ends_s[-1]) else at_s
        return min(bisect_right(ends_s, within_s), len(self.steps) - 1)

    def at_s(self, even_s: float) -> float:
        """When there have been as many arrivals as there are after ``even_s`` at an even rate of the same mean."""
        mean = self.mean_rate
        if mean is None:
            return even_s
        turns, rest_s = divmod(even_s, self.lead_s)
        start_s = turns * self.lead_s
        for step in self.steps:
            speed = (step.rate or mean) / mean
            if rest_s <= step.seconds * speed:
                return start_s + rest_s / speed
            rest_s -= step.seconds * speed
            start_s += step.seconds
        return start_s
