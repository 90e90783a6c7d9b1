"""Where every living request is: waiting, prefilling or decoding. Each is in exactly one of the three."""

import bisect

from tidegate.core.request import Request
from tidegate.policy.order import Order


def _key(request: Request) -> tuple[int, float, int]:
    return request.order_key


class Queues:
    def __init__(self, order: Order) -> None:
        self._order = order
        self.waiting: list[Request] = []  # sorted by order_key
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}

    def rekey(self, request: Request) -> None:
        key = self._order(request.arrived_s, request.remaining)
        request.order_key = (request.spec.priority, key, request.seq)

    def enqueue(self, request: Request) -> None:
        self.rekey(request)
        bisect.insort(self.waiting, request, key=_key)

    def dequeue(self, request: Request) -> None:
        index = bisect.bisect_left(self.waiting, request.order_key, key=_key)
        assert self.waiting[index] is request
        del self.waiting[index]

    def remove(self, request: Request) -> None:
        """Takes a request out of whichever queue it is in."""
        if self.prefilling.pop(request.id, None) is None and self.decoding.pop(request.id, None) is None:
            self.dequeue(request)

    def admitted(self) -> list[Request]:
        return [*self.prefilling.values(), *self.decoding.values()]
