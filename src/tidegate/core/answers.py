"""What requests are told: their tokens, when each may be told, and how they ended.

Every request gets exactly one terminal Output, from ``refuse`` or from ``end``.
"""

from tidegate.base.request import Output, TokenLogprob
from tidegate.core.guidance import Guidance
from tidegate.core.lanes import Flight
from tidegate.core.queues import Queues
from tidegate.core.request import Request, State
from tidegate.core.residency import Residency


class Answers:
    """``requests``: all that have not ended; those that end are taken out of it."""

    def __init__(self, requests: dict[str, Request], queues: Queues, residency: Residency, guidance: Guidance) -> None:
        self._requests = requests
        self._queues, self._residency, self._guidance = queues, residency, guidance
        self.outputs: list[Output] = []  # of the event that is being handled
        self.finished: dict[str, int] = {}  # how many ended in which way, since the start

    def begin(self) -> None:
        """Another event: nothing has been told for it yet."""
        self.outputs = []

    # ---- tokens

    def append(
        self, request: Request, token: int, logprob: TokenLogprob | None, now: float, hold: bool = False
    ) -> None:
        """A token has come. ``hold``: another lane will decode next, and is in the middle of a step; the token is told
        when that lane's first step with the request starts, so that the wait for it counts to TTFT and not to the gap
        that follows; but at once where that would be too late."""
        request.tokens.append(token)
        request.losses = 0
        finish = None
        if token in request.stop_ids:
            finish = "stop"
        elif len(request.tokens) >= request.limit:
            finish = "length"
        if request.held is not None:
            self._release(request, now)
        if finish is None and logprob is None and request.reported:
            self.outputs.append(Output(request.id, [token]))
            return
        logprobs = [logprob] if logprob is not None else None
        if finish is None:
            request.held = Output(request.id, [token], logprobs=logprobs, cached_tokens=self._cached(request))
            if not hold or now + self._guidance.pace_s > request.deadline_s:
                self._release(request, now)
        else:
            self.end(request, finish, [token], "", now, logprobs)

    def batch_starts(self, flight: Flight, now: float) -> None:
        """Tells the tokens that were held until it does."""
        for request in flight.starting:
            if request.held is not None:
                self._release(request, now)

    def _release(self, request: Request, now: float) -> None:
        """Tells a token that was held, or comes with something more to say."""
        assert request.held is not None
        self.outputs.append(request.held)
        request.held = None
        self._told(request, now)

    def _told(self, request: Request, now: float) -> float:
        """When it was told its first token: that may be now."""
        if request.first_s is None:
            request.first_s = now
            self._guidance.first_token(request, now)
        return request.first_s

    def _cached(self, request: Request) -> int:
        """``cached_tokens`` for an Output: told once."""
        if request.reported:
            return 0
        request.reported = True
        return request.cached_tokens

    # ---- ends

    def refuse(self, name: str, finish: str, reason: str, retry_after_s: float | None) -> None:
        """The one terminal Output of a request that was not taken."""
        self._count(finish)
        self.outputs.append(Output(name, [], finish, reason, retry_after_s=retry_after_s))

    def end(
        self,
        request: Request,
        finish: str,
        tokens: list[int],
        reason: str,
        now: float,
        logprobs: list[TokenLogprob] | None = None,
    ) -> None:
        """The one terminal Output of a request that was."""
        if request.held is not None:
            self._release(request, now)
        self._queues.remove(request)
        if request.state is State.DECODING:
            self._residency.publish_decoded(request)
        request.end()
        del self._requests[request.id]
        self._count(finish)
        self.outputs.append(Output(request.id, tokens, finish, reason, logprobs, self._cached(request)))
        first_s = self._told(request, now) if finish in ("stop", "length") else None
        self._guidance.ended(request, first_s, now)
        self.let_go(request)

    def fail_all(self, reason: str, now: float) -> None:
        for request in list(self._requests.values()):
            self.end(request, "error", [], reason, now)

    def let_go(self, request: Request) -> None:
        """Its memory is free once nothing in flight names it."""
        if request.in_flight == 0:
            self._residency.release(request)

    def _count(self, finish: str) -> None:
        self.finished[finish] = self.finished.get(finish, 0) + 1
