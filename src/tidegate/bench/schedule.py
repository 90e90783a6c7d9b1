"""A workload that changes in time: one workload for some seconds, then another."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from tidegate.bench.traces import Trace
from tidegate.bench.workloads import Workload


class Step(NamedTuple):
    """``seconds`` are infinite for a last step that does not end."""

    workload: Workload | Trace
    seconds: float


class Schedule(NamedTuple):
    """Its steps one after another, and again from the first unless the last does not end."""

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

    def step_at(self, at_s: float) -> int:
        """The index of the step that a request at this time belongs to."""
        ends_s = list(accumulate(step.seconds for step in self.steps))
        within_s = at_s % ends_s[-1] if math.isfinite(ends_s[-1]) else at_s
        return min(bisect_right(ends_s, within_s), len(self.steps) - 1)
