"""A lane as a process: maps the pool, runs the batches it is told to, answers with tokens.

It owns nothing that its death would lose: weights, KV, block table and tokens lie in the node's memory, sampling
parameters are sent again. Started by ``node.process_lanes`` as ``python -m tidegate.node.lane_process SOCKET MEMORY``.
"""

import select
import signal
import socket
import sys
import time
import traceback
from collections import deque

import torch

from tidegate.base.batch import Batch, Slice
from tidegate.base.specs import ModelSpec, PoolSpec
from tidegate.device.core_sets import CoreSets, ProcessPart
from tidegate.device.memory import SharedMemory
from tidegate.device.pool import Pool
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.models.registry import build_model
from tidegate.node import wire
from tidegate.runner.runner import Runner


def build_runner(model_spec: ModelSpec, weights: dict[str, torch.Tensor], pool: Pool) -> Runner:
    attention = TorchAttention(model_spec, pool.kv, pool.table)
    return Runner(build_model(model_spec, weights, attention), attention, pool, model_spec)


def warm_up(model_spec: ModelSpec, weights: dict[str, torch.Tensor]) -> None:
    """The first products set up threads and libraries; do them on a small pool of our own."""
    spec = PoolSpec(num_blocks=4, block_size=16, max_num_seqs=1, max_model_len=48)
    pool = Pool.allocate(model_spec, spec)
    pool.table[0] = torch.arange(spec.max_blocks_per_seq, dtype=torch.int32)
    runner = build_runner(model_spec, weights, pool)
    runner.run(Batch(0, 1.0, [Slice(0, 0, [1] * 32, True)], [], [], [], []))
    runner.run(Batch(1, 1.0, [], [0], [32], [], []))


class LaneProcess:
    def __init__(self, channel: wire.Channel, memory_fd: int) -> None:
        self._channel = channel
        self._memory_fd = memory_fd
        self._part = ProcessPart()
        self._inbox: deque[wire.ToLane] = deque()

    def run(self) -> None:
        """Until told to stop, or until the node is gone."""
        init = self._next()
        if not isinstance(init, wire.LaneInit):
            return
        core_sets = CoreSets(init.cores)
        self._part.enter(core_sets.part(init.lane, 1.0))
        memory = SharedMemory(self._memory_fd, init.shared_bytes)
        weights, pool = memory.open_pool(init.pool, init.regions)
        warm_up(init.model, weights)
        runner = build_runner(init.model, weights, pool)
        self._channel.send(wire.LaneUp(init.lane))
        while isinstance(message := self._next(), wire.RunBatch):
            part = core_sets.part(init.lane, message.batch.share)
            self._part.enter(part)
            result = runner.run(message.batch)
            self._channel.send(wire.LaneResult(result))
            if part.duty < 1.0:
                time.sleep(result.seconds * (1.0 - part.duty) / part.duty)

    def _next(self) -> wire.ToLane:
        """The next message, in order; StopLane when the node has gone."""
        closed = False
        while not self._inbox and not closed:
            writers = [self._channel] if self._channel.wants_write else []
            select.select([self._channel], writers, [])
            self._channel.flush()
            messages, closed = self._channel.receive()
            self._inbox += messages
        return self._inbox.popleft() if self._inbox else wire.StopLane()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ^C at the terminal is the server's to handle
    socket_fd, memory_fd = map(int, sys.argv[1:])
    channel = wire.Channel(socket.socket(fileno=socket_fd), wire.ToLane)
    try:
        LaneProcess(channel, memory_fd).run()
    except Exception as error:
        traceback.print_exc()
        channel.send(wire.LaneFailure(f"{type(error).__name__}: {error}"))
        sys.exit(1)


if __name__ == "__main__":
    main()
