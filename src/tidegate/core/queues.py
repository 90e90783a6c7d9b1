"""Where every living request is: waiting, prefilling or decoding. Each is in exactly one of the three."""

import bisect
from itertools import groupby
from operator import attrgetter

from tidegate.core.request import Request, State
from tidegate.policy.order import Order
from tidegate.slo.outlook import Outlook

_key = attrgetter("order_key")
_priority = attrgetter("spec.priority")


class Queues:
    HORIZON = 128  # waiting requests that are looked at for one batch

    def __init__(self, order: Order) -> None:
        self.order = order
        self.waiting: list[Request] = []  # sorted by order_key
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}
        self.late_waiting = 0  # of those that wait

    def rekey(self, request: Request) -> None:
        request.order_key = (request.spec.priority, self.order.key(request), request.seq)

    def reorder(self, order: Order) -> None:
        self.order = order
        for request in [*self.waiting, *self.prefilling.values()]:
            self.rekey(request)
        self.waiting.sort(key=_key)

    def arranged(self, started: list[Request], now: float, outlook: Outlook) -> list[Request]:
        """Those that may be next, in the order in which they are to be served: ``started`` ones and the first of those
        that wait."""
        prompts = self.waiting[: self.HORIZON]
        for request in started:
            bisect.insort(prompts, request, key=_key)
        in_time = [request for request in prompts if not request.late]
        result: list[Request] = []
        for members in _classes(prompts):
            result += self.order.arrange(members, now, outlook)
        for request in in_time:
            if request.late:
                self._move_back(request)
        return result

    def _move_back(self, request: Request) -> None:
        """It has become late: its place in the queue is another."""
        if request.state is State.WAITING:
            self.late_waiting += 1
            self.dequeue(request)
            self.enqueue(request)
        else:
            self.rekey(request)

    def enqueue(self, request: Request) -> None:
        self.rekey(request)
        self.late_waiting += request.late
        bisect.insort(self.waiting, request, key=_key)

    def dequeue(self, request: Request) -> None:
        index = bisect.bisect_left(self.waiting, request.order_key, key=_key)
        assert self.waiting[index] is request
        del self.waiting[index]
        self.late_waiting -= request.late

    def remove(self, request: Request) -> None:
        """Takes a request out of whichever queue it is in."""
        if self.prefilling.pop(request.id, None) is None and self.decoding.pop(request.id, None) is None:
            self.dequeue(request)

    @property
    def has_prompts(self) -> bool:
        return bool(self.waiting or self.prefilling)

    def admitted(self) -> list[Request]:
        return [*self.prefilling.values(), *self.decoding.values()]


def _classes(prompts: list[Request]) -> list[list[Request]]:
    """Those of each priority; ``prompts`` ascend by it."""
    if prompts and _priority(prompts[0]) == _priority(prompts[-1]):
        return [prompts]
    return [list(members) for _, members in groupby(prompts, _priority)]
