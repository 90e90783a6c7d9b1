"""The live page's readings, one a second for all who watch together.

While nobody watches, the engine is not asked; what requests experienced meanwhile is worked out when somebody comes.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator

from tidegate.base.clock import now_s, wall_s
from tidegate.base.errors import EngineDead
from tidegate.base.stats import Stats
from tidegate.node.engine import Engine
from tidegate.server.live import Recorder
from tidegate.server.readings import Rates, Snapshot, rates

HISTORY_S = 120
COMPARABLE_S = 3.0  # statistics that are older say nothing about now


class Feed:
    """``period_s``: between two readings."""

    def __init__(self, engine: Engine, recorder: Recorder, period_s: float = 1.0) -> None:
        self._engine = engine
        self._recorder = recorder
        self._period_s = period_s
        self._started_s = now_s()
        self._history: deque[tuple[float, Snapshot]] = deque()  # with its time by ``now_s``; ascending
        self._stats: tuple[float, Stats] | None = None
        self._viewers = 0
        self._reading: asyncio.Task[None] | None = None  # while anybody watches
        self._complete = False  # whether the history goes up to now
        self._news = asyncio.Event()  # set, and replaced, when the history grows
        self._closed = False

    async def watch(self) -> AsyncGenerator[list[Snapshot], None]:
        """First the snapshots of the last HISTORY_S seconds, then those that are new; ends when the feed is closed."""
        if self._closed:
            return
        self._viewers += 1
        try:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
            news, seen_s = self._news, -math.inf
            if not self._complete:
                await news.wait()
            while True:
                news = self._news
                fresh = [(at, snapshot) for at, snapshot in self._history if at > seen_s]
                if fresh:
                    seen_s = fresh[-1][0]
                    yield [snapshot for _, snapshot in fresh]
                elif self._closed:
                    return
                else:
                    await news.wait()
        finally:
            self._viewers -= 1
            if self._viewers == 0 and self._reading is not None:
                self._reading.cancel()
                self._reading = None
                self._complete = False

    def close(self) -> None:
        """Tells viewers a last time how things stand, and ends their streams."""
        if not self._closed:
            self._closed = True
            self._add(now_s(), None)

    async def _read(self) -> None:
        await self._fill()
        self._complete = True
        self._wake()
        if self._stats is not None:  # a viewer who leaves and comes back does not make for more readings
            await asyncio.sleep(self._stats[0] + self._period_s - now_s())
        while not self._closed:
            answer = await self._ask()
            if not self._closed:
                self._add(now_s(), answer)
            await asyncio.sleep(self._period_s)

    async def _ask(self) -> tuple[Stats, Rates | None] | None:
        try:
            stats = await self._engine.stats()
        except EngineDead:
            return None
        now, before = now_s(), self._stats
        self._stats = (now, stats)
        self._recorder.heed(stats)
        if before is None or now - before[0] > COMPARABLE_S:
            return stats, None
        return stats, rates(stats, before[1], now - before[0])

    async def _fill(self) -> None:
        """Adds what is known of the seconds in which nobody watched."""
        now = now_s()
        self._forget(now)
        last_s = self._history[-1][0] + 1.0 if self._history else self._started_s
        for back in reversed(range(1, int(now - max(last_s, now - HISTORY_S)) + 1)):
            served = self._recorder.reading(now - back)
            self._history.append((now - back, Snapshot(wall_s() - back, self._engine.alive, None, None, served)))
            await asyncio.sleep(0)  # lets requests that are being served go first

    def _add(self, now: float, answer: tuple[Stats, Rates | None] | None) -> None:
        stats, compared = answer or (None, None)
        served = self._recorder.read(now)
        self._history.append((now, Snapshot(wall_s(), self._engine.alive, stats, compared, served)))
        self._forget(now)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _forget(self, now: float) -> None:
        while self._history and self._history[0][0] < now - HISTORY_S:
            self._history.popleft()
