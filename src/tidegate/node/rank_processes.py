"""The processes of a tensor-parallel model's other ranks, as rank 0 sees them."""

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from tidegate.node import wire

CLOSE_SECONDS = 3.0
COMMAND = (sys.executable, "-m", "tidegate.node.rank_process")

Lost = Callable[[str, bool], None]  # why, and whether the user's settings are to blame


class RankProcesses:
    """Started at once, so that they import while rank 0 prepares what it tells them first."""

    def __init__(self, ranks: int, command: Sequence[str] = COMMAND) -> None:
        self.lost = False
        self._ranks = ranks
        self._sending = threading.Lock()
        self._closing = False
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for _ in range(1, ranks):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            arguments = [*command, str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(arguments, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=os.environ)
            )
            theirs.close()
            self._sockets.append(ours)

    def begin(self, init: Callable[[int], wire.RankInit]) -> None:
        """Tells each rank its first message."""
        for rank, sock in enumerate(self._sockets, start=1):
            _send(sock, wire.pack(init(rank)))

    def tell(self, message: wire.ToRank) -> None:
        """To every rank, in the same order whichever threads call. That one has ended is told by ``watch``."""
        packed = wire.pack(message)
        with self._sending:
            for sock in self._sockets:
                _send(sock, packed)

    def watch(self, lost: Lost) -> None:
        """From now on, and for what has been before, ``lost`` is called by another thread when a rank ends, once."""
        threading.Thread(target=self._watch, args=(lost,), name="ranks", daemon=True).start()

    def close(self) -> None:
        """Ends all ranks and waits for them; at once, where one has been lost."""
        self._closing = True
        if not self.lost:
            self.tell(wire.StopRank())
        for process in self._processes:
            try:
                process.wait(0.0 if self.lost else CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, lost: Lost) -> None:
        channels = {wire.Channel(sock, wire.FromRank): rank for rank, sock in enumerate(self._sockets, start=1)}
        while True:
            for channel in select.select(list(channels), [], [])[0]:
                words, closed = channel.receive()
                if closed and self._closing:
                    return
                if words or closed:
                    self.lost = True
                    lost(*self._why(channels[channel], words))
                    return

    def _why(self, rank: int, words: Sequence[wire.FromRank]) -> tuple[str, bool]:
        prefix = f"rank {rank} of {self._ranks} was lost: "
        if words:
            return prefix + words[0].reason, words[0].config
        return f"{prefix}its process ended with status {self._processes[rank - 1].wait()}", False


def _send(sock: socket.socket, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest) :]
        except BlockingIOError:
            select.select([], [sock], [])
        except OSError:
            return
