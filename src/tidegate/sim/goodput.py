"""The highest rate that keeps an SLO, by bisection over simulations."""

from collections.abc import Callable
from typing import NamedTuple

from tidegate.slo.goodput import GOODPUT_ATTAINMENT

DOUBLINGS = 24  # from the first rate, either way


class Found(NamedTuple):
    requests_per_s: float  # 0: no rate that was tried attains the SLO
    tried: list[tuple[float, float]]  # rates and their attainments, in the order of trying


def search_goodput(
    attained: Callable[[float], float],
    start: float,
    precision: float = 0.01,
    threshold: float = GOODPUT_ATTAINMENT,
) -> Found:
    """The highest rate at which ``attained(rate)`` is at least ``threshold``, to a share ``precision`` below it.

    Doubles or halves from ``start`` until a rate attains it and twice that rate does not, then bisects. Attainment is
    taken to fall with the rate; where it does not, the answer is one of its crossings of the threshold. A rate that
    still attains it after ``DOUBLINGS`` is the answer.
    """
    tried: list[tuple[float, float]] = []

    def passes(rate: float) -> bool:
        tried.append((rate, attained(rate)))
        return tried[-1][1] >= threshold

    factor = 2.0 if passes(start) else 0.5
    rate = start
    for _ in range(DOUBLINGS):
        rate *= factor
        if passes(rate) != (factor > 1):
            break
    else:
        return Found(rate if factor > 1 else 0.0, tried)
    low, high = (rate / 2, rate) if factor > 1 else (rate, rate * 2)
    while high - low > precision * low:
        middle = (low + high) / 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return Found(low, tried)
