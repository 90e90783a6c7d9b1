"""Both lanes as processes that share a GPU by MPS: steps side by side, and what a change of shares costs."""

import itertools
import select
import selectors
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from frontier_report import Point

from tidegate.base.batch import Batch
from tidegate.base.events import BatchDone, BatchEnding, Event, LaneGone, LaneLost, LaneReady
from tidegate.base.specs import ModelSpec, Region
from tidegate.device.gpu_memory import GpuMemory
from tidegate.device.memory import SharedMemory
from tidegate.device.mps import MpsDaemon, percent_of
from tidegate.device.pool import Pool
from tidegate.node import wire
from tidegate.node.mps_backend import COMMAND, DIVIDED, division
from tidegate.node.mps_lanes import WHOLE, MpsLanes
from tidegate.node.mps_worker import Worker
from tidegate.node.rotation import Rotation
from tidegate.runner.shapes import StepShape

START_SECONDS = 120.0
FEW_SMS = 60  # for which slices are shorter
ROTATIONS = (0.55, 0.79, 0.42)


class Steps(Protocol):
    """What of ``gpu_steps.Bench`` is needed."""

    spec: ModelSpec
    regions: list[Region]
    memory: GpuMemory
    table: SharedMemory
    pool: Pool

    def decode(self, context: int) -> Callable[[int], Batch]: ...

    def prefill(self, tokens: int) -> Callable[[int], Batch]: ...


class MpsSides:
    def __init__(self, bench: Steps, decodes: int, prefill_sms: Sequence[int]) -> None:
        """Starts decode's process, and one of prefill for each number of SMs, unless they are started by rotation."""
        self._bench, self._decodes, self._prefill_sms = bench, decodes, prefill_sms
        self._device = torch.cuda.get_device_properties(0)
        self._daemon = MpsDaemon(f"GPU-{self._device.uuid}")
        self._descriptors = bench.memory.export(), bench.table.fd
        self._workers: dict[tuple[str, int], Worker] = {}

    def spawn(self, lane: str, percent: int) -> Worker:
        shapes = [StepShape(1024, 0), StepShape(512, 0)] if lane == "P" else [StepShape(0, self._decodes)]
        bench = self._bench
        init = wire.GpuLaneInit(
            lane, bench.spec, bench.pool.spec, bench.regions, bench.memory.num_bytes, shapes, False, lane not in DIVIDED
        )
        environment = self._daemon.client_environment(percent, low_priority=lane in DIVIDED)
        return Worker(COMMAND, environment, self._descriptors, init, percent)

    def close(self) -> None:
        by = time.monotonic() + 5.0
        for worker in self._workers.values():
            worker.leave()
        for worker in self._workers.values():
            worker.end(by)
        self._workers.clear()
        self._daemon.close()

    # ---- side by side

    def beside(self, sms: int, context: int, count: int) -> Point:
        """Decode steps while prefill slices of some 20 ms run without a pause, two of each in flight."""
        if not self._workers:
            self._start_all()
        prefill, decode = self._workers["P", self._percent(sms)], self._workers["D", WHOLE]
        tokens = 1024 if sms > FEW_SMS else 512
        makes = {prefill: self._bench.prefill(tokens), decode: self._bench.decode(context)}
        sent, done = dict.fromkeys(makes, 0), dict.fromkeys(makes, 0)
        marks: list[tuple[float, int]] = []  # the time, and slices done, when decode steps are begun to be counted
        for worker in makes:
            for _ in range(2):
                self._send(worker, makes[worker], sent)
        while any(worker.busy for worker in makes):
            for worker in self._results(list(makes)):
                done[worker] += 1
                if worker is decode and done[decode] in (6, 6 + count):
                    marks.append((time.perf_counter(), done[prefill]))
                if len(marks) < 2:
                    self._send(worker, makes[worker], sent)
        (start, before), (end, after) = marks
        seconds = end - start
        return Point(
            context, "mps", prefill.reading.sms, decode.reading.sms, seconds / count * 1e3,
            (after - before) * tokens / seconds,
        )  # fmt: skip

    def _percent(self, sms: int) -> int:
        return percent_of(sms / self._device.multi_processor_count)

    def _start_all(self) -> None:
        self._daemon.start()
        free, start = torch.cuda.mem_get_info()[0], time.perf_counter()
        self._start([("D", WHOLE)])
        alone = time.perf_counter() - start
        taken = free - torch.cuda.mem_get_info()[0]
        self._start([("P", self._percent(sms)) for sms in self._prefill_sms])
        more = free - taken - torch.cuda.mem_get_info()[0]
        print(
            f"mps: a process is ready in {alone:.1f} s; the first takes {taken / 2**30:.2f} GiB, each more "
            f"{more / len(self._prefill_sms) / 2**30:.2f} GiB (one or two graphs each)",
            flush=True,
        )

    def _start(self, wanted: Sequence[tuple[str, int]]) -> None:
        started = [self.spawn(*key) for key in wanted]
        self._workers |= dict(zip(wanted, started, strict=True))
        while not all(worker.up for worker in started):
            list(self._results([worker for worker in started if not worker.up]))

    def _send(self, worker: Worker, make: Callable[[int], Batch], sent: dict[Worker, int]) -> None:
        worker.run(make(sent[worker]))
        sent[worker] += 1

    def _results(self, workers: Sequence[Worker]) -> list[Worker]:
        """Waits for messages; a worker for each of its results."""
        ready = select.select(workers, [], [], START_SECONDS)[0]
        if not ready:
            sys.exit("lanes as processes do not answer")
        results = []
        for worker in ready:
            results += [worker for message in worker.receive() if isinstance(message, wire.LaneResult)]
            if worker.closed:
                sys.exit(f"{worker!r} has ended: {worker.failure}")
        return results

    # ---- a change of shares

    def rotate(self, context: int) -> None:
        """Both lanes are fed by the lane host itself while shares change."""
        share = 0.67
        rotation = Rotation(division({"P": share}))
        lanes = MpsLanes(self._bench.pool, rotation, division, self.spawn, self._daemon)
        feed = _Feed(lanes, {"P": self._bench.prefill(512), "D": self._bench.decode(context)})
        try:
            for lane in ("D", "P"):
                lanes.start(lane)
            feed.until(lambda: feed.up == {"D", "P"})
            feed.launch()
            feed.for_seconds(2.0)
            print("shares  prepared in   longest gap (median) of decode, prefill: before, while preparing, at the swap")
            for wanted in ROTATIONS:
                free = torch.cuda.mem_get_info()[0]
                before = feed.gaps(lambda: feed.for_seconds(1.0))
                start = time.perf_counter()
                lanes.prepare_shares({"P": wanted, "D": 1.0 - wanted})
                while_preparing = feed.gaps(lambda: feed.until(lambda: rotation.active == rotation.wanted))
                seconds = time.perf_counter() - start
                taken = free - torch.cuda.mem_get_info()[0]
                at_swap = feed.gaps(lambda: feed.for_seconds(0.5))
                print(
                    f"P {rotation.active.percent('P')} %  {seconds:6.1f} s, {taken / 2**30:.2f} GiB   "
                    f"{before} | {while_preparing} | {at_swap}",
                    flush=True,
                )
        finally:
            lanes.close()


