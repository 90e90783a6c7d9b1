"""One HTTP/1.1 connection that carries one exchange after another, as cheaply as Python allows."""

import asyncio
from typing import Protocol, cast

import httptools

from tidegate.base.clock import now_s
from tidegate.base.errors import TidegateError


class ExchangeFailed(TidegateError):
    """No whole answer came. ``kind`` is "connection" or "protocol"; ``answered``: some of it did come."""

    def __init__(self, kind: str, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.kind = kind
        self.answered = answered


class Receiver(Protocol):
    """Takes an answer in as it comes."""

    def begin(self, status: int) -> None:
        """The headers have come."""
        ...

    def receive(self, data: bytes, now: float) -> None:
        """Part of the body, read from the socket at ``now``. Must not raise."""
        ...


class Connection(asyncio.Protocol):
    """``await exchange(...)`` any number of times, one at a time, while ``usable``."""

    def __init__(self) -> None:
        self.usable = False
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._receiver: Receiver | None = None  # of the exchange that is going on
        self._done: asyncio.Future[None]
        self._answered = False
        self._now = 0.0

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Sends ``request`` (head and body) and returns once the whole answer has been received.

        Raises ExchangeFailed. Cancelled or failed, the connection is closed.
        """
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._answered = False
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._receiver = None

    def close(self) -> None:
        self.usable = False
        self._transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        self._now = now_s()
        if self._receiver is None:  # nothing was asked: whatever this is, what comes after can't be trusted
            self.close()
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("protocol", f"not HTTP/1.1: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._fail("connection", f"the server closed the connection{f': {exc}' if exc else ''}")

    # ---- called by the parser

    def on_headers_complete(self) -> None:
        if self._receiver is not None:
            self._receiver.begin(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._receiver is not None:
            self._receiver.receive(body, self._now)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self._receiver is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, kind: str, message: str) -> None:
        if self._receiver is not None and not self._done.done():
            self._done.set_exception(ExchangeFailed(kind, message, answered=self._answered))
