"""Lanes as threads over one GPU: each prepares and enqueues its batches, a second thread waits for them, and a third
captures graphs for the place to which the lane is moving, so that no batch waits for a capture.

Both lanes hold the interpreter only to prepare a step and to launch it; waiting is done without it. A lane says when
its batch is about to end (``BatchEnding``), early enough for the next one to be prepared and enqueued behind it.
"""

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tidegate.base.batch import Batch
from tidegate.base.clock import now_s
from tidegate.base.errors import ConfigError
from tidegate.base.events import BatchDone, BatchEnding, Event, LaneGone, LaneReady
from tidegate.device.places import Place
from tidegate.device.pool import Pool
from tidegate.kernels.collectives import PeerLost
from tidegate.node.foresight import Foresight
from tidegate.node.lane_host import LaneReading
from tidegate.node.moves import Moves
from tidegate.runner.inputs import apply_tables
from tidegate.runner.lane_runner import LaneRunner, Pending
from tidegate.runner.shapes import StepShape, shape_for

NAP_SECONDS = 5e-4  # between looks at whether a step has ended already
SWITCH_SECONDS = 2e-4  # of the interpreter: a lane that prepares a step must not wait long for it

Post = Callable[[Event], None]
CountSms = Callable[[], int]  # 0 while it is not known


@dataclass(frozen=True)
class LanePlan:
    """What a lane starts with."""

    make: Callable[[], LaneRunner]
    place: Callable[[float], Place]  # where it runs that has this share
    share: float  # its own while another lane runs; 1 for the only lane
    ladder: Sequence[StepShape]  # prepared for the whole device before it serves
    beside: Sequence[StepShape]  # the same for its own place; what it runs there
    progress: Callable[[float], None]
    count_sms: Callable[[Place], CountSms]
    reserved_bytes: Callable[[], int]  # of the device's memory, by all lanes
    moving: Sequence[float] = ()  # other shares that a gate may give it at any step: prepared before it serves, too


class _Captured(NamedTuple):
    """What was to be captured has been."""


class _Step(NamedTuple):
    pending: Pending
    kind: tuple[StepShape, Place]
    ready: float  # when it had been given to the device
    expected_s: float


