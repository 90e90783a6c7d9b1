"""Lanes as processes over one memory file (CPU core sets; later MPS)."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.base.batch import Batch
from tidegate.base.events import BatchDone, Event, LaneLost, LaneReady
from tidegate.device.pool import Pool
from tidegate.node import wire
from tidegate.runner.inputs import apply_tables


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    channel: wire.Channel
    last_words: str = ""


class ProcessLanes:
    """Implements ``LaneHost``. Children can be started before their ``init`` is known: importing takes longest."""

    def __init__(self, memory_fd: int) -> None:
        self._memory_fd = memory_fd
        self._children: dict[str, _Child] = {}
        self._init: Callable[[str], wire.LaneInit] | None = None
        self._table: Pool | None = None
        self._register: Callable[[int, Callable[[], list[Event]]], None] = lambda fd, ready: None
        self._forget: Callable[[int], None] = lambda fd: None

    def provide(self, pool: Pool, init: Callable[[str], wire.LaneInit]) -> None:
        """The pool is laid out and its weights are there: tell every child, and each later one at its start."""
        self._table, self._init = pool, init
        for name, child in self._children.items():
            child.channel.send(init(name))

    def start(self, lane: str) -> None:
        if lane in self._children:
            return
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tidegate.node.lane_process", str(theirs.fileno()), str(self._memory_fd)]
        process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(), self._memory_fd), stdin=subprocess.DEVNULL, env=os.environ
        )
        theirs.close()
        child = self._children[lane] = _Child(process, wire.Channel(ours, wire.FromLane))
        self._watch(lane, child)
        if self._init is not None:
            child.channel.send(self._init(lane))

    def launch(self, lane: str, batch: Batch) -> None:
        assert self._table is not None
        apply_tables(self._table.table, batch.tables)
        child = self._children.get(lane)
        if child is not None:  # otherwise its loss is about to be told
            child.channel.send(wire.RunBatch(batch))

    def watch(self, register: Callable[[int, Callable[[], list[Event]]], None], forget: Callable[[int], None]) -> None:
        self._register, self._forget = register, forget
        for name, child in self._children.items():
            self._watch(name, child)

    def pids(self) -> dict[str, int]:
        return {name: child.process.pid for name, child in self._children.items()}

    def close(self) -> None:
        for child in self._children.values():
            child.channel.send(wire.StopLane())
            child.channel.close()
        for child in self._children.values():
            try:
                child.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._children.clear()

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
            child.process.kill()
            status = child.process.wait()
            events.append(LaneLost(lane, child.last_words or f"lane {lane} ended with status {status}"))
        return events
