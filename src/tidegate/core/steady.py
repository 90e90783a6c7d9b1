"""Runs of decode batches that are bound to come, for simulations: a step costs the same however many are in it.

While nobody waits or prefills and no other lane runs, a lane's next batch is bound to be its last one, a token further
and without those that have got all their tokens. ``Core.steady`` says so, and gives a ``SteadyRun`` that takes such
steps one by one, with all that a gate is asked and told; what they do to each request is made up for when somebody
ends, and at the end of the run. Afterwards the core is in exactly the state to which ``on_event`` would have brought
it.
"""

from collections.abc import Callable

from tidegate.core.binding import Binder
from tidegate.core.lanes import Flight, Lane
from tidegate.core.request import Request
from tidegate.core.residency import Residency
from tidegate.slo.latency import Work

TOKEN = 0  # that every request is taken to get

Offer = Callable[[Lane, Work, float], None]  # asks the gate about a batch of these decodes alone, now
Landed = Callable[[Lane, Flight, float, list[Request], float], None]  # a batch took so long, and these have ended, now


class SteadyRun:
    """From one batch in flight on, ``bind`` and ``land`` in turns, in whichever order a lane does it.

    Nothing else may be asked of the core before ``close``.
    """

    def __init__(self, lane: Lane, binder: Binder, residency: Residency, offer: Offer, landed: Landed) -> None:
        flight = lane.flights[0]
        self.lane = lane
        self._binder, self._residency = binder, residency
        self._tell_offer, self._tell_landed = offer, landed
        self._rows = flight.decodes  # of the last batch
        self._work = flight.work
        # A bound on the batches for which there are blocks, whoever needs them.
        self._blocks_last = residency.blocks.num_available // len(self._rows) * residency.block_size
        self._begin(flight.decodes)

    def _begin(self, requests: list[Request]) -> None:
        """From here on, what happens to ``requests`` is made up for later. All are in all batches in flight."""
        self.requests = requests
        self._in_flight = len(self.lane.flights)
        self._bound = self._landed = 0  # batches, since here
        lefts = [r.limit - len(r.tokens) for r in requests]
        self._first_end = min(lefts, default=0)  # the landing at which somebody ends
        self._last_bind = max(lefts, default=0) - self._in_flight

    @property
    def goes_on(self) -> bool:
        """Whether another batch may be bound."""
        return self._bound < self._last_bind and self._blocks_last > 0

    def bind(self, now: float) -> Flight:
        """The next batch, launched on the whole device: what BatchEnding leads to, or BatchDone without one."""
        assert self.goes_on
        self._bound += 1
        self._blocks_last -= 1
        before = self._in_flight + self._bound - 1  # batches that bring each a token before this one does
        if self._bound > self._first_end - self._in_flight:
            self._rows = [r for r in self.requests if len(r.tokens) + before < r.limit]
        rows = len(self._rows)
        if rows == self._work.rows:  # the same ones
            context = self._work.context + rows
        else:
            context = sum([len(r.tokens) for r in self._rows]) + rows * before
        self._work = Work(rows=rows, context=context)
        self._tell_offer(self.lane, self._work, now)
        flight = Flight(self._binder.next_id(), 1.0, [], self._rows, self._work)
        self.lane.take(flight)
        return flight

    def land(self, batch_id: int, seconds: float, now: float) -> list[Request]:
        """What BatchDone does. Everybody has got a token; returns those who have ended with it."""
        flight = self.lane.land(batch_id)
        self._landed += 1
        ended: list[Request] = []
        if self._landed >= self._first_end:
            self.close()
            ended = [r for r in self.requests if len(r.tokens) >= r.limit]
        self._tell_landed(self.lane, flight, seconds, ended, now)
        if ended:
            self._rows = [r for r in self.requests if len(r.tokens) < r.limit]
            self._begin(self._rows)
        return ended

    def close(self) -> None:
        """Makes up for what has happened to each request."""
        tokens, size, short = [TOKEN] * self._landed, self._residency.block_size, []
        for row, request in enumerate(self.requests):
            length = len(request.tokens)
            left = request.limit - length - self._in_flight
            bound = self._bound if self._bound < left else left  # batches that it is in
            # The first of these writes position length - 1 + in_flight, each further one the next.
            end = length - 1 + self._in_flight + bound
            if end > request.capacity:
                short += [(at - length, row) for at in range(request.capacity, end, size)]
            if tokens:
                request.tokens += tokens
                request.losses = 0
            request.in_flight = self._in_flight + bound - self._landed
        for _, row in sorted(short):  # in the order in which the batches would have asked for them
            request = self.requests[row]
            grown = self._residency.grow(request)
            assert grown, "a run was longer than there were blocks for"
            request.tabled = len(request.blocks)
