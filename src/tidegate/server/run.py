"""Serving an application over HTTP until it is told to stop, or its engine dies."""

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from tidegate.base.errors import ConfigError
from tidegate.node.engine import Engine
from tidegate.server.feed import Feed

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_LAST_WORDS_S = 5.0  # for answers to be sent once all requests have ended


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ``port`` 0 takes any that is free. Raises ConfigError if it can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"The host {host!r} can't be listened on: {error.strerror}.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"Port {port} on {host} is in use: stop what uses it, or choose another port.") from error
        raise ConfigError(f"Port {port} on {host} can't be listened on: {error.strerror}.") from error
    return listener


async def serve(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    listener: socket.socket | None = None,
    drain_timeout_s: float = 30.0,
    access_log: bool = False,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, and returns the exit code of the process. Run it under uvloop.

    At a signal no more connections are taken; running requests have ``drain_timeout_s`` seconds to finish, then the
    engine is closed and the rest end as aborted: 0. A second signal does not wait. If the engine dies, running
    requests are told so: 1. ``listener``: a socket from ``listen``, instead of ``host`` and ``port``.
    ``on_ready``: called once requests are answered.
    """
    engine: Engine = app.state.engine
    feed: Feed = app.state.feed
    listener = listener or listen(host, port)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=access_log,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(drain_timeout_s + _LAST_WORDS_S) + 1,
        )
    )
    stop, hurry = asyncio.Event(), asyncio.Event()
    with _signals(lambda: (hurry if stop.is_set() else stop).set()):
        serving = asyncio.create_task(server.serve([listener]))
        starting = asyncio.create_task(_started(server, on_ready))
        stopping = asyncio.create_task(stop.wait())
        hurrying = asyncio.create_task(hurry.wait())
        dying = asyncio.create_task(_died(engine))
        try:
            await _first({serving, stopping, dying})
            server.should_exit = True
            feed.close()
            await _first({serving, hurrying, dying}, drain_timeout_s)
            died = not engine.alive
            await engine.close()
            await _first({serving}, _LAST_WORDS_S)
            server.force_exit = True
            await serving
        finally:
            for task in (starting, stopping, hurrying, dying):
                task.cancel()
    if died:
        _log.error("The engine has stopped, so the server ends.")
    return 1 if died else 0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by ``serve``: uvicorn would end the process by the signal instead of with status 0."""
        yield


@contextlib.contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _started(server: uvicorn.Server, on_ready: Callable[[], None] | None) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    gc.collect()
    gc.freeze()  # what stays is looked at by no collection any more: one over all of it would delay tokens
    if on_ready is not None:
        on_ready()


async def _died(engine: Engine) -> None:
    while engine.alive:
        await asyncio.sleep(_POLL_S)


async def _first(tasks: set[asyncio.Task[Any]], timeout_s: float | None = None) -> None:
    """Until one of the tasks is done, or the time is over."""
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
