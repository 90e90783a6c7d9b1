"""An HTTP client for one server: as many connections as there are exchanges at once, kept for the next ones."""

import asyncio
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from tidegate.base.errors import ConfigError
from tidegate.bench.connection import Connection, ExchangeFailed, Receiver


class Address(NamedTuple):
    host: str
    port: int
    tls: bool
    prefix: str  # of all paths, without a slash at its end

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Of "http://host:port", with or without "/v1" at its end. Raises ConfigError for what is not such an URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not an address: {error}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not an address such as http://127.0.0.1:8000.")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class Client:
    """``close`` it in the end."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._address = Address.parse(url)
        self._tls = ssl.create_default_context() if self._address.tls else None
        self._idle: list[Connection] = []
        self._common = f"Host: {self._address.host_header}\r\nUser-Agent: tidegate-bench\r\n"
        if api_key:
            self._common += f"Authorization: Bearer {api_key}\r\n"

    async def get(self, path: str, receiver: Receiver) -> None:
        """Raises ExchangeFailed unless a whole answer, of any status, has been received."""
        head = f"GET {self._address.prefix}{path} HTTP/1.1\r\n{self._common}Accept: application/json\r\n\r\n"
        await self._exchange(head.encode(), receiver)

    async def post(self, path: str, body: bytes, receiver: Receiver) -> None:
        """Sends JSON and receives an event stream. Raises like ``get``."""
        head = (
            f"POST {self._address.prefix}{path} HTTP/1.1\r\n{self._common}Accept: text/event-stream\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await self._exchange(head.encode() + body, receiver)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: bytes, receiver: Receiver) -> None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.usable:
                continue
            try:
                await self._exchange_over(connection, request, receiver)
                return
            except ExchangeFailed as failure:
                # A server may close a kept connection just when it is used again; then it has not read the request.
                if failure.answered or failure.kind != "connection":
                    raise
        await self._exchange_over(await self._connect(), request, receiver)

    async def _exchange_over(self, connection: Connection, request: bytes, receiver: Receiver) -> None:
        await connection.exchange(request, receiver)
        if connection.usable:
            self._idle.append(connection)

    async def _connect(self) -> Connection:
        host, port = self._address.host, self._address.port
        try:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port, ssl=self._tls)
        except OSError as error:
            message = f"no connection to {host} port {port}: {error.strerror or error}"
            raise ExchangeFailed("connection", message, answered=False) from None
        return connection
