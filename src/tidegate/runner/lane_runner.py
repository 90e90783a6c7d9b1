"""What a lane on a GPU needs of a runner: steps are enqueued without waiting, and collected later."""

from typing import Any, NamedTuple, Protocol

import torch

from tidegate.base.batch import Batch, BatchResult
from tidegate.base.clock import now_s
from tidegate.device.places import Place
from tidegate.runner.sampler import Sampled
from tidegate.runner.shapes import StepShape


class Mark(Protocol):
    """A point in a place's work: a CUDA event, or a ``HostMark``."""

    def synchronize(self) -> None:
        """Waits until the work has got there."""
        ...

    def query(self) -> bool:
        """Whether it has."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to there."""
        ...


class HostMark:
    """Where work has been done by the time that it is given."""

    def __init__(self) -> None:
        self._at_s = now_s()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return float(end_event._at_s - self._at_s) * 1e3


def mark(place: Place) -> Mark:
    """What has been enqueued on a place so far."""
    if place.stream is None:
        return HostMark()
    event = torch.cuda.Event(enable_timing=True)
    event.record(place.stream)
    return event


class Pending(Protocol):
    """A batch on its way."""

    @property
    def batch_id(self) -> int: ...

    def ended(self) -> bool:
        """Whether there is nothing to wait for any more."""
        ...

    def collect(self) -> BatchResult:
        """Waits for the batch; other threads run meanwhile."""
        ...


class Enqueued(NamedTuple):
    """Implements ``Pending``. Whatever lies on the host is there once ``done`` is reached."""

    batch_id: int
    start: Mark
    done: Mark
    tokens: torch.Tensor  # int64, on the host
    rows: list[int]  # where each sampled row's token is
    sampled: Sampled | None  # on the host; set where the sampler chose

    def ended(self) -> bool:
        return self.done.query()

    def collect(self) -> BatchResult:
        """Waits for the batch; other threads run meanwhile."""
        self.done.synchronize()
        tokens = self.tokens.tolist()
        logprobs = self.sampled.logprob_records() if self.sampled else None
        seconds = self.start.elapsed_time(self.done) / 1e3
        return BatchResult(self.batch_id, [tokens[row] for row in self.rows], logprobs, seconds)


class LaneRunner(Protocol):
    """One lane's, used by one thread; any may read ``hybrid_attention``, and one other may ``prepare`` shapes for a
    further place that are prepared for one already."""

    @property
    def hybrid_attention(self) -> dict[str, int]:
        """See ``LaneStats``; of batches that may have it fused."""
        ...

    def prepared(self, shape: StepShape, place: Place) -> bool:
        """Whether a step of this shape can start there without further ado."""
        ...

    def prepare(self, shape: StepShape, place: Place) -> None:
        """Makes it so. Work that the lane has enqueued is not disturbed."""
        ...

    def enqueue(self, batch: Batch, place: Place) -> Pending:
        """Returns as soon as all work has been given to the device; it runs after the lane's batch before."""
        ...