class _Feed:
    """Keeps each lane busy, its next batch launched when it says that the one in flight is about to end."""

    def __init__(self, lanes: MpsLanes, makes: dict[str, Callable[[int], Batch]]) -> None:
        self.up: set[str] = set()
        self._lanes, self._makes = lanes, makes
        self._sent = dict.fromkeys(makes, 0)
        self._flying = dict.fromkeys(makes, 0)
        self._done: dict[str, list[float]] = {lane: [] for lane in makes}
        self._selector = selectors.DefaultSelector()
        lanes.watch(self._register, self._forget)

    def launch(self) -> None:
        for lane in self._makes:
            self._launch(lane)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            for key, _ in self._selector.select(START_SECONDS) or sys.exit("the lanes say nothing"):
                for event in key.data():
                    self._handle(event)

    def for_seconds(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        self.until(lambda: time.perf_counter() > end)

    def gaps(self, work: Callable[[], Any]) -> str:
        """Between the ends of a lane's steps while ``work`` goes on, in milliseconds."""
        for done in self._done.values():
            del done[:-1]
        work()
        said = []
        for lane in ("D", "P"):
            times = self._done[lane]
            gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(times)] or [float("nan")]
            said.append(f"{max(gaps):.1f} ({statistics.median(gaps):.1f})")
        return ", ".join(said) + " ms"

    def _handle(self, event: Event) -> None:
        match event:
            case LaneReady(lane):
                self.up.add(lane)
            case BatchEnding(lane, _) if self._flying[lane] == 1:
                self._launch(lane)
            case BatchDone(lane, _):
                self._done[lane].append(time.perf_counter())
                self._flying[lane] -= 1
                if not self._flying[lane]:
                    self._launch(lane)
            case LaneLost() | LaneGone():
                sys.exit(str(event))

    def _launch(self, lane: str) -> None:
        batch = self._makes[lane](self._sent[lane])
        batch.share = 0.5  # beside the other
        if lane == "D":
            batch.decode_positions = [position % 1500 for position in batch.decode_positions]
        self._sent[lane] += 1
        self._flying[lane] += 1
        self._lanes.launch(lane, batch)

    def _register(self, fd: int, receive: Callable[[], list[Event]]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, receive)

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
