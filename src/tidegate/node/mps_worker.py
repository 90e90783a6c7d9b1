"""One process of a lane, as the node sees it: its share, what it has in flight, and how it ends."""

import os
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from tidegate.base.batch import Batch, SlotSetup
from tidegate.base.clock import now_s
from tidegate.node import shared_fds, wire
from tidegate.node.lane_host import LaneReading


class Worker:
    """``up``: it has said that it can run batches. ``leaving``: it was told to end once it has answered those that it
    has. ``closed``: it will say nothing more."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int],
        init: wire.GpuLaneInit, percent: int,
    ) -> None:  # fmt: skip
        """Starts ``command`` with one more argument, the descriptor of its socket."""
        self.lane, self.percent = init.lane, percent
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        shared_fds.send(ours, descriptors)
        self._channel = wire.Channel(ours, wire.FromLane)
        self._channel.send(init)
        self.life = os.pidfd_open(self._process.pid)  # readable when the process has ended
        self.up = self.leaving = self.closed = False
        self.reading = LaneReading()
        self.failure: wire.LaneFailure | None = None
        self.missed: dict[int, SlotSetup] = {}  # told to other processes of the lane and not yet to this one
        self._in_flight: deque[int] = deque()  # batch ids

    def __repr__(self) -> str:
        return f"lane {self.lane} at {self.percent} %"

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def able(self) -> bool:
        """Whether it can be given a batch."""
        return self.up and not self.leaving and not self.closed

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    def run(self, batch: Batch) -> None:
        setups = [*self.missed.values(), *batch.setups]  # later ones replace earlier ones of the same slot
        self.missed.clear()
        self._in_flight.append(batch.id)
        self._channel.send(wire.RunBatch(msgspec.structs.replace(batch, setups=setups, tables=[])))

    def receive(self) -> list[wire.FromLane]:
        """What it has said; results are counted. One that closes its socket without having been told to leave is
        killed: it has failed, and there is nothing that it could lose."""
        messages, self.closed = self._channel.receive()
        if self.closed and not self.leaving:
            self._process.kill()
        for message in messages:
            match message:
                case wire.LaneResult(result):
                    assert self._in_flight.popleft() == result.id, "a lane's process answered out of order"
                case wire.LaneUp(_, sms, extra_memory_bytes):
                    self.up, self.reading = True, LaneReading(sms, extra_memory_bytes)
                case wire.LaneFailure():
                    self.failure = message
        return messages

    def leave(self) -> None:
        self.leaving = True
        self._channel.send(wire.StopLane())

    def end(self, by: float = 0.0) -> int:
        """Waits until ``base.clock.now_s`` is ``by`` for the process to end, then kills it; its exit status."""
        self._channel.close()
        os.close(self.life)
        try:
            return self._process.wait(timeout=max(0.0, by - now_s()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
