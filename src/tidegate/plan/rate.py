"""The highest rate at which enough requests meet an SLO, by simulating at a few rates."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tidegate.plan.demand import Arrival, Demand
from tidegate.slo.goodput import GOODPUT_ATTAINMENT, Latency, Slo, attainment, goodput

Simulate = Callable[[Sequence[Arrival], int], list[Latency | None]]

MOST_AT_ONCE = 512  # requests in an instance
COOL_DOWN = 0.1  # of the requests, which are not counted: they leave an engine that gets empty
Z_95 = 1.96  # of a normal distribution: 95 % of it lies so many standard deviations around its mean
PROBES = 6
PRECISION = 0.04
FAR_BELOW = 8.0  # times lower than the lowest rate, that did not do: the last to be tried


class Probe(NamedTuple):
    rate: float
    attained: float
    latencies: list[Latency | None]  # of the counted requests

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, at 95 %, as if requests were independent of each other."""
        count, share = len(self.latencies), self.attained
        middle = (share + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
        half = Z_95 * math.sqrt(share * (1 - share) / count + Z_95**2 / (4 * count**2)) / (1 + Z_95**2 / count)
        return middle - half, middle + half


class Length(NamedTuple):
    """Of a simulation: ``counted`` requests after those that find an engine that is not yet as full as it will be:
    as many as come in ``settle_s``, the time of an answer, but no more than ``instances`` hold."""

    counted: int
    settle_s: float
    instances: int = 1

    def warm_up(self, rate: float) -> int:
        return min(int(rate * self.settle_s), MOST_AT_ONCE * self.instances)


class Found(NamedTuple):
    """In requests/s; ``low`` and ``high`` are the goodputs by the lower and upper ends of the probes' intervals.
    ``probes`` ascend."""

    rate: float
    low: float
    high: float
    probes: list[Probe]

    @property
    def best(self) -> Probe:
        """The one nearest to the rate found."""
        return min(self.probes, key=lambda probe: abs(probe.rate - self.rate))

    @property
    def beyond(self) -> Probe:
        """The lowest at which too few attained the SLO; the highest if there is none."""
        missed = (probe for probe in self.probes if probe.attained < GOODPUT_ATTAINMENT)
        return next(missed, self.probes[-1])


def probe(simulate: Simulate, demand: Demand, slo: Slo, rate: float, length: Length, part: int = 0) -> Probe:
    """Requests at ``rate``."""
    before = length.warm_up(rate)
    latencies = simulate(demand.arrivals(rate, before + length.counted, part), part)
    counted = latencies[before : before + math.ceil(length.counted * (1 - COOL_DOWN))]
    return Probe(rate, attainment(counted, slo), counted)


def highest_rate(
    simulate: Simulate,
    demand: Demand,
    slo: Slo,
    guess: float,
    length: Length,
    most: float,
    part: int = 0,
    factor: float = 1.3,
    floor: float = 0.0,
) -> Found:
    """Brackets from ``guess``, at first by ``factor`` and each time by its square, then bisects. Never above ``most``.
    Gives up below ``floor``: the rate is then 0, and ``high`` where it failed."""
    probes: dict[float, Probe] = {}
    low, high, rate = 0.0, math.inf, min(guess, most)
    while len(probes) < PROBES:
        probes[rate] = found = probe(simulate, demand, slo, rate, length, part)
        if found.attained >= GOODPUT_ATTAINMENT:
            low = rate
        else:
            high = rate
        if high <= floor:
            return Found(0.0, 0.0, high, sorted(probes.values(), key=_rate))
        if low >= most or (high < math.inf and high - low <= PRECISION * high):
            break
        if math.isinf(high):
            rate = min(most, factor * low)
        elif low > 0.0:
            rate = (low + high) / 2
        else:
            rate = high / factor
        factor **= 2
    if low == 0.0:
        rate = min(probes) / FAR_BELOW
        probes[rate] = probe(simulate, demand, slo, rate, length, part)
    return summed_up(probes.values(), most)


def summed_up(probes: Iterable[Probe], most: float) -> Found:
    """0 where no rate attained the SLO."""
    ordered = sorted(probes, key=_rate)
    if all(found.attained < GOODPUT_ATTAINMENT for found in ordered):
        return Found(0.0, 0.0, 0.0, ordered)
    rate = goodput((found.rate, found.attained) for found in ordered)
    surely = goodput((found.rate, found.interval[0]) for found in ordered)
    perhaps = [(found.rate, found.interval[1]) for found in ordered]
    missed = any(share < GOODPUT_ATTAINMENT for _, share in perhaps)
    return Found(rate, surely, goodput(perhaps) if missed else most, ordered)


def _rate(probe: Probe) -> float:
    return probe.rate
