"""Several independent engines behind a router that places each request when it arrives."""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tidegate.sim.engine import Asked, SimulatedEngine


class Timed(Asked, Protocol):
    """A request, and when it arrives: seconds from the start, None for at once."""

    @property
    def at_s(self) -> float | None: ...


class Router(Protocol):
    """Where requests go. Engines are given their time by the router, as far as it has to know how they fare."""

    def place(self, now: float) -> SimulatedEngine: ...

    def placed(self, engine: SimulatedEngine) -> None:
        """The request has been submitted there."""
        ...


class RoundRobin:
    """Engine after engine, whatever their load."""

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self._engines = engines
        self._next = 0

    def place(self, now: float) -> SimulatedEngine:
        engine = self._engines[self._next]
        self._next = (self._next + 1) % len(self._engines)
        return engine

    def placed(self, engine: SimulatedEngine) -> None:
        pass


class LeastLoaded:
    """The engine with the fewest requests that have not ended; of several the one that has had so few for longest."""

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self._engines = engines
        self._index = {id(engine): i for i, engine in enumerate(engines)}
        self._loads = [0] * len(engines)
        self._with_load: list[dict[int, None]] = [dict.fromkeys(range(len(engines)))]  # engines by load
        self._due_s = [math.inf] * len(engines)  # when something happens next in each
        self._queue: list[tuple[float, int]] = []  # the same as a heap; an entry that is not due any more is void

    def place(self, now: float) -> SimulatedEngine:
        while self._queue and self._queue[0][0] < now:
            due_s, i = heapq.heappop(self._queue)
            if due_s == self._due_s[i]:
                self._engines[i].advance(now)
                self._look_at(i)
        return self._engines[next(iter(next(filter(None, self._with_load))))]

    def placed(self, engine: SimulatedEngine) -> None:
        self._look_at(self._index[id(engine)])

    def _look_at(self, i: int) -> None:
        load, due_s = self._engines[i].running, self._engines[i].next_s()
        if load != self._loads[i]:
            del self._with_load[self._loads[i]][i]
            self._loads[i] = load
            self._with_load += [{} for _ in range(load + 1 - len(self._with_load))]
            self._with_load[load][i] = None
        if due_s != self._due_s[i]:
            self._due_s[i] = due_s
            if due_s < math.inf:
                heapq.heappush(self._queue, (due_s, i))


ROUTERS: dict[str, Callable[[Sequence[SimulatedEngine]], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}


def serve(requests: Iterable[Timed], engines: Sequence[SimulatedEngine], router: str = "round-robin") -> None:
    """Until all have ended. ``requests`` come in the order of their times."""
    route = ROUTERS[router](engines)
    for request in requests:
        now = request.at_s or 0.0
        engine = route.place(now)
        engine.submit(request, now)
        route.placed(engine)
    for engine in engines:
        engine.advance()
