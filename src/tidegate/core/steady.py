"""Runs of unchanged decode batches, for simulations: a step costs the same however many requests are in it.

While nobody waits or prefills, nobody ends and no other lane runs, a lane's next batch is bound to be its last one, a
token further. ``Core.steady`` says so, and gives a ``SteadyRun`` that takes such steps one by one, with all that a
gate is asked and told; what they do to each request is made up for in ``close``, in one go. Afterwards the core is in
exactly the state to which ``on_event`` would have brought it.
"""

from collections.abc import Callable, Iterable

from tidegate.core.binding import Binder
from tidegate.core.lanes import Flight, Lane
from tidegate.core.request import Request
from tidegate.core.residency import Residency
from tidegate.slo.latency import Work

TOKEN = 0  # that every request is taken to get


Offer = Callable[[Lane, Work, float], None]  # asks the gate about a batch of these decodes alone, now
Account = Callable[[Lane, Flight, float, float], None]  # a batch has been run: how long it took, and now


class SteadyRun:
    """From one batch in flight on, ``bind`` and ``land`` in turns, in whichever order a lane does it.

    Nothing else may be asked of the core before ``close``.
    """

    def __init__(
        self, lane: Lane, left: int, binder: Binder, residency: Residency, offer: Offer, account: Account
    ) -> None:
        flight = lane.flights[0]
        self.lane = lane
        self.requests = flight.decodes
        self.left = left  # batches that may still be bound
        self._work = flight.work  # of the last batch
        self._bound = self._landed = 0
        self._binder, self._residency = binder, residency
        self._offer, self._account = offer, account

    def bind(self, now: float) -> Flight:
        """The next batch, launched on the whole device: what BatchEnding leads to, or BatchDone without one."""
        assert self.left > 0
        rows = len(self.requests)
        self._work = self._work._replace(context=self._work.context + rows)
        self._offer(self.lane, self._work, now)
        flight = Flight(self._binder.next_id(), 1.0, [], self.requests, self._work)
        self.lane.take(flight)
        self.left -= 1
        self._bound += 1
        return flight

    def land(self, batch_id: int, seconds: float, now: float) -> None:
        """What BatchDone does. Everybody has got a token."""
        self._account(self.lane, self.lane.land(batch_id), seconds, now)
        self._landed += 1

    def close(self) -> None:
        tokens, in_flight, bound = [TOKEN] * self._landed, len(self.lane.flights), self._bound
        short = []
        for row, request in enumerate(self.requests):
            # Bound batch b, from 1, has written position len(tokens) + b - 1, where tokens are those of before the run.
            if len(request.tokens) + bound > request.capacity:
                short.append((request.capacity - len(request.tokens) + 1, row))
            if tokens:
                request.tokens += tokens
                request.losses = 0
            request.in_flight = in_flight
        self._grow(short)

    def _grow(self, short: Iterable[tuple[int, int]]) -> None:
        """Blocks in the order in which the batches would have asked for them."""
        size = self._residency.block_size
        needs = [(at, row) for first, row in short for at in range(first, self._bound + 1, size)]
        for _, row in sorted(needs):
            request = self.requests[row]
            grown = self._residency.grow(request)
            assert grown, "a run was longer than there were blocks for"
            request.tabled = len(request.blocks)


def steps_left(requests: list[Request], residency: Residency) -> int:
    """Batches that may be bound, after one that is in flight, before anybody ends or there could be no block."""
    until_end = min([r.limit - len(r.tokens) if r.plain else 0 for r in requests]) - 1
    return min(until_end, residency.blocks.num_available // len(requests) * residency.block_size)
