"""Tensor parallelism on GPUs, the other ranks' side: a thread for each lane does what rank 0's lane does.

Numbered things are done in the order of their numbers over all lanes (``node.lead`` gives them out). The rest, captures
that need no other rank, hold up only their own lane.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidegate.device.places import Part, Place
from tidegate.device.pool import Pool
from tidegate.node import wire
from tidegate.runner.inputs import apply_tables
from tidegate.runner.lane_runner import LaneRunner, Pending
from tidegate.runner.shapes import StepShape

Step = wire.PrepareStep | wire.RunStep | wire.StepDone
Order = wire.StartLane | Step


class Turns:
    """Lets threads do numbered things in the order of their numbers, from 1 on."""

    def __init__(self) -> None:
        self._next = 1
        self._changed = threading.Condition()

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Waits for one's turn; 0 has none. A turn that fails never ends: nothing may come after it."""
        if number == 0:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: self._next == number)
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()


class Follower:
    """One rank's lanes. Its pool's block table is written here, from what comes with the batches."""

    def __init__(
        self,
        pool: Pool,
        make: Callable[[str], LaneRunner],
        place: Callable[[str, Part | None], Place],
        failed: Callable[[Exception], None],
    ) -> None:
        """``failed`` is called by a lane's thread as its last deed."""
        self._pool, self._make, self._place, self._failed = pool, make, place, failed
        self._turns = Turns()
        self._inboxes: dict[str, queue.SimpleQueue[Step | None]] = {}
        self._threads: list[threading.Thread] = []

    def take(self, order: Order) -> None:
        """Hands it to its lane. Orders come as rank 0 has sent them."""
        if isinstance(order, wire.StartLane):
            self._inboxes[order.lane] = queue.SimpleQueue()
            thread = threading.Thread(target=self._guard, args=(order.lane,), name=f"lane-{order.lane}", daemon=True)
            self._threads.append(thread)
            thread.start()
        else:
            self._inboxes[order.lane].put(order)

    def close(self) -> None:
        """Once all that was taken has been done."""
        for inbox in self._inboxes.values():
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _guard(self, lane: str) -> None:
        try:
            self._work(lane, self._inboxes[lane])
        except Exception as error:
            self._failed(error)

    def _work(self, lane: str, inbox: "queue.SimpleQueue[Step | None]") -> None:
        runner = self._make(lane)
        pending: deque[Pending] = deque()
        while (order := inbox.get()) is not None:
            with self._turns.of(order.number):
                match order:
                    case wire.PrepareStep(_, _, shape, part):
                        runner.prepare(StepShape(*shape), self._at(lane, part))
                    case wire.RunStep(_, _, batch, part):
                        apply_tables(self._pool.table, batch.tables)
                        pending.append(runner.enqueue(batch, self._at(lane, part)))
                    case wire.StepDone():
                        pending.popleft().collect()

    def _at(self, lane: str, part: tuple[int, bool] | None) -> Place:
        return self._place(lane, Part(*part) if part is not None else None)
