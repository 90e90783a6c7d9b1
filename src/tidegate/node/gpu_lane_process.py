"""A lane on a GPU as a process: maps the owner's memory, and runs what it is told to on the share of the device that it
was started with. Started by ``node.mps_lanes`` as ``python -m tidegate.node.gpu_lane_process SOCKET``.

It owns nothing that its death would lose: weights, KV and tokens lie in device memory that the node's process holds,
the block table in a memory file that the node writes, and sampling parameters are sent again.

The lane is the same pair of threads as where lanes are threads of the node (``node.gpu_lanes``); this process's own
thread passes messages on.
"""

import contextlib
import gc
import os
import select
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch

from tidegate.base.events import BatchDone, BatchEnding, Event, LaneGone, LaneReady
from tidegate.device.memory import SharedMemory, region_bytes, table_region
from tidegate.device.places import HIGH_PRIORITY, Place
from tidegate.device.pool import Pool
from tidegate.node import shared_fds, wire
from tidegate.node.gpu_lanes import SWITCH_SECONDS, CountSms, GpuLanes, LanePlan
from tidegate.runner.lane_runner import LaneRunner


class NoContext(Exception):
    """Not even an empty context can be made on the device."""


class Device(NamedTuple):
    """What a lane runs on, as this process sees it."""

    pool: Pool
    make: Callable[[], LaneRunner]
    place: Place
    count_sms: Callable[[Place], CountSms]
    reserved_bytes: Callable[[], int]


Open = Callable[[wire.GpuLaneInit, int, int], Device]  # the descriptors of device memory and of the memory file


def open_gpu(init: wire.GpuLaneInit, memory_fd: int, table_fd: int) -> Device:
    """Raises NoContext where the device, or the service by which it is shared, is beyond use."""
    try:
        torch.empty(1, device="cuda")
    except RuntimeError as error:
        raise NoContext(str(error).strip().splitlines()[0]) from error
    from tidegate.device.gpu_memory import GpuMemory
    from tidegate.node.gpu_runners import count_sms, runner_maker

    memory = GpuMemory(init.shared_bytes, shared=memory_fd)
    where = table_region(init.regions)
    table = SharedMemory(table_fd, region_bytes(where)).tensor(where)
    weights, pool = memory.open_pool(init.pool, init.regions, table)
    make = runner_maker(init.model, weights, pool, init.eager)
    priority = HIGH_PRIORITY if init.first else 0
    stream, capture_stream = (torch.cuda.Stream(priority=priority) for _ in range(2))
    return Device(
        pool=pool,
        make=lambda: make(None),
        place=Place(torch.cuda.get_device_properties(0).multi_processor_count, stream, capture_stream),
        count_sms=count_sms,
        reserved_bytes=torch.cuda.memory_reserved,
    )


class GpuLaneProcess:
    def __init__(self, channel: wire.Channel, init: wire.GpuLaneInit, device: Device) -> None:
        self._channel, self._lane, self._device = channel, init.lane, device
        self._lanes = GpuLanes(device.pool, lambda lane: self._plan(init))
        self._forward: Callable[[], None] = lambda: None  # what the lane has told since
        self._running = True
        self._failed = False

    def run(self) -> bool:
        """Until told to stop or until the node has gone, when everything in flight has been answered; or until the
        device fails. Whether it did not."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ, self._hear)
            self._lanes.watch(lambda fd, receive: self._watch(selector, fd, receive), lambda fd: None)
            self._lanes.start(self._lane)
            while self._running:
                for key, _ in selector.select():
                    key.data()
                    flush(self._channel)
        if not self._failed:
            self._lanes.close()
            with contextlib.suppress(BlockingIOError):  # it had nothing more to tell
                self._forward()
            flush(self._channel)
        return not self._failed

    def _watch(self, selector: selectors.BaseSelector, fd: int, receive: Callable[[], list[Event]]) -> None:
        def forward() -> None:
            for event in receive():
                self._tell(event)

        self._forward = forward
        selector.register(fd, selectors.EVENT_READ, forward)

    def _hear(self) -> None:
        messages, closed = self._channel.receive()
        for message in messages:
            if isinstance(message, wire.RunBatch):
                self._lanes.launch(self._lane, message.batch)
        self._running = self._running and not closed and not any(isinstance(m, wire.StopLane) for m in messages)

    def _tell(self, event: Event) -> None:
        match event:
            case BatchEnding(_, batch_id):
                self._channel.send(wire.LaneEnding(batch_id))
            case BatchDone(_, result):
                self._channel.send(wire.LaneResult(result))
            case LaneReady(lane):
                gc.collect()
                gc.freeze()  # a collection over all that stays would delay a step
                reading = self._lanes.reading(lane, alone=True)
                self._channel.send(wire.LaneUp(lane, reading.sms, reading.extra_memory_bytes))
            case LaneGone(_, reason, config):
                self._channel.send(wire.LaneFailure(reason, config))
                self._running, self._failed = False, True

    def _plan(self, init: wire.GpuLaneInit) -> LanePlan:
        device = self._device
        return LanePlan(
            make=device.make,
            place=lambda share: device.place,  # the process has its share, and so every batch
            share=1.0,
            ladder=init.ladder,
            beside=[],
            progress=lambda fraction: None,
            count_sms=device.count_sms,
            reserved_bytes=device.reserved_bytes,
        )


def flush(channel: wire.Channel) -> None:
    """Waits until everything has been sent, or the peer has gone."""
    while channel.wants_write:
        select.select([], [channel], [])
        channel.flush()


def first_message(channel: wire.Channel) -> wire.GpuLaneInit | None:
    """None where the node has gone, or has given up."""
    while True:
        select.select([channel], [], [])
        messages, closed = channel.receive()
        if messages:
            return messages[0] if isinstance(messages[0], wire.GpuLaneInit) else None
        if closed:
            return None


def main(open_device: Open = open_gpu) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ^C at the terminal is the server's to handle
    sys.setswitchinterval(SWITCH_SECONDS)
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        descriptors = shared_fds.receive(sock, 2)
    except EOFError:
        return
    channel = wire.Channel(sock, wire.ToLane)
    init = first_message(channel)
    if init is None:
        return
    try:
        device = open_device(init, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)  # what they name stays mapped
    except Exception as error:
        if not isinstance(error, NoContext):
            traceback.print_exc()
        reason = str(error) if isinstance(error, NoContext) else f"{type(error).__name__}: {error}"
        channel.send(wire.LaneFailure(reason, no_context=isinstance(error, NoContext)))
        sys.exit(1)
    if not GpuLaneProcess(channel, init, device).run():
        os._exit(1)  # a thread may be waiting for a device that does not answer any more


if __name__ == "__main__":
    main()
