"""What requests experienced of late, as the server itself sees it: latencies, attainment, throughput.

Cheap by construction: a token costs an addition, a request one record, and everything else is worked out when somebody
reads it. What TTFT, TPOT and attaining an SLO mean is ``slo.goodput``'s.
"""

import bisect
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tidegate.base.stats import Stats
from tidegate.slo.goodput import Latency, Metric, Slo, percentile, quarters

WINDOW_S = 60.0  # latencies and attainment are of requests that ended so lately
RATE_S = 5.0  # rates are means over so long
KEPT_S = 240.0
MOST_KEPT = 8192  # requests; with more in KEPT_S, the window is shorter

ATTAINED = "attained"
REASONS = ("ttft", "tpot", "both", "failed")  # for which an SLO is missed


class Ended(NamedTuple):
    """``latency`` None: it failed. ``verdict``: see there."""

    at_s: float
    prompt_tokens: int
    latency: Latency | None
    verdict: str | None


def verdict(latency: Latency | None, slo: Slo | None) -> str | None:
    """ATTAINED, one of REASONS, or None without an SLO. ``latency`` None: the request failed."""
    if slo is None:
        return None
    if latency is None:
        return "failed"
    if slo.met_by(latency):
        return ATTAINED
    in_time = msgspec.structs.replace(slo, tpot_s=math.inf).met_by(latency)
    in_pace = msgspec.structs.replace(slo, ttft_s=math.inf).met_by(latency)
    return "tpot" if in_time else "ttft" if in_pace else "both"


class Percentiles(msgspec.Struct, frozen=True):
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles | None":
        if not values:
            return None
        ordered = sorted(values)
        return cls(*(percentile(ordered, fraction) for fraction in (0.5, 0.9, 0.99)))


class PromptQuartile(msgspec.Struct, frozen=True):
    """A quarter of the requests with an SLO, by prompt length: ``from_tokens`` to ``to_tokens``, both included."""

    from_tokens: int
    to_tokens: int
    requests: int
    attainment: float


class Served(msgspec.Struct, frozen=True):
    """Of the requests that ended within WINDOW_S; rates over RATE_S. Requests that their clients left don't count.

    ``judged`` had an SLO, and ``attainment`` is of them: None without any. ``missed``: how many, by reason.
    ``by_prompt`` is empty where all prompts are equally long or there are fewer than four.
    """

    requests: int
    failed: int
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    gap_p99_s: Percentiles | None
    judged: int
    attainment: float | None
    missed: dict[str, int]
    by_prompt: list[PromptQuartile]
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


class _Mark(NamedTuple):
    """Totals at a time."""

    at_s: float
    requests: float
    prompt_tokens: float
    output_tokens: float


class Recorder:
    """All times from ``now_s``. ``slo`` is in force for requests that bring none of their own; ``heed`` keeps it so.

    ``prompt_tokens`` and ``output_tokens`` are totals, which whoever sees tokens adds to.
    """

    def __init__(self, slo: Slo | None) -> None:
        self.slo = slo
        self.requests = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._ended: deque[Ended] = deque(maxlen=MOST_KEPT)
        self._marks: list[_Mark] = []

    def heed(self, stats: Stats) -> None:
        """Takes over the SLO that the engine says is in force."""
        if stats.slo_ttft_s is None or stats.slo_tpot_s is None:
            self.slo = None
        else:
            self.slo = Slo(stats.slo_ttft_s, stats.slo_tpot_s, Metric(stats.slo_metric or Metric.TPOT))

    def slo_for(self, ttft_s: float | None, tpot_s: float | None) -> Slo | None:
        """Of a request with these limits of its own, either of which may be missing."""
        general = self.slo
        if ttft_s is None and tpot_s is None:
            return general
        otherwise = general or Slo(math.inf, math.inf)
        return Slo(
            otherwise.ttft_s if ttft_s is None else ttft_s,
            otherwise.tpot_s if tpot_s is None else tpot_s,
            otherwise.metric,
        )

    def arrived(self, now: float) -> None:
        self._mark(now)

    def ended(self, request: Ended) -> None:
        self.requests += 1
        self._ended.append(request)
        while self._ended[0].at_s < request.at_s - KEPT_S:
            self._ended.popleft()
        self._mark(request.at_s)

    def reading(self, at: float) -> Served:
        """As it was at ``at``, up to KEPT_S - WINDOW_S ago. Rates are interpolated between requests' arrivals and ends
        where nothing was read at that time."""
        ended = [request for request in self._ended if at - WINDOW_S < request.at_s <= at]
        latencies = [request.latency for request in ended if request.latency is not None]
        judged = [request for request in ended if request.verdict is not None]
        verdicts = Counter(request.verdict for request in judged)
        rates = self._rates(at)
        return Served(
            requests=len(ended),
            failed=len(ended) - len(latencies),
            ttft_s=Percentiles.of([latency.ttft_s for latency in latencies]),
            tpot_s=Percentiles.of([latency.tpot_s for latency in latencies]),
            gap_p99_s=Percentiles.of([latency.gap_p99_s for latency in latencies]),
            judged=len(judged),
            attainment=verdicts[ATTAINED] / len(judged) if judged else None,
            missed={reason: verdicts[reason] for reason in REASONS if verdicts[reason]},
            by_prompt=_quartiles(judged),
            requests_per_s=rates.requests,
            prompt_tokens_per_s=rates.prompt_tokens,
            output_tokens_per_s=rates.output_tokens,
        )

    def read(self, now: float) -> Served:
        """As it is."""
        self._mark(now, least_s=0.0)
        return self.reading(now)

    def _mark(self, now: float, least_s: float = 1.0) -> None:
        if self._marks and now < self._marks[-1].at_s + least_s:
            return
        self._marks.append(self._so_far(now))
        stale = bisect.bisect_left(self._marks, (now - KEPT_S,))
        if stale > 1:
            del self._marks[: stale - 1]

    def _so_far(self, at: float) -> _Mark:
        return _Mark(at, self.requests, self.prompt_tokens, self.output_tokens)

    def _rates(self, at: float) -> _Mark:
        start, end = self._totals(at - RATE_S), self._totals(at)
        return _Mark(at, *((later - earlier) / RATE_S for earlier, later in zip(start[1:], end[1:], strict=True)))

    def _totals(self, at: float) -> _Mark:
        after = bisect.bisect_left(self._marks, (at,))
        if after == len(self._marks):
            return self._so_far(at)
        if after == 0:
            return self._marks[0]
        earlier, later = self._marks[after - 1], self._marks[after]
        part = (at - earlier.at_s) / (later.at_s - earlier.at_s)  # at lies above earlier and not above later
        return _Mark(*(a + part * (b - a) for a, b in zip(earlier, later, strict=True)))


def _quartiles(judged: list[Ended]) -> list[PromptQuartile]:
    return [
        PromptQuartile(
            quarter[0].prompt_tokens,
            quarter[-1].prompt_tokens,
            len(quarter),
            sum(request.verdict == ATTAINED for request in quarter) / len(quarter),
        )
        for quarter in quarters(judged, lambda request: request.prompt_tokens)
    ]
