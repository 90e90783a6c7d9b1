"""The process that lanes are forked from: what they all need is imported, compiled and packed once, here.

A forked lane shares the stem's memory until one of them writes to it, which nobody does to packed weights: there is one
copy of them for all lanes, restarted ones included, and a lane is up again in a fraction of a second.

Started by ``node.process_lanes`` as ``python -m tidegate.node.lane_stem CONTROL MEMORY``. On the control socket, a
packet with a file descriptor asks for a lane that talks over it; the answer is a packet with the lane's process id.
The stem ends when the control socket is closed, and so with the node.

Threads don't survive a fork, so the stem has none but its own.
"""

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tidegate.device.memory import SharedMemory
from tidegate.device.pool import Pool
from tidegate.kernels.cpu_attention import compile_ahead
from tidegate.kernels.linear import Linear
from tidegate.models.linears import linears
from tidegate.models.registry import prepare
from tidegate.node import wire
from tidegate.node.lane_process import LaneProcess, Mailbox


class LaneStem:
    def __init__(self, control: socket.socket, memory_fd: int) -> None:
        self._control = control
        self._memory_fd = memory_fd
        self._shared: tuple[dict[str, torch.Tensor], Pool, Mapping[str, Linear]] | None = None

    def run(self) -> None:
        """Until the node closes the control socket. Returns in the stem and never in a lane."""
        while True:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
            except ConnectionResetError:  # it has closed with something from us still unread
                return
            if not packet:
                return
            channel = wire.Channel(socket.socket(fileno=descriptors[0]), wire.ToLane)
            self._fork(channel)
            channel.close()

    def _fork(self, channel: wire.Channel) -> None:
        mailbox = Mailbox(channel)
        init = mailbox.next()
        if not isinstance(init, wire.LaneInit):
            return  # the node has given up
        try:
            weights, pool, products = self._shared or self._prepare(init)
        except Exception as error:
            channel.send(wire.LaneFailure(f"{type(error).__name__}: {error}"))
            raise

        def lane() -> None:
            self._control.close()
            LaneProcess(mailbox, init, weights, pool, products).run()

        pid = fork_orphan(lane)
        # Told before our end of the lane's socket is closed: the node knows the id before it can see the lane end.
        self._control.send(str(pid).encode())

    def _prepare(self, init: wire.LaneInit) -> tuple[dict[str, torch.Tensor], Pool, Mapping[str, Linear]]:
        weights, pool = SharedMemory(self._memory_fd, init.shared_bytes).open_pool(init.pool, init.regions)
        model = init.model
        compile_ahead(model, init.pool.block_size)
        prepare(model)
        self._shared = weights, pool, linears(model, weights)
        gc.collect()
        gc.freeze()  # a collection in a lane would write to every object that it looks at
        return self._shared


def fork_orphan(work: Callable[[], None]) -> int:
    """Runs ``work`` in a new process that is a child of the nearest subreaper above this one; returns its id."""
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "only a process with a single thread may be forked"
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.close(writing)
            _end_with(work)
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(parent, 0)  # from now on the process is the subreaper's
    pid = int(os.read(reading, 64))
    os.close(reading)
    return pid


def _end_with(work: Callable[[], None]) -> None:
    """Ends the process after ``work``, running none of what the stem would do at its own end."""
    status = 1
    try:
        work()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ^C at the terminal is the server's to handle
    torch.set_num_threads(1)
    control_fd, memory_fd = map(int, sys.argv[1:])
    LaneStem(socket.socket(fileno=control_fd), memory_fd).run()


if __name__ == "__main__":
    main()
