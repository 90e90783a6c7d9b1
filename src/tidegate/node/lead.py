"""Tensor parallelism on GPUs, rank 0's side: whatever a lane does here, the other ranks are told to do too.

All that the ranks do together has a number, over all lanes. Here it is done in the order of the numbers, and every
other rank does it in that order (``node.follow``), so that no two ranks can wait for each other in different steps, and
graphs are captured for the same shapes and places everywhere. What the ranks choose from, the logits, is the same on
each of them, so nothing is sent back.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from tidegate.base.batch import Batch, BatchResult
from tidegate.device.places import Place
from tidegate.node import wire
from tidegate.runner.lane_runner import LaneRunner, Pending
from tidegate.runner.shapes import StepShape

Tell = Callable[[wire.ToRank], None]


class Lead:
    """Gives out numbers, one holder at a time, to all lanes."""

    def __init__(self, tell: Tell) -> None:
        """``tell`` sends to every other rank, in order, and may be called by any thread."""
        self.tell = tell
        self._turn = threading.Lock()
        self._number = 0

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Held until what has the number has been told to the others and enqueued here."""
        with self._turn:
            self._number += 1
            yield self._number


class LeadingRunner:
    """Implements ``LaneRunner``: one lane's, over the runner of this rank."""

    def __init__(self, lane: str, make: Callable[[str], LaneRunner], lead: Lead) -> None:
        """``make``: this rank's; the others make theirs meanwhile."""
        lead.tell(wire.StartLane(lane))
        self._lane, self._runner, self._lead = lane, make(lane), lead
        self._met: set[StepShape] = set()
        self._using = threading.Lock()  # the lane's communicator: a capture uses it as a batch does

    @property
    def hybrid_attention(self) -> dict[str, int]:
        return self._runner.hybrid_attention

    def prepared(self, shape: StepShape, place: Place) -> bool:
        return self._runner.prepared(shape, place)

    def prepare(self, shape: StepShape, place: Place) -> None:
        """The first time that a shape is prepared it runs, and the ranks meet in it. Later, for other places, each
        captures on its own, and other lanes go on."""
        turn = nullcontext(0) if shape in self._met else self._lead.turn()
        with self._using, turn as number:
            self._lead.tell(wire.PrepareStep(number, self._lane, shape, place.part))
            self._runner.prepare(shape, place)
        self._met.add(shape)

    def enqueue(self, batch: Batch, place: Place) -> Pending:
        with self._using, self._lead.turn() as number:
            self._lead.tell(wire.RunStep(number, self._lane, batch, place.part))
            return _Led(self._lane, self._runner.enqueue(batch, place), self._lead)


class _Led(NamedTuple):
    """Implements ``Pending``. Another lane may read what the batch has written from when it is collected on, so the
    other ranks are told to wait for it too before they go on."""

    lane: str
    enqueued: Pending
    lead: Lead

    @property
    def batch_id(self) -> int:
        return self.enqueued.batch_id

    def ended(self) -> bool:
        return self.enqueued.ended()

    def collect(self) -> BatchResult:
        result = self.enqueued.collect()
        with self.lead.turn() as number:
            self.lead.tell(wire.StepDone(number, self.lane))
        return result
