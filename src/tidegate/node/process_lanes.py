"""Lanes as processes over one memory file, forked from one stem (CPU core sets; see ``node.mps_lanes`` for a GPU)."""

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.base.batch import Batch
from tidegate.base.events import BatchDone, Event, LaneLost, LaneReady
from tidegate.device.pool import Pool
from tidegate.node import wire
from tidegate.node.lane_host import LaneReading
from tidegate.runner.inputs import apply_tables

CLOSE_SECONDS = 2.0  # a lane that is killed loses nothing; well within what the engine itself is given to close
_PR_SET_CHILD_SUBREAPER = 36
# OpenMP's threads wait awake for some 50 to 100 us, which spans the gaps within a step, before they go to sleep (see
# device.crowding). numpy's own threads would not survive the stem's forks, and nothing uses them.
_ENVIRONMENT = {"GOMP_SPINCOUNT": "5000", "OPENBLAS_NUM_THREADS": "1"}


@dataclass
class _Child:
    """A lane. It is a child of this process from the moment that its stem has told its id."""

    stem: "_Stem"
    channel: wire.Channel
    pid: int | None = None
    last_words: str = ""


@dataclass
class _Stem:
    process: subprocess.Popen[bytes]
    control: socket.socket
    asked: list[_Child] = field(default_factory=list)  # children whose id it has yet to tell, in order

    def receive(self) -> bool:
        """Reads the ids told so far; whether the stem is still there. Never blocks."""
        while True:
            try:
                packet = self.control.recv(64)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not packet:
                return False
            self.asked.pop(0).pid = int(packet)


class ProcessLanes:
    """Implements ``LaneHost``. The stem begins to import, which takes longest, as soon as the first lane is wanted;
    lanes are forked once there is a pool."""

    def __init__(self, memory_fd: int) -> None:
        # Lanes are forked by the stem, through a process that ends at once, and so become this process's to wait for.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._memory_fd = memory_fd
        self._stem: _Stem | None = None
        self._children: dict[str, _Child] = {}
        self._init: Callable[[str], wire.LaneInit] | None = None
        self._pool: Pool | None = None
        self._register: Callable[[int, Callable[[], list[Event]]], None] = lambda fd, ready: None
        self._forget: Callable[[int], None] = lambda fd: None

    def provide(self, pool: Pool, init: Callable[[str], wire.LaneInit]) -> None:
        """The pool is laid out and its weights are there: tell every child, and each later one at its start."""
        self._pool, self._init = pool, init
        for name, child in self._children.items():
            child.channel.send(init(name))

    def start(self, lane: str) -> None:
        if lane in self._children:
            return
        if self._stem is None:
            self._stem = self._start_stem()
        ours, theirs = socket.socketpair()
        child = self._children[lane] = _Child(self._stem, wire.Channel(ours, wire.FromLane))
        # Where the stem has just ended, closing their end is what tells of the lane's.
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._stem.control, [b"lane"], [theirs.fileno()])
            self._stem.asked.append(child)
        self._watch(lane, child)
        if self._init is not None:
            child.channel.send(self._init(lane))

    def launch(self, lane: str, batch: Batch) -> None:
        assert self._pool is not None
        apply_tables(self._pool.table, batch.tables)
        child = self._children.get(lane)
        if child is not None:  # otherwise its loss is about to be told
            child.channel.send(wire.RunBatch(batch))

    def prepare_shares(self, shares: dict[str, float]) -> None:
        pass  # moving to other cores takes no preparation

    def reading(self, lane: str, alone: bool) -> LaneReading:
        return LaneReading()

    def watch(self, register: Callable[[int, Callable[[], list[Event]]], None], forget: Callable[[int], None]) -> None:
        self._register, self._forget = register, forget
        if self._stem is not None:
            self._watch_stem(self._stem)
        for name, child in self._children.items():
            self._watch(name, child)

    def pids(self) -> dict[str, int]:
        if self._stem is not None:
            self._stem.receive()
        return {name: child.pid for name, child in self._children.items() if child.pid is not None}

    def close(self) -> None:
        for child in self._children.values():
            child.channel.send(wire.StopLane())
            child.channel.close()
        if self._stem is not None:
            self._stem.receive()
        for child in self._children.values():
            if child.pid is not None:
                _end(child.pid, CLOSE_SECONDS)
        self._children.clear()
        if self._stem is not None:
            self._end_stem(self._stem)

    def _start_stem(self) -> _Stem:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-m", "tidegate.node.lane_stem", str(theirs.fileno()), str(self._memory_fd)]
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), self._memory_fd),
            stdin=subprocess.DEVNULL,
            env=_ENVIRONMENT | os.environ,
        )
        theirs.close()
        stem = _Stem(process, ours)
        self._watch_stem(stem)
        return stem

    def _watch_stem(self, stem: _Stem) -> None:
        self._register(stem.control.fileno(), lambda: self._hear_stem(stem))

    def _hear_stem(self, stem: _Stem) -> list[Event]:
        """Lanes that it has forked live on without it; for those that it has not, their own sockets close."""
        if not stem.receive():
            self._end_stem(stem)
        return []

    def _end_stem(self, stem: _Stem) -> int:
        """Its exit status."""
        if stem is self._stem:
            self._stem = None
            self._forget(stem.control.fileno())
            stem.control.close()
        try:
            return stem.process.wait(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            stem.process.kill()
            return stem.process.wait()

    def _watch(self, lane: str, child: _Child) -> None:
        self._register(child.channel.fileno(), lambda: self._receive(lane, child))

    def _receive(self, lane: str, child: _Child) -> list[Event]:
        messages, closed = child.channel.receive()
        events: list[Event] = []
        for message in messages:
            match message:
                case wire.LaneResult(result):
                    events.append(BatchDone(lane, result))
                case wire.LaneUp():
                    events.append(LaneReady(lane))
                case wire.LaneFailure(reason):
                    child.last_words = reason
        if closed:
            self._forget(child.channel.fileno())
            child.channel.close()
            del self._children[lane]
            events.append(LaneLost(lane, self._why(lane, child)))
        return events

    def _why(self, lane: str, child: _Child) -> str:
        """Sees to it that the lane's process has ended; the reason."""
        child.stem.receive()
        if child.pid is None:  # it was never forked: the stem failed
            status = self._end_stem(child.stem)
            return child.last_words or f"the process that lane {lane} is forked from ended with status {status}"
        status = _end(child.pid, grace_seconds=0.0)
        return child.last_words or f"lane {lane} ended with status {status}"


def _end(pid: int, grace_seconds: float) -> int:
    """Waits for a child of ours to end, and kills it if it takes longer than that; its exit status."""
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], grace_seconds)[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(descriptor)
