"""What a sample says about the share of requests that attain an SLO: an interval, and whether it is decided.

The sample is looked at several times while it grows, and the requests of one run are not independent: a queue makes
them miss together. Both would make an interval too narrow. So

- the error is divided evenly among the looks, which are fixed before (Bonferroni): the intervals of all looks hold
  together with the confidence asked for, whatever is decided on when to stop;
- the size of the sample is divided by its design effect (Kish 1965): the variance of the means of successive batches,
  over what it would be if the requests were independent. It is taken to be at least 1.5, for a sample with few misses
  does not show in what groups they come.

The interval is Clopper and Pearson's (Biometrika 1934), which holds for every share and size of sample. So the
confidence is kept for independent requests and for misses in short groups. It can't be kept for misses in groups that
are long against the sample: whoever expects these (long prompts, a queue that fills slowly) takes longer samples.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec

_BATCHES = 20
_LEAST_BATCH = 5  # requests; of smaller ones, the variance says nothing about queues
_LEAST_EFFECT = 1.5


class Decision(StrEnum):
    ATTAINED = "attained"
    MISSED = "missed"
    OPEN = "undecided"


class Interval(msgspec.Struct, frozen=True):
    """Where the share of requests lies that attain an SLO, and ``attainment``, the share in the sample."""

    attainment: float
    low: float
    high: float
    design_effect: float

    @classmethod
    def of(cls, met: Sequence[bool], error: float) -> "Interval":
        """``met``: whether each request attained the SLO, in order of arrival. Misses the truth with probability
        ``error`` at most. Without requests: from 0 to 1."""
        if not met:
            return cls(math.nan, 0.0, 1.0, 1.0)
        effect = design_effect(met)
        size = len(met) / effect
        share = sum(met) / len(met)
        return cls(share, *clopper_pearson(share * size, size, error), effect)

    def decision(self, threshold: float) -> Decision:
        if self.low >= threshold:
            return Decision.ATTAINED
        return Decision.MISSED if self.high < threshold else Decision.OPEN


def looks(min_s: float, max_s: float, period_s: float | None = None) -> list[float]:
    """Seconds of arrivals after which a sample is looked at: ``min_s``, twice that, and so on, ``max_s`` at last.

    All are whole multiples of ``period_s``, after which a load that changes in time repeats itself; ``max_s`` is
    rounded down to one, but no look is earlier than ``min_s``.
    """
    found = []
    at_s = _up(min_s, period_s)
    last_s = max(at_s, max_s if period_s is None else math.floor(max_s / period_s + 1e-9) * period_s)
    while at_s < last_s:
        found.append(at_s)
        at_s = _up(2 * at_s, period_s)
    if len(found) > 1 and last_s < 1.25 * found[-1]:
        found.pop()  # two looks that see nearly the same cost confidence and say nothing new
    return [*found, last_s]


def _up(seconds: float, period_s: float | None) -> float:
    return seconds if period_s is None else math.ceil(seconds / period_s - 1e-9) * period_s


def design_effect(met: Sequence[bool]) -> float:
    """About n when groups of n share one fate, and at least ``_LEAST_EFFECT``."""
    batches = min(_BATCHES, len(met) // _LEAST_BATCH)
    share = sum(met) / len(met)
    if batches < 2 or share in (0.0, 1.0):
        return _LEAST_EFFECT
    size = len(met) // batches
    means = [sum(met[i * size : (i + 1) * size]) / size for i in range(batches)]
    center = math.fsum(means) / batches
    variance = math.fsum((mean - center) ** 2 for mean in means) / (batches - 1)
    return max(_LEAST_EFFECT, variance * size / (share * (1 - share)))


def clopper_pearson(hits: float, size: float, error: float) -> tuple[float, float]:
    """The shares at which so many hits or more, or so many or fewer, have probability ``error / 2``.

    ``hits`` and ``size`` need not be whole: the binomial's tails go on as the beta distribution.
    """
    low = 0.0 if hits <= 0 else _quantile(error / 2, hits, size - hits + 1)
    high = 1.0 if hits >= size else _quantile(1 - error / 2, hits + 1, size - hits)
    return low, high


def _quantile(probability: float, a: float, b: float) -> float:
    """Of the beta distribution, by halving."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if beta_below(middle, a, b) < probability else (low, middle)
    return (low + high) / 2


def beta_below(x: float, a: float, b: float) -> float:
    """The beta distribution's probability of at most ``x``: the regularised incomplete beta function I_x(a, b), by its
    continued fraction (Abramowitz and Stegun 26.5.8), from its end to its front."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - beta_below(1 - x, b, a)
    fraction = 1.0
    for m in range(20 + int(3 * math.sqrt(a + b)), 0, -1):
        fraction = 1 + m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) / fraction
        fraction = 1 - (a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1)) / fraction
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * fraction)