class LaneThreads:
    """One lane: a thread that enqueues and one that collects, in order, and one that captures beside them."""

    def __init__(self, name: str, plan: LanePlan, starting: threading.Lock, post: Post) -> None:
        self._name, self._plan, self._starting, self._post = name, plan, starting, post
        # A float is a share to prepare.
        self._inbox: queue.SimpleQueue[Batch | float | _Captured | None] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[tuple[StepShape, Place] | None] = queue.SimpleQueue()  # to be captured
        self._enqueued: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._foresight = Foresight()
        self._runner: LaneRunner | None = None
        self._moves: Moves | None = None  # set last: from then on the lane can be read
        self._sms: dict[Place, CountSms] = {}
        self._extra_bytes = 0
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"lane-{name}-{work.__name__}", daemon=True)
            for work in (self._enqueue, self._capture, self._collect)
        ]
        for thread in self._threads:
            thread.start()

    def launch(self, batch: Batch) -> None:
        self._inbox.put(batch)

    def prepare_share(self, share: float) -> None:
        self._inbox.put(share)

    def reading(self, alone: bool) -> LaneReading:
        if self._moves is None or self._runner is None:
            return LaneReading()
        place = self._plan.place(1.0) if alone else self._moves.in_force
        count = self._sms.get(place)
        return LaneReading(count() if count else 0, self._extra_bytes, self._runner.hybrid_attention)

    def close(self) -> None:
        self._inbox.put(None)
        for thread in self._threads:
            thread.join()

    # ---- the thread that enqueues

    def _enqueue(self) -> None:
        with self._starting:  # one lane at a time, so that what each adds to the memory in use can be told
            before = self._plan.reserved_bytes()
            runner, moves = self._start()
            self._extra_bytes = self._plan.reserved_bytes() - before
        self._runner, self._moves = runner, moves
        self._post(LaneReady(self._name))
        capturing = False
        while True:
            if not capturing and (wanted := moves.next()) is not None:
                self._wanted.put(wanted)
                capturing = True
            match self._inbox.get():
                case None:
                    break
                case Batch() as batch:
                    self._run(runner, moves, batch)
                case _Captured():
                    moves.captured()
                    capturing = False
                case share:
                    moves.aim(self._place(share))

    def _start(self) -> tuple[LaneRunner, Moves]:
        plan = self._plan
        runner = plan.make()
        whole, beside = self._place(1.0), self._place(plan.share)
        wanted = [(shape, whole) for shape in plan.ladder]
        for place in dict.fromkeys((beside, *map(self._place, plan.moving))):
            if place is not whole:
                wanted += [(shape, place) for shape in plan.beside]
        # The largest first: what smaller ones need, they find in the memory that those have left.
        wanted.sort(key=lambda item: (item[0].prefill_tokens + item[0].decodes, item[0].decodes), reverse=True)
        for i, (shape, place) in enumerate(wanted):
            runner.prepare(shape, place)
            plan.progress((i + 1) / len(wanted))
        return runner, Moves(runner.prepared, plan.beside, whole, beside)

    def _run(self, runner: LaneRunner, moves: Moves, batch: Batch) -> None:
        came = now_s()
        self._foresight.came(came)
        shape = shape_for(batch.num_prefill_tokens, len(batch.decode_slots))
        place = moves.place_for(shape, self._place(batch.share))
        enqueued = runner.enqueue(batch, place)
        ready = now_s()
        self._foresight.prepared(ready - came)
        self._enqueued.put(_Step(enqueued, (shape, place), ready, batch.expected_s))

    def _place(self, share: float) -> Place:
        place = self._plan.place(share)
        if place not in self._sms:
            self._sms[place] = self._plan.count_sms(place)
        return place

    # ---- the thread that captures

    def _capture(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            assert self._runner is not None
            self._runner.prepare(*wanted)
            self._inbox.put(_Captured())

    # ---- the thread that collects

    def _collect(self) -> None:
        free = now_s()  # when the lane's stream became, or will become, free
        while (step := self._enqueued.get()) is not None:
            pending, now = step.pending, now_s()
            ending = now + self._foresight.wait_before_ending(step.kind, max(step.ready, free), now, step.expected_s)
            while now < ending and not pending.ended():  # it may end before it is expected to
                time.sleep(min(ending - now, NAP_SECONDS))
                now = now_s()
            self._foresight.asked(now)
            self._post(BatchEnding(self._name, pending.batch_id))
            result = pending.collect()
            free = now_s()
            self._foresight.ended()
            self._foresight.observed(step.kind, result.seconds, step.expected_s)
            self._post(BatchDone(self._name, result))

    def _guard(self, work: Callable[[], None]) -> None:
        """A device that has failed can't be used again from this process: there is no starting the lane anew."""
        try:
            work()
        except ConfigError as error:
            self._post(LaneGone(self._name, str(error), config=True))
        except PeerLost:
            pass  # ``fail`` tells which rank it was
        except torch.OutOfMemoryError:
            traceback.print_exc()
            reason = (
                f"the GPU's memory did not suffice for what lane {self._name} computes with (graphs, activations): "
                f"lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs"
            )
            self._post(LaneGone(self._name, reason, config=True))
        except Exception as error:
            traceback.print_exc()
            self._post(LaneGone(self._name, f"{type(error).__name__}: {error}"))
        finally:
            self._enqueued.put(None)  # no more will come: the other threads end too
            self._wanted.put(None)


class GpuLanes:
    """Implements ``LaneHost``."""

    def __init__(self, pool: Pool, plan: Callable[[str], LanePlan]) -> None:
        self._pool, self._plan = pool, plan
        self._starting = threading.Lock()
        self._lanes: dict[str, LaneThreads] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self, lane: str) -> None:
        if lane not in self._lanes:
            self._lanes[lane] = LaneThreads(lane, self._plan(lane), self._starting, self._post)

    def launch(self, lane: str, batch: Batch) -> None:
        apply_tables(self._pool.table, batch.tables)
        self._lanes[lane].launch(batch)

    def prepare_shares(self, shares: dict[str, float]) -> None:
        for lane, share in shares.items():
            if lane in self._lanes:
                self._lanes[lane].prepare_share(share)

    def reading(self, lane: str, alone: bool) -> LaneReading:
        return self._lanes[lane].reading(alone) if lane in self._lanes else LaneReading()

    def watch(self, register: Callable[[int, Callable[[], list[Event]]], None], forget: Callable[[int], None]) -> None:
        register(self._bell, self._receive)

    def pids(self) -> dict[str, int]:
        return dict.fromkeys(self._lanes, os.getpid())

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def fail(self, reason: str, config: bool) -> None:
        """The lanes can't go on, for a reason outside of them. Any thread may call it."""
        self._post(LaneGone(next(iter(self._lanes)), reason, config))

    def _post(self, event: Event) -> None:
        self._events.put(event)
        os.eventfd_write(self._bell, 1)

    def _receive(self) -> list[Event]:
        os.eventfd_read(self._bell)
        events: list[Event] = []
        while not self._events.empty():
            events.append(self._events.get())
        return events
