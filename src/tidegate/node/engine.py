"""The seam between a front end and the engine: what the server calls, and what a fake must offer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from tidegate.base.errors import EngineDead
from tidegate.base.events import Tuned
from tidegate.base.request import Output, RequestSpec
from tidegate.base.stats import Stats
from tidegate.node.wire import EngineInfo


class OutputStream:
    """The outputs of one request, in order, ending with the one whose ``finish`` is set.

        stream = engine.submit(spec)
        async for output in stream: ...

    Whoever leaves before the end calls ``engine.abort(stream.request_id)``.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ended = False
        self._queue: asyncio.Queue[Output | EngineDead] = asyncio.Queue()

    def put(self, item: Output | EngineDead) -> None:
        self._queue.put_nowait(item)

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        if self.ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineDead):
            self.ended = True
            raise item
        self.ended = item.finish is not None
        return item


class Engine(Protocol):
    """An engine that is up. All methods are called from one asyncio loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool:
        """False once the engine process has ended; every call then raises EngineDead."""
        ...

    def submit(self, request: RequestSpec) -> OutputStream: ...

    def abort(self, request_id: str) -> None:
        """Frees what the request holds at the next step. Ids that are unknown or have ended are ignored."""
        ...

    async def stats(self) -> Stats: ...

    async def set_mode(self, mode: str) -> Stats:
        """Returns once the mode is in force. Raises RequestError for an unknown or impossible mode."""
        ...

    async def set_shares(self, shares: dict[str, float]) -> Stats:
        """Raises RequestError for shares that are not a division of the compute among the mode's lanes."""
        ...

    async def tune(self, settings: Tuned) -> Stats:
        """Changes settings while serving. Raises RequestError for settings that do not go together."""
        ...

    async def reset_prefix_cache(self) -> Stats: ...

    async def close(self) -> None: ...
