"""The times of one sequence's tokens, and what they come to."""

from array import array

from tidegate.base.clock import now_s
from tidegate.base.request import RequestSpec
from tidegate.server.live import Ended, verdict
from tidegate.server.metrics import Metrics
from tidegate.slo.goodput import Latency


class RequestTimes:
    """Tells metrics and recorder the latencies of one sequence as they are known. ``arrived``: from ``now_s``."""

    def __init__(self, metrics: Metrics, arrived: float, spec: RequestSpec) -> None:
        self._metrics = metrics
        self._recorder = metrics.recorder
        self._arrived = arrived
        self._spec = spec
        self._times_s = array("d")
        self._tokens = 0
        self._refused = False
        self._recorder.arrived(arrived)

    def saw(self, tokens: int) -> None:
        """So many tokens came just now."""
        if not tokens:
            return
        now = now_s()
        times_s = self._times_s
        if times_s:
            self._metrics.inter_token.observe(now - times_s[-1])
        else:
            self._metrics.ttft.observe(now - self._arrived)
            self._recorder.prompt_tokens += len(self._spec.prompt)
        times_s.append(now)
        self._tokens += tokens
        self._recorder.output_tokens += tokens

    def refused(self) -> None:
        """The request can never be served: a mistake of the client's, which is held against no SLO."""
        self._refused = True

    def ended(self, reason: str) -> None:
        """``reason``: "stop", "length", "abort" (the client left) or "error"."""
        metrics = self._metrics
        metrics.finished(reason)
        latency = None
        if reason in ("stop", "length") and self._times_s:
            latency = Latency.of(self._arrived, self._times_s, self._tokens)
            metrics.e2e.observe(self._times_s[-1] - self._arrived)
            metrics.request_prompt_tokens.observe(len(self._spec.prompt))
            metrics.request_generation_tokens.observe(self._tokens)
            if self._tokens > 1:
                metrics.tpot.observe(latency.tpot_s)
        if reason == "abort" or self._refused:
            return
        found = verdict(latency, self._recorder.slo_for(self._spec.ttft_s, self._spec.tpot_s))
        self._recorder.ended(Ended(now_s(), len(self._spec.prompt), latency, found))
        if found is not None:
            metrics.judged(found)
