"""A lane as the core knows it: alive or not, what it has in flight, how fast it has been."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate.base.stats import LaneStats
from tidegate.core.request import Request
from tidegate.policy.modes import LaneSpec
from tidegate.slo.latency import Work


class PrefillRow(NamedTuple):
    request: Request
    end: int  # the slice's last position + 1
    samples: bool


@dataclass(slots=True)
class Flight:
    """A launched batch and whom its rows belong to, in the order in which sampled tokens come back."""

    batch_id: int
    share: float
    prefills: list[PrefillRow]
    decodes: list[Request]
    work: Work
    beside: bool = False  # whether another lane had work in flight at its launch
    chained: bool = False  # launched behind another one, so that it starts when that ends
    starting: list[Request] = field(default_factory=list)  # whose held first tokens are told when it starts

    def requests(self) -> list[Request]:
        return [*(row.request for row in self.prefills), *self.decodes]


class Lane:
    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = False
        self.spec: LaneSpec | None = None  # its row in the mode in force; None: the mode does not use it
        self.flights: deque[Flight] = deque()
        self.ending = False  # the batch in flight is about to end
        self.stats = LaneStats()
        self._landed_s = 0.0  # when its last batch ended

    @property
    def idle(self) -> bool:
        """Whether it can be given a batch now: it has none, or its only one is about to end.

        No earlier, so that who is in a batch is fixed as late as can be.
        """
        in_flight = len(self.flights)
        return self.alive and self.spec is not None and (not in_flight or (in_flight == 1 and self.ending))

    def take(self, flight: Flight) -> None:
        flight.chained = bool(self.flights)
        self.flights.append(flight)
        self.ending = False

    def land(self, batch_id: int) -> Flight:
        """Batches of a lane end in the order of their launch."""
        flight = self.flights.popleft()
        self.ending = False
        assert flight.batch_id == batch_id, "a lane acknowledged batches out of order"
        return flight

    def took(self, flight: Flight, seconds: float, now: float) -> float:
        """From the end of the batch before to the end of this one, if it was chained to it: what a token waits for.
        Otherwise ``seconds``, its time on the device."""
        before, self._landed_s = self._landed_s, now
        return now - before if flight.chained else seconds

    def count(self, flight: Flight, seconds: float) -> None:
        self.stats.busy_seconds += seconds
        self.stats.beside_seconds += seconds * flight.beside
        self.stats.batches += 1
        self.stats.prefill_tokens += flight.work.new
        self.stats.decode_tokens += len(flight.decodes)
