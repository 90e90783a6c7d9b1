"""Admission: how long a request that arrives now would wait for its first token, and whether that makes it pointless.

What is predicted is the work of those that the order puts before it, then its own, at the pace that the gate expects.
Not known, and so not counted: who will arrive later and pass it, a wait for memory, and what is in flight (a slice).
"""

from collections.abc import Iterable
from typing import NamedTuple

from tidegate.slo.outlook import Outlook

UNREACHABLE = 1.5  # times its TTFT (or, if that is more, the time that it needs even alone): it is refused beyond


class Expectation(NamedTuple):
    """Seconds until a request's first token."""

    ttft_s: float
    alone_s: float  # if it were the only one

    def retry_after_s(self, ttft_slo_s: float) -> float | None:
        """None: it is worth serving. Else in how many seconds it will be, if nobody else comes. A prompt so long that
        it would miss its TTFT in any case is refused only for what it would have to wait on top of that."""
        limit = UNREACHABLE * max(ttft_slo_s, self.alone_s)
        return self.ttft_s - limit if self.ttft_s > limit else None


def expect(ahead: Iterable[tuple[int, int]], start: int, tokens: int, outlook: Outlook) -> Expectation:
    """Of a prompt's ``tokens`` from position ``start``, behind others' (start, tokens)."""
    before_s = sum(outlook.work_s(first, count) for first, count in ahead)
    own_s = outlook.work_s(start, tokens)
    return Expectation(outlook.after_s(before_s + own_s), outlook.after_s(own_s))
