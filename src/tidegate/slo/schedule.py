"""How much time decoding requests can do without: their schedule to an SLO on the mean TPOT.

A request that has told k of n tokens, the first at ``first_s``, meets the SLO if its last comes by
``first_s + (n - 1) · tpot``. If the tokens after its next one come at the ``pace`` of late, that one may be as late as

    first_s + (n - 1) · tpot  -  (n - 1 - k) · pace

n is not known: it is taken from lengths of earlier answers, so short that most get longer (``CAUTION``).
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable

# Of a decoding request: when its first token was told; tokens told, those of batches in flight included; its TPOT.
# Plain tuples, since there is one for each request in each step.
Standing = tuple[float, int, float]


class Schedule:
    KEPT = 512  # lengths
    CAUTION = 0.1  # this part of the answers that are still running are taken to end earlier than assumed
    WEIGHT = 0.02  # of a new step, in the pace
    LOST = 0.5  # of its TPOT: a request whose next token would have to come sooner can't meet its SLO any more

    def __init__(self) -> None:
        self._lengths: deque[int] = deque()
        self._sorted: list[int] = []
        self.pace_s: float | None = None  # mean time between decode steps, of late

    def step(self, seconds: float) -> None:
        """From the end of a decode step to the end of the next."""
        pace = seconds if self.pace_s is None else self.pace_s
        self.pace_s = pace + self.WEIGHT * (seconds - pace)

    def ended(self, output_tokens: int) -> None:
        self._lengths.append(output_tokens)
        insort(self._sorted, output_tokens)
        if len(self._lengths) > self.KEPT:
            del self._sorted[bisect_left(self._sorted, self._lengths.popleft())]

    def spares_s(self, decoding: Iterable[Standing], now: float, count: int) -> list[float]:
        """The ``count`` shortest times within which requests' next tokens must come, ascending. Requests that can't
        meet their SLO any more are left out: they must not sink the others."""
        lefts = []
        slowest = math.inf if self.pace_s is None else self.pace_s
        lengths, known, caution = self._sorted, len(self._sorted), self.CAUTION
        for first_s, told, tpot in decoding:
            longer = bisect_right(lengths, told + 1)  # lengths from here on are possible
            after = lengths[longer + int((known - longer) * caution)] - told - 1 if longer < known else 0
            pace = slowest if slowest < tpot else tpot
            left = first_s + tpot * (told + after) - after * pace - now
            if left >= self.LOST * tpot:
                lefts.append(left)
        return sorted(lefts)[:count]
