"""When requests come: Poisson arrivals, burstier or more even ones, and a rate that swings between two levels."""

import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tidegate.base.errors import ConfigError

Course = Callable[[float], float]
"""How a rate changes in time: when there have been as many arrivals as there are after so many seconds at an even rate
of the same mean."""


def _even(even_s: float) -> float:
    return even_s


class Bursts(NamedTuple):
    """For ``on_s`` seconds ``factor`` times the rate of the ``off_s`` seconds that follow, again and again.

    The mean stays what it was. A factor below 1 begins with the quiet part.
    """

    factor: float
    on_s: float
    off_s: float

    @property
    def period_s(self) -> float:
        return self.on_s + self.off_s

    def at_s(self, even_s: float) -> float:
        """When there have been as many arrivals as there are after ``even_s`` at an even rate of the same mean."""
        on_rate = self.period_s / (self.on_s + self.off_s / self.factor)  # as multiples of the mean
        turns, rest_s = divmod(even_s, self.period_s)
        in_burst_s = self.on_s * on_rate
        if rest_s < in_burst_s:
            within_s = rest_s / on_rate
        else:
            within_s = self.on_s + (rest_s - in_burst_s) * self.factor / on_rate
        return turns * self.period_s + within_s


class Pattern(NamedTuple):
    """``burstiness`` is the shape of gamma-distributed gaps, as in vLLM: 1 is Poisson, less comes in clumps (the gaps'
    variance is the mean squared, divided by it), more comes evenly. ``bursts`` move the arrivals that this gives."""

    burstiness: float = 1.0
    bursts: Bursts | None = None

    @property
    def period_s(self) -> float | None:
        """After which the rate repeats itself; None for a rate that does not change."""
        return self.bursts.period_s if self.bursts else None

    def times(self, rate: float, rng: random.Random, course: Course = _even) -> Iterator[float]:
        """Seconds after the start, for ever, the first at 0. ``rate``: requests per second, on average over
        ``course``; infinite: all at once."""
        if rate <= 0:
            raise ConfigError(f"A rate is a positive number of requests per second, not {rate:g}.")
        even_s = 0.0
        while True:
            at_s = course(even_s)
            yield self.bursts.at_s(at_s) if self.bursts else at_s
            even_s += self._gap_s(rate, rng)

    def _gap_s(self, rate: float, rng: random.Random) -> float:
        if math.isinf(rate):
            return 0.0
        if self.burstiness == 1.0:
            return rng.expovariate(rate)
        return rng.gammavariate(self.burstiness, 1 / (rate * self.burstiness))


POISSON = Pattern()
