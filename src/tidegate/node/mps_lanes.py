"""Lanes as processes on one GPU whose shares are fixed when they start (MPS).

A lane that is kept to a part has one process for its part and one for the whole device, where its batches run while it
is alone; the others have the one for the whole device only. A change of shares is prepared by processes that nobody
waits for, and is in force from each lane's next step on (``node.rotation``).

Why batches may move from one process to another:
  - The block table is a memory file that the node writes and all lanes map. A batch's entries are written before the
    batch is sent, and belong to a slot that is its request's until every batch that names it has been answered: so
    nobody reads an entry while it changes, whichever processes the batches are in (DESIGN's first two invariants).
  - A lane's batches run one after another. Within a process the device's stream sees to that. Between processes nothing
    would: so a lane's batch is kept here until what its other process has in flight has been answered.
  - Sampling parameters are all that a process knows of a request. Each is told what it has missed with its next batch.
"""

import logging
import os
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.base.batch import Batch, SlotSetup
from tidegate.base.clock import now_s
from tidegate.base.events import BatchDone, BatchEnding, Event, LaneGone, LaneLost, LaneReady
from tidegate.device.pool import Pool
from tidegate.node import wire
from tidegate.node.lane_host import LaneReading
from tidegate.node.lane_watch import LaneWatch
from tidegate.node.mps_worker import Worker
from tidegate.node.rotation import Division, Move, Prepare, Retire, Rotation, Spare, Swap
from tidegate.runner.inputs import apply_tables

log = logging.getLogger("tidegate.node")

WHOLE = 100  # per cent
CLOSE_SECONDS = 3.0  # that processes are given to end by themselves; well within what the engine is given to close


class Service(Protocol):
    """What makes shares of a device: see ``device.mps.MpsDaemon``."""

    def start(self) -> None:
        """Anew, if it runs."""
        ...

    def watch(self) -> int | None: ...

    def close(self) -> None: ...


@dataclass
class _Lane:
    name: str
    worker: Worker | None = None  # that has the lane's batches in flight, or had the last one
    waiting: deque[Batch] = field(default_factory=deque)  # launched, and not given to a process yet
    setups: dict[int, SlotSetup] = field(default_factory=dict)  # the latest of each slot
    up: bool = False  # as the node has been told
    was_up: bool = False


