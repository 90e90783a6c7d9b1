"""File descriptors handed to another process over a Unix socket (SCM_RIGHTS), before anything else is said on it."""

import os
import socket
from collections.abc import Sequence

_HELLO = b"\0"


def send(sock: socket.socket, descriptors: Sequence[int]) -> None:
    """The receiver gets duplicates; ours stay open."""
    socket.send_fds(sock, [_HELLO], list(descriptors))


def receive(sock: socket.socket, count: int) -> list[int]:
    """As many as were sent; the caller closes them. Raises EOFError where the sender has gone or sent others."""
    said, descriptors, _, _ = socket.recv_fds(sock, len(_HELLO), count)
    if said != _HELLO or len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise EOFError(f"{len(descriptors)} file descriptors came instead of {count}")
    return descriptors
