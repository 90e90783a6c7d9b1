"""Lanes as threads over one GPU: each prepares and enqueues its batches, and a second thread waits for them.

Both lanes hold the interpreter only to prepare a step and to launch one graph; waiting is done without it. A lane says
when its batch is about to end (``BatchEnding``), early enough for the next one to be prepared and enqueued behind it.
"""

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable

import torch

from tidegate.base.batch import Batch
from tidegate.base.clock import now_s
from tidegate.base.events import BatchDone, BatchEnding, Event, LaneGone, LaneReady
from tidegate.base.specs import ModelSpec
from tidegate.device.green_contexts import Part, SmParts
from tidegate.device.pool import Pool
from tidegate.node.foresight import Foresight
from tidegate.runner.gpu_runner import Enqueued, GpuRunner
from tidegate.runner.inputs import apply_tables
from tidegate.runner.step_graph import Scratch, StepShape

Post = Callable[[Event], None]


class LaneThreads:
    """One lane: a thread that enqueues and a thread that collects, in order."""

    def __init__(
        self, name: str, make: Callable[[], GpuRunner], parts: SmParts, first: bool, table: torch.Tensor, post: Post
    ) -> None:
        self._name, self._make, self._parts, self._first = name, make, parts, first
        self._table, self._post = table, post
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._enqueued: queue.SimpleQueue[tuple[Enqueued, tuple[StepShape, Part], float] | None] = queue.SimpleQueue()
        self._foresight = Foresight()
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"lane-{name}-{work.__name__}", daemon=True)
            for work in (self._enqueue, self._collect)
        ]
        for thread in self._threads:
            thread.start()

    def launch(self, batch: Batch) -> None:
        self._inbox.put(batch)

    def close(self) -> None:
        self._inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _part(self, share: float) -> Part:
        if share >= 1.0:
            return self._parts.whole
        return self._parts.pair(share)[0] if self._first else self._parts.pair(1.0 - share)[1]

    def _enqueue(self) -> None:
        runner = self._runner = self._make()
        self._post(LaneReady(self._name))
        table = self._table.numpy()
        while (batch := self._inbox.get()) is not None:
            came = now_s()
            part = self._part(batch.share)
            shape = runner.shape_for(batch.num_prefill_tokens, len(batch.decode_slots))
            enqueued = runner.enqueue(batch, table, part)
            ready = now_s()
            self._foresight.prepared(ready - came)
            self._enqueued.put((enqueued, (shape, part), ready))
        self._enqueued.put(None)

    def _collect(self) -> None:
        free = now_s()  # when the lane's stream became, or will become, free
        while (item := self._enqueued.get()) is not None:
            enqueued, kind, ready = item
            start = max(ready, free)
            wait = self._foresight.wait_before_ending(kind, start, now_s())
            if wait > 0:
                time.sleep(wait)
            self._post(BatchEnding(self._name, enqueued.batch_id))
            result = self._runner.collect(enqueued)
            free = now_s()
            self._foresight.observed(kind, result.seconds)
            self._post(BatchDone(self._name, result))

    def _guard(self, work: Callable[[], None]) -> None:
        """A device that has failed can't be used again from this process: there is no starting the lane anew."""
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self._post(LaneGone(self._name, f"{type(error).__name__}: {error}"))


class GpuLanes:
    """Implements ``LaneHost``."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, torch.Tensor], pool: Pool, scratch: Scratch, parts: SmParts,
        prepare: Callable[[str, GpuRunner], None],
    ) -> None:  # fmt: skip
        self._model, self._pool, self._parts = (spec, weights), pool, parts
        self._scratch, self._prepare = scratch, prepare
        self._lanes: dict[str, LaneThreads] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self, lane: str) -> None:
        if lane not in self._lanes:
            make = lambda: self._runner(lane)  # noqa: E731
            self._lanes[lane] = LaneThreads(lane, make, self._parts, lane == "P", self._pool.table, self._post)

    def launch(self, lane: str, batch: Batch) -> None:
        apply_tables(self._pool.table, batch.tables)
        self._lanes[lane].launch(batch)

    def watch(self, register: Callable[[int, Callable[[], list[Event]]], None], forget: Callable[[int], None]) -> None:
        register(self._bell, self._receive)

    def pids(self) -> dict[str, int]:
        return dict.fromkeys(self._lanes, os.getpid())

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _runner(self, lane: str) -> GpuRunner:
        spec, weights = self._model
        runner = GpuRunner(spec, weights, self._pool, self._scratch, self._parts)
        self._prepare(lane, runner)
        return runner

    def _post(self, event: Event) -> None:
        self._events.put(event)
        os.eventfd_write(self._bell, 1)

    def _receive(self) -> list[Event]:
        os.eventfd_read(self._bell)
        events: list[Event] = []
        while not self._events.empty():
            events.append(self._events.get())
        return events
