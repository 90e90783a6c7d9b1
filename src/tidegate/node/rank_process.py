"""A rank other than 0 of a tensor-parallel model: a process with a GPU of its own.

Started by ``node.rank_processes`` as ``python -m tidegate.node.rank_process SOCKET``; the first message says what it
is. It ends when told to, when it fails, and when rank 0 has gone, whatever the device is waiting for then.
"""

import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator

import torch

from tidegate.base.errors import ConfigError
from tidegate.base.specs import Shard
from tidegate.device.green_contexts import SmParts
from tidegate.device.places import FORMS, Places
from tidegate.kernels.gpu_support import why_no_graphs
from tidegate.kernels.step_rows import Types
from tidegate.models.shards import divide
from tidegate.models.sources import open_model
from tidegate.node import wire
from tidegate.node.follow import Follower
from tidegate.node.gpu_lanes import SWITCH_SECONDS
from tidegate.node.gpu_rank import GpuRank
from tidegate.runner.lane_runner import LaneRunner


def follow(init: wire.RankInit, orders: Iterator[wire.ToRank], end: "End") -> None:
    torch.cuda.set_device(init.rank)
    source = open_model(init.config.model, init.config.load_format, init.config.seed)
    spec = divide(source.spec, Shard(init.rank, init.config.tensor_parallel_size))
    rank = GpuRank(source, spec, init.dtype, init.meeting_place)
    if init.graphs:
        types = Types(getattr(torch, init.dtype), getattr(torch, init.arrays.kv_dtype))
        reason = why_no_graphs(spec, types, rank.device)
        if reason is not None:
            raise ConfigError(f"the GPUs differ: {reason}")
    weights, pool = rank.load(rank.allocate(init.arrays), lambda fraction: None)
    places = Places(SmParts(init.rank), FORMS[init.form])
    make = rank.runners(weights, pool, eager=not init.graphs)

    def runner(lane: str) -> LaneRunner:
        torch.cuda.set_device(init.rank)
        return make(lane, None)

    follower = Follower(pool, runner, places.at, end.failed)
    gc.collect()
    gc.freeze()  # a collection over all of it would delay a step
    for order in orders:
        match order:
            case wire.StartLane() | wire.PrepareStep() | wire.RunStep() | wire.StepDone():
                follower.take(order)
            case wire.StopRank():
                follower.close()
                return


class End:
    """Ends the process at once: other threads may be waiting for a device that waits for another rank."""

    def __init__(self, channel: wire.Channel) -> None:
        self._channel = channel

    def failed(self, error: Exception) -> None:
        if not isinstance(error, ConfigError):
            traceback.print_exception(error)
        config = isinstance(error, ConfigError | torch.OutOfMemoryError)
        said = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        self._channel.send(wire.RankFailure(said, config))
        self.now(1)

    def now(self, status: int) -> None:
        sys.stderr.flush()
        os._exit(status)


def messages(channel: wire.Channel) -> Iterator[wire.ToRank]:
    """Until rank 0 has gone."""
    closed = False
    while not closed:
        select.select([channel], [], [])
        found, closed = channel.receive()
        yield from found


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ^C at the terminal is the server's to handle
    sys.setswitchinterval(SWITCH_SECONDS)
    channel = wire.Channel(socket.socket(fileno=int(sys.argv[1])), wire.ToRank)
    end, orders = End(channel), messages(channel)
    try:
        init = next(orders, None)
        if isinstance(init, wire.RankInit):
            follow(init, orders, end)
    except Exception as error:
        end.failed(error)
    end.now(0)


if __name__ == "__main__":
    main()
