"""Lanes as they are under MPS, over a small model on the CPU in place of a GPU: everything but the device is real.

Run as a script it is one process of a lane; imported, it makes a node of them.
"""

import dataclasses
import os
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runner"))
from tiny_lane import MODEL, WEIGHTS

from tidegate.base.specs import PoolSpec
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core
from tidegate.device.memory import SharedMemory, lay_out, region_bytes, table_region
from tidegate.device.mps import MpsDaemon, percent_of
from tidegate.device.places import Place
from tidegate.node import wire
from tidegate.node.gpu_lane_process import Device, NoContext, main
from tidegate.node.mps_lanes import MpsLanes
from tidegate.node.mps_worker import Worker
from tidegate.node.node import Node
from tidegate.node.rotation import Division, Rotation
from tidegate.runner.eager_runner import EagerRunner

SPEC = PoolSpec(num_blocks=200, block_size=4, max_num_seqs=8, max_model_len=64)
FAKE_CONTROL = str(Path(__file__).parents[1] / "device/fake_mps_control.sh")
WAIT_S = 180.0


def open_cpu(init, memory_fd, table_fd):
    """``Place.sms`` is the percentage that the process was started with."""
    match os.environ.get("FAKE_FAULT"):
        case "no context":
            raise NoContext("the server is not ready")
        case "no memory":
            raise RuntimeError("the memory can't be mapped")
    weights, pool = SharedMemory(memory_fd, init.shared_bytes).open_pool(init.pool, init.regions)
    where = table_region(init.regions)
    pool = dataclasses.replace(pool, table=SharedMemory(table_fd, region_bytes(where)).tensor(where))
    place = Place(sms=int(os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]))
    return Device(
        pool=pool,
        make=lambda: EagerRunner.over(init.model, weights, pool),
        place=place,
        count_sms=lambda place: lambda: place.sms,
        reserved_bytes=lambda: 0,
    )


def division(share):
    return Division((("P", percent_of(share)),))


class Lanes:
    """MpsLanes with what they run on. ``faults``: of the processes that start next, in order. ``doomed``: lanes and
    percentages of which the next process is killed as it starts."""

    def __init__(self, home, share=0.5):
        stored = {name: ("float32", tuple(weight.shape)) for name, weight in WEIGHTS.items()}
        regions, num_bytes = lay_out(MODEL, SPEC, stored)
        memory = SharedMemory.create(num_bytes)
        weights, pool = memory.open_pool(SPEC, regions)
        for name, weight in WEIGHTS.items():
            weights[name].copy_(weight)
        where = table_region(regions)
        table = SharedMemory.create(region_bytes(where))
        self.daemon = MpsDaemon("GPU-0", home, FAKE_CONTROL)
        self.faults = []
        self.doomed = set()
        self.rotation = Rotation(division(share))
        self.started = []  # (lane, percentage) of every process, in order

        def spawn(lane, percent):
            self.started.append((lane, percent))
            environment = self.daemon.client_environment(percent)
            if self.faults:
                environment["FAKE_FAULT"] = self.faults.pop(0)
            init = wire.GpuLaneInit(lane, MODEL, SPEC, regions, num_bytes, [], eager=True, first=lane == "D")
            worker = Worker([sys.executable, __file__], environment, (memory.fd, table.fd), init, percent)
            if (lane, percent) in self.doomed:
                self.doomed.remove((lane, percent))
                os.kill(worker.pid, signal.SIGKILL)
            return worker

        pool = dataclasses.replace(pool, table=table.tensor(where))
        self.lanes = MpsLanes(pool, self.rotation, lambda shares: division(shares["P"]), spawn, self.daemon)


class Serving(Lanes):
    """A node over such lanes in mode semi, and its one client."""

    def __init__(self, home):
        super().__init__(home)
        config = CoreConfig(
            SPEC.num_blocks, SPEC.block_size, SPEC.max_num_seqs, SPEC.max_model_len, MODEL.vocab_size, 16,
            min_slice_tokens=4, slice_quantum_tokens=4, prefix_secret=b"-",
        )  # fmt: skip
        self.core = Core(config)
        ours, theirs = socket.socketpair()
        self._channel = wire.Channel(ours, wire.FromNode)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        node = Node(self.core, self.core.on_event, self.lanes, wire.Channel(theirs, wire.ToNode))
        for spec in self.core.mode.lanes:
            self.lanes.start(spec.name)
        self._thread = threading.Thread(target=node.run, args=(self._info,))
        self._thread.start()
        self._inbox = []
        self.next(wire.Ready)

    def next(self, kind):
        """The next message of this kind; others before it are passed over."""
        while True:
            while self._inbox:
                message = self._inbox.pop(0)
                if isinstance(message, kind):
                    return message
                assert not isinstance(message, wire.Fatal), message
            assert self._selector.select(WAIT_S), "the node says nothing"
            messages, closed = self._channel.receive()
            assert messages or not closed, "the node has gone"
            self._inbox += messages

    def tokens(self, requests, meanwhile=lambda outputs: None):
        """Of each request, all at once; ``meanwhile`` is called with the number of outputs so far."""
        for request in requests:
            self._channel.send(wire.Submit(request))
        answers = {request.id: [] for request in requests}
        running, count = set(answers), 0
        while running:
            for output in self.next(wire.Outputs).outputs:
                assert output.id in running, "nothing comes after the last output"
                answers[output.id] += output.tokens
                count += 1
                if output.finish is not None:
                    assert output.finish == "length", output.reason
                    running.remove(output.id)
            meanwhile(count)
        return list(answers.values())

    def ask(self, share):
        self._channel.send(wire.Ask(0, shares={"P": share, "D": 1 - share}))

    def stats(self):
        self._channel.send(wire.Ask(1))
        while (reply := self.next(wire.Reply)).seq != 1:
            pass
        return reply.stats

    def close(self):
        self._channel.send(wire.Shutdown())
        self._thread.join()
        self.lanes.close()

    def _info(self):
        return wire.EngineInfo(MODEL, SPEC, "semi", ["semi"], SPEC.max_model_len, 0, 0, "", "", 0.0, self.lanes.pids())


if __name__ == "__main__":
    main(open_cpu)
