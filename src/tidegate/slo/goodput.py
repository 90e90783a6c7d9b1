"""The only definition of the latencies that an SLO is about, of attainment and of goodput.

    TTFT      first token's time - arrival
    gap       time between two tokens that follow each other
    TPOT      (last token's time - first token's time) / (tokens - 1): the mean gap (DistServe, OSDI 2024)
    p99 gap   the 99th percentile of one request's own gaps

A request attains an SLO when its TTFT is at most the SLO's and so is its TPOT, or its p99 gap where the SLO is on
gaps. Goodput is the highest rate of requests at which at least 90 % of all requests attain the SLO. Times are in
seconds, on any one clock.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

import msgspec
import numpy as np

GOODPUT_ATTAINMENT = 0.9

Request = TypeVar("Request")  # however a request is described


class Metric(StrEnum):
    """What an SLO holds against its ``tpot_s``."""

    TPOT = "tpot"
    GAP = "gap"


class Latency(msgspec.Struct, frozen=True):
    """What one finished request experienced. TPOT and p99 gap are 0 for a single token."""

    ttft_s: float
    tpot_s: float
    gap_p99_s: float

    @classmethod
    def of(cls, arrival_s: float, times_s: Sequence[float], tokens: int | None = None) -> "Latency":
        """Of a request whose output came at ``times_s``, which is not empty and ascends.

        ``tokens``: how many tokens came, where one time may stand for several (default: one each).
        """
        first, last = times_s[0], times_s[-1]
        count = len(times_s) if tokens is None else tokens
        gaps = np.diff(times_s)
        at = _place(len(gaps), 0.99)
        gap_p99_s = float(np.partition(gaps, at)[at]) if len(gaps) else 0.0
        return cls(first - arrival_s, (last - first) / max(1, count - 1), gap_p99_s)


class Slo(msgspec.Struct, frozen=True):
    """At most so many seconds to the first token, and for each next one."""

    ttft_s: float
    tpot_s: float
    metric: Metric = Metric.TPOT

    def met_by(self, latency: Latency) -> bool:
        pace = latency.gap_p99_s if self.metric is Metric.GAP else latency.tpot_s
        return latency.ttft_s <= self.ttft_s and pace <= self.tpot_s


def gaps_s(times_s: Sequence[float]) -> list[float]:
    """The times between neighbours: one fewer than there are times."""
    return [later - earlier for earlier, later in pairwise(times_s)]


def percentile(values: Iterable[float], fraction: float) -> float:
    """The smallest of ``values`` with more than ``fraction`` (0 to 1) of all at or below it; the largest if none has.

    Always one of the values, never between two, and the higher of the candidates. Raises ValueError without values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there is no percentile of nothing")
    return ordered[_place(len(ordered), fraction)]


def _place(count: int, fraction: float) -> int:
    """Of a percentile among so many values in ascending order."""
    return min(count - 1, int(count * fraction))


def attainment(latencies: Iterable[Latency | None], slo: Slo) -> float:
    """The share of requests that attain ``slo``; None stands for a request that failed. NaN without requests."""
    met = [latency is not None and slo.met_by(latency) for latency in latencies]
    return sum(met) / len(met) if met else math.nan


def quarters(requests: Iterable[Request], prompt_tokens: Callable[[Request], int]) -> list[list[Request]]:
    """Of the requests, by the length of their prompts, ascending; none where there are fewer than four, or where all
    are equally long."""
    ordered = sorted(requests, key=prompt_tokens)
    if len(ordered) < 4 or prompt_tokens(ordered[0]) == prompt_tokens(ordered[-1]):
        return []
    return [ordered[start:end] for start, end in pairwise(len(ordered) * quarter // 4 for quarter in range(5))]


def goodput(points: Iterable[tuple[float, float]], threshold: float = GOODPUT_ATTAINMENT) -> float:
    """The highest rate at which ``threshold`` of the requests attain the SLO, from ``points`` (rate, attainment).

    Rates ascend from the first point on up to the first that misses the threshold; between that and its predecessor,
    attainment is taken to be linear in the rate, and at rate 0 to be 1. Points after the first miss don't count. If
    none misses, it is the highest rate: a lower bound.
    """
    below_rate, below = 0.0, 1.0
    for rate, attained in sorted(points):
        if attained < threshold:
            return below_rate + (rate - below_rate) * (below - threshold) / (below - attained)
        below_rate, below = rate, attained
    return below_rate
