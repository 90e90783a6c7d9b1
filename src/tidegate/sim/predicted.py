"""A device that predicts instead of computing: how long batches take, also while two lanes slow each other down.

The model it predicts with is the *truth* of a simulation; what the core's gate believes is another argument.
"""

import math
import random
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tidegate.base.batch import Batch, BatchResult
from tidegate.core.steady import TOKEN
from tidegate.slo.accuracy import kind_of
from tidegate.slo.latency import LatencyModel, Work

AS_MEASURED: Mapping[str, float] = MappingProxyType({})
BESIDE = "side by side"  # what runs while both lanes do; else the kind of the one batch


class Job(NamedTuple):
    """A batch, as far as its time depends on it."""

    id: int
    work: Work
    share: float  # of the device
    samples: int  # tokens that come out of it


class Running:
    """A batch on a lane. ``left_s``: of its time if it had the device to itself."""

    __slots__ = ("end_s", "job", "lane", "left_s", "slowdown", "start_s", "warned")

    def __init__(self, job: Job, lane: str, start_s: float, left_s: float, slowdown: float) -> None:
        self.job, self.lane, self.start_s, self.left_s, self.slowdown = job, lane, start_s, left_s, slowdown
        self.end_s = math.inf  # as things are now
        self.warned = False  # whether its end has been announced


class PredictedDevice:
    """Two lanes at most. A lane's batches run in the order of their launch."""

    def __init__(
        self,
        truth: LatencyModel,
        noise: float = 0.0,
        seed: int = 0,
        launch_s: float = 0.0,
        factors: Mapping[str, float] = AS_MEASURED,
    ) -> None:
        """``noise``: standard deviation of the logarithm of each batch's time. ``launch_s``: from a launch to the
        start of its batch, where the lane is idle. ``factors``: by kind of step, by which all take longer."""
        self._truth, self._noise, self._launch_s, self._factors = truth, noise, launch_s, factors
        self._rng = random.Random(seed)
        self._running: dict[str, Running] = {}
        self._queued: dict[str, deque[tuple[Job, float]]] = {}
        self._now = 0.0
        self._next: Running | None = None  # the one that ends first; the same of those that are not announced
        self._next_to_warn: Running | None = None
        self.busy_s: dict[str, float] = {}
        self.spent_s: dict[str, float] = {}  # by what ran, while anything did

    def launch(self, lane: str, batch: Batch, now: float) -> None:
        self.take(lane, Job(batch.id, Work.of(batch), batch.share, batch.num_sampled), now)

    def take(self, lane: str, job: Job, now: float) -> None:
        self._advance(now)
        self._queued.setdefault(lane, deque()).append((job, now + self._launch_s))
        if lane not in self._running:
            self._start(lane, now)
        self._repredict()

    def next_end_s(self) -> float:
        return self._next.end_s if self._next is not None else math.inf

    def next_warning_s(self, lead_s: float) -> float:
        """When the next end should be announced, ``lead_s`` before it."""
        return max(self._next_to_warn.end_s - lead_s, self._now) if self._next_to_warn is not None else math.inf

    def warn(self, now: float, lead_s: float) -> tuple[str, int]:
        """The lane and batch whose end is to be announced now."""
        running = self._next_to_warn
        assert running is not None
        running.warned = True
        self._find_next()
        return running.lane, running.job.id

    def end(self, now: float) -> tuple[str, BatchResult]:
        """The batch that ends now, and the next one of its lane starts."""
        self._advance(now)
        running = self._next
        assert running is not None
        del self._running[running.lane]
        if self._queued[running.lane]:
            self._start(running.lane, now)
        self._repredict()
        job = running.job
        return running.lane, BatchResult(job.id, [TOKEN] * job.samples, None, now - running.start_s)

    def _start(self, lane: str, now: float) -> None:
        job, ready_s = self._queued[lane].popleft()
        alone = self._truth.seconds(job.work, lane, job.share, beside=False)
        divided = job.share < 1.0
        slowdown = self._truth.seconds(job.work, lane, job.share, beside=True) / alone if divided else 1.0
        longer = math.exp(self._rng.gauss(0.0, self._noise)) * self._factors.get(kind_of(job.work, divided), 1.0)
        left = alone * longer + max(0.0, ready_s - now)
        self._running[lane] = Running(job, lane, now, left, slowdown)

    def _advance(self, now: float) -> None:
        both = len(self._running) > 1
        passed = now - self._now
        for running in self._running.values():
            running.left_s -= passed / (running.slowdown if both else 1.0)
            self.busy_s[running.lane] = self.busy_s.get(running.lane, 0.0) + passed
        if self._running and passed:
            what = BESIDE if both else kind_of(running.job.work, beside=False)
            self.spent_s[what] = self.spent_s.get(what, 0.0) + passed
        self._now = now

    def _repredict(self) -> None:
        both = len(self._running) > 1
        for running in self._running.values():
            running.end_s = self._now + max(0.0, running.left_s) * (running.slowdown if both else 1.0)
        self._find_next()

    def _find_next(self) -> None:
        first = first_to_warn = None
        for running in self._running.values():
            if first is None or running.end_s < first.end_s:
                first = running
            if not running.warned and (first_to_warn is None or running.end_s < first_to_warn.end_s):
                first_to_warn = running
        self._next, self._next_to_warn = first, first_to_warn
