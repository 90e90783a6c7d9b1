"""When first tokens will come, from who is queued. Asking changes nothing: the order is asked about copies."""

from operator import attrgetter

from tidegate.core.queues import Queues
from tidegate.core.request import Request
from tidegate.core.residency import Residency
from tidegate.slo.admission import Expectation, expect
from tidegate.slo.outlook import Outlook

_key = attrgetter("order_key")
NEWEST = 1 << 62  # as a place in the order of arrival: behind everybody


class Newcomer:
    """A prompt that is not in the queue, or a copy of one that is (``policy.order.Prompt``)."""

    __slots__ = ("arrived_s", "begun", "deadline_s", "late", "launched", "order_key", "remaining")

    def __init__(self, arrived_s: float, deadline_s: float, launched: int, remaining: int, late: bool = False) -> None:
        self.arrived_s, self.deadline_s, self.late = arrived_s, deadline_s, late
        self.launched, self.remaining = launched, remaining
        self.begun = False
        self.order_key: tuple[int, float, int] = (0, 0.0, 0)

    @classmethod
    def like(cls, request: Request) -> "Newcomer":
        copy = cls(request.arrived_s, request.deadline_s, request.launched, request.remaining, request.late)
        copy.order_key, copy.begun = request.order_key, request.begun
        return copy

    @property
    def priority(self) -> int:
        return self.order_key[0]


class Forecast:
    LENGTH_WEIGHT = 0.02  # of a new prompt, in the mean length

    def __init__(self, queues: Queues, residency: Residency) -> None:
        self._queues, self._residency = queues, residency
        self.mean_prompt_tokens = 0.0  # of late

    def count(self, prompt_tokens: int) -> None:
        """A prompt of so many tokens has been taken."""
        weight = self.LENGTH_WEIGHT if self.mean_prompt_tokens else 1.0
        self.mean_prompt_tokens += weight * (prompt_tokens - self.mean_prompt_tokens)

    def of_request(self, request: Request, now: float, outlook: Outlook) -> Expectation:
        """Of one that is not queued yet. What the prefix cache holds of it is no work."""
        cached = self._residency.cached_tokens(request)
        newcomer = Newcomer(now, request.deadline_s, cached, len(request.tokens) - cached)
        return self.of(newcomer, request.spec.priority, now, outlook)

    def of(self, newcomer: Newcomer, priority: int, now: float, outlook: Outlook) -> Expectation:
        ahead = ((other.launched, other.remaining) for other in self._ahead_of(newcomer, priority, now, outlook))
        return expect(ahead, newcomer.launched, newcomer.remaining, outlook)

    def _ahead_of(self, newcomer: Newcomer, priority: int, now: float, outlook: Outlook) -> list[Newcomer]:
        """Those that would be served before it, if nobody else came."""
        queues = self._queues
        newcomer.order_key = (priority, queues.order.key(newcomer), NEWEST)
        others = [Newcomer.like(r) for r in [*queues.prefilling.values(), *queues.waiting] if r.remaining]
        before = [other for other in others if other.order_key[0] < priority]
        peers = [other for other in others if other.order_key[0] == priority]
        ranked = queues.order.rank(sorted([*peers, newcomer], key=_key), now, outlook)
        return before + ranked[: ranked.index(newcomer)]