class MpsLanes:
    """Implements ``LaneHost``."""

    def __init__(
        self, pool: Pool, rotation: Rotation, divide: Callable[[dict[str, float]], Division],
        spawn: Callable[[str, int], Worker], service: Service,
    ) -> None:  # fmt: skip
        """``divide``: shares to percentages. ``spawn``: starts a process of a lane with so many per cent."""
        self._pool, self._rotation, self._divide, self._spawn, self._service = pool, rotation, divide, spawn, service
        self._service_up = False  # as far as is known
        self._service_life: int | None = None  # readable when the service has ended
        self._lanes: dict[str, _Lane] = {}
        self._workers: dict[tuple[str, int], Worker] = {}
        self._losses = LaneWatch()  # of processes that a lane could do without
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._register: Callable[[int, Callable[[], list[Event]]], None] = lambda fd, receive: None
        self._forget: Callable[[int], None] = lambda fd: None

    # ---- the node's side

    def start(self, lane: str) -> None:
        if not self._service_up:
            self._service.start()
            self._service_up, self._service_life = True, self._service.watch()
            if self._service_life is not None:
                self._register(self._service_life, self._service_died)
        self._lanes.setdefault(lane, _Lane(lane))
        self._fill(lane)
        for event in self._tell(lane):
            self._events.put(event)
            os.eventfd_write(self._bell, 1)

    def launch(self, lane: str, batch: Batch) -> None:
        apply_tables(self._pool.table, batch.tables)
        state = self._lanes[lane]
        state.waiting.append(batch)
        self._feed(state)

    def prepare_shares(self, shares: dict[str, float]) -> None:
        self._carry_out(self._rotation.want(self._divide(shares)))

    def reading(self, lane: str, alone: bool) -> LaneReading:
        """The memory is that of all its processes."""
        worker = self._pick(lane, alone)
        extra = sum(w.reading.extra_memory_bytes for w in self._workers.values() if w.lane == lane)
        return LaneReading(worker.reading.sms if worker else 0, extra)

    def watch(self, register: Callable[[int, Callable[[], list[Event]]], None], forget: Callable[[int], None]) -> None:
        self._register, self._forget = register, forget
        register(self._bell, self._hear_bell)
        if self._service_life is not None:
            register(self._service_life, self._service_died)
        for worker in self._workers.values():
            self._watch(worker)

    def pids(self) -> dict[str, int]:
        """Of the processes that run what is beside another lane."""
        workers = {name: self._pick(name, alone=False) for name in self._lanes}
        return {name: worker.pid for name, worker in workers.items() if worker}

    def close(self) -> None:
        workers, by = list(self._workers.values()), now_s() + CLOSE_SECONDS
        for worker in workers:
            worker.leave()
        for worker in workers:
            worker.end(by)
        self._workers.clear()
        self._lanes.clear()
        self._service.close()

    # ---- batches

    def _feed(self, lane: _Lane) -> None:
        """Gives waiting batches to the process that they run on now, once no other has any of the lane's."""
        while lane.waiting:
            worker = self._pick(lane.name, alone=lane.waiting[0].share >= 1.0)
            if worker is None or (lane.worker is not None and lane.worker is not worker and lane.worker.busy):
                return
            lane.worker = worker
            batch = lane.waiting.popleft()
            worker.run(batch)
            setups = {setup.slot: setup for setup in batch.setups}
            lane.setups |= setups
            for other in self._workers.values():
                if other.lane == lane.name and other is not worker:
                    other.missed |= setups

    def _pick(self, lane: str, alone: bool) -> Worker | None:
        """Where a batch runs: on the whole device or on the lane's part; in the other while the right one is not up."""
        percents = self._serving(lane)
        for percent in percents if alone else reversed(percents):
            worker = self._workers.get((lane, percent))
            if worker is not None and worker.able:
                return worker
        return None

    # ---- processes

    def _serving(self, lane: str) -> list[int]:
        """The percentages for which a lane has processes to run its batches."""
        part = self._rotation.active.percent(lane)
        return [WHOLE] if part is None else [WHOLE, part]

    def _fill(self, lane: str) -> None:
        for percent in self._serving(lane):
            self._add(lane, percent)

    def _add(self, lane: str, percent: int) -> None:
        if (lane, percent) not in self._workers:
            worker = self._workers[lane, percent] = self._spawn(lane, percent)
            worker.missed |= self._lanes[lane].setups
            self._watch(worker)

    def _has(self, worker: Worker) -> bool:
        return self._workers.get((worker.lane, worker.percent)) is worker

    def _watch(self, worker: Worker) -> None:
        if not worker.closed:
            self._register(worker.fileno(), lambda: self._hear(worker))
        self._register(worker.life, lambda: self._ended(worker))

    def _hear_bell(self) -> list[Event]:
        os.eventfd_read(self._bell)
        events: list[Event] = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def _hear(self, worker: Worker) -> list[Event]:
        events: list[Event] = []
        if worker.closed or not self._has(worker):
            return events  # it has been dealt with since it became readable
        for message in worker.receive():
            match message:
                case wire.LaneEnding(batch_id):
                    events.append(BatchEnding(worker.lane, batch_id))
                case wire.LaneResult(result):
                    events.append(BatchDone(worker.lane, result))
                case wire.LaneUp():
                    events += self._came_up(worker)
        if worker.closed:
            self._forget(worker.fileno())
        self._feed(self._lanes[worker.lane])
        return events

    def _came_up(self, worker: Worker) -> list[Event]:
        log.info("%r is up", worker)
        preparing = self._rotation.state is Spare.PREPARING and self._is_spare(worker)
        if preparing and all(spare.up for spare in self._spares()):
            self._carry_out(self._rotation.prepared())
        return self._tell(worker.lane)

    def _tell(self, lane: str) -> list[Event]:
        """LaneReady, if the lane is up and the node does not know it: at first with all of its processes, after a loss
        with any."""
        state = self._lanes[lane]
        workers = [self._workers.get((lane, percent)) for percent in self._serving(lane)]
        up = [worker is not None and worker.able for worker in workers]
        if state.up or not (any(up) if state.was_up else all(up)):
            return []
        state.up = state.was_up = True
        return [LaneReady(lane)]

    def _is_spare(self, worker: Worker) -> bool:
        """Whether the division that is not in force needs it, and the one in force does not."""
        spare, percent = self._rotation.spare, worker.percent
        return spare is not None and spare.percent(worker.lane) == percent and percent not in self._serving(worker.lane)

    def _spares(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if self._is_spare(worker)]

    def _carry_out(self, moves: list[Move]) -> None:
        pending = deque(moves)
        while pending:
            match pending.popleft():
                case Prepare(division):
                    for lane in self._lanes:
                        percent = division.percent(lane)
                        if percent is not None:
                            self._add(lane, percent)
                    if all(spare.up for spare in self._spares()):
                        pending += self._rotation.prepared()
                case Swap(division):
                    log.info("in force: %s", division)
                    for lane in self._lanes:
                        self._fill(lane)  # one may have been started after the division was prepared
                case Retire():
                    for worker in self._spares():
                        worker.leave()
                    if not self._spares():
                        pending += self._rotation.retired()

    # ---- ends

    def _ended(self, worker: Worker) -> list[Event]:
        """A process has ended: it was told to leave, has failed or was killed."""
        events = self._hear(worker)  # its last words
        if not self._has(worker):
            return events
        serving, lane, failure = worker.percent in self._serving(worker.lane), self._lanes[worker.lane], worker.failure
        status = self._drop(worker)
        reason = failure.reason if failure else f"its process ended with status {status}"
        if serving and failure is not None and failure.no_context:
            return events + self._all_lost(f"no process can use the device any more: {reason}")
        if serving and failure is not None and not lane.was_up:  # it would fail again
            return [*events, LaneGone(lane.name, reason, failure.config)]
        running = lane.worker is worker and worker.busy
        if lane.worker is worker:
            lane.worker = None
        if not serving:
            self._end_spare(worker, reason)
        if running or (serving and self._pick(lane.name, alone=True) is None):
            return events + self._lost(lane, reason)
        if serving:
            log.error("%r was lost, and the lane does without it meanwhile: %s", worker, reason)
            if self._losses.may_restart(repr(worker), now_s()):
                self._add(lane.name, worker.percent)
        self._feed(lane)
        return events

    def _end_spare(self, worker: Worker, reason: str) -> None:
        """A process of a division that is not in force has ended: the others of it end too."""
        if self._rotation.state in (Spare.PREPARING, Spare.READY):
            log.error("%r was lost while another one served: %s", worker, reason)
            self._carry_out(self._rotation.failed())
            if self._rotation.gave_up:
                log.error("the shares stay as they are: %s could not be had", self._rotation.wanted)
        elif self._rotation.state is Spare.ENDING and not self._spares():
            self._carry_out(self._rotation.retired())

    def _lost(self, lane: _Lane, reason: str) -> list[Event]:
        """What the lane has in flight is not to happen, in whichever process."""
        lane.up = False
        lane.waiting.clear()
        worker, lane.worker = lane.worker, None
        if worker is not None and worker.busy and self._has(worker):
            serving = worker.percent in self._serving(lane.name)
            self._drop(worker)
            if not serving:
                self._end_spare(worker, reason)
        return [LaneLost(lane.name, reason)]

    def _service_died(self) -> list[Event]:
        return self._all_lost("the daemon that shares the device has ended")

    def _all_lost(self, reason: str) -> list[Event]:
        """Nothing that runs can be relied on: all processes end, and start again with a fresh service."""
        log.error("%s: it is started again, and all lanes with it", reason)
        if self._service_life is not None:
            self._forget(self._service_life)
            os.close(self._service_life)
        self._service_up, self._service_life = False, None
        for worker in list(self._workers.values()):
            self._drop(worker)
        self._rotation.reset()
        if not any(lane.was_up for lane in self._lanes.values()):
            said = f"lanes can't share the device by MPS here ({reason}): choose another --sharing"
            return [LaneGone(lane, said, config=True) for lane in list(self._lanes)[:1]]
        return [event for lane in self._lanes.values() for event in self._lost(lane, reason)]

    def _drop(self, worker: Worker) -> int:
        """Kills it, if it has not ended; its exit status."""
        if not worker.closed:
            self._forget(worker.fileno())
        self._forget(worker.life)
        del self._workers[worker.lane, worker.percent]
        return worker.end()
