"""Whether the client itself was the bottleneck: how late it sent, how long its loop was busy, how much CPU it took."""

import asyncio
import resource
from collections.abc import Sequence
from types import TracebackType

import msgspec

from tidegate.base.clock import now_s
from tidegate.slo.goodput import percentile

_PROBE_S = 0.01
_TIMER_S = 0.001  # resolution of the event loop's timers: so much lateness means nothing

MOST_CPU_SHARE = 0.85
MOST_ERROR = 0.1  # of what is measured


class OwnLoad(msgspec.Struct, frozen=True):
    """Seconds, and CPU time of this process as a share of one core.

    ``late_*``: requests after their time. ``lag_*``: the event loop's answer to a timer, beyond the timer's own
    resolution; data may have waited as long for its timestamp.
    """

    late_p99_s: float
    late_max_s: float
    lag_p99_s: float
    lag_max_s: float
    cpu_share: float

    def warnings(self, ttft_p50_s: float, gap_p99_p50_s: float) -> list[str]:
        """What may have moved results, a sentence each. Given are the medians of TTFT and of p99 gaps, 0 for none.

        TPOT, a mean over many gaps, moves less than these.
        """
        found = []
        if self.cpu_share > MOST_CPU_SHARE:
            found.append(
                f"The client used {self.cpu_share:.0%} of a core, the most it can: run it on a faster or a free one, "
                "or divide the load among several."
            )
        for name, median_s in (("TTFT", ttft_p50_s), ("p99 gap", gap_p99_p50_s)):
            if median_s and self.lag_p99_s > MOST_ERROR * median_s:
                found.append(
                    f"The client's event loop was up to {self.lag_p99_s * 1e3:.1f} ms late (p99; at most "
                    f"{self.lag_max_s * 1e3:.1f} ms), which is not small against the median {name} of "
                    f"{median_s * 1e3:.1f} ms."
                )
        if ttft_p50_s and self.late_p99_s > _TIMER_S + MOST_ERROR * ttft_p50_s:
            found.append(
                f"Requests were sent up to {self.late_p99_s * 1e3:.1f} ms after their time (p99; at most "
                f"{self.late_max_s * 1e3:.1f} ms), so that they came in bunches."
            )
        return found


class OwnLoadMeter:
    """``async with OwnLoadMeter() as meter: ...``, then ``meter.reading(lateness)``."""

    def __init__(self) -> None:
        self._lags_s = [0.0]
        self._probe: asyncio.Task[None]
        self._start_s = self._end_s = 0.0
        self._cpu_s = 0.0

    async def __aenter__(self) -> "OwnLoadMeter":
        self._start_s, self._cpu_s = now_s(), _cpu_s()
        self._probe = asyncio.create_task(self._measure())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_s, self._cpu_s = now_s(), _cpu_s() - self._cpu_s
        self._probe.cancel()

    def reading(self, lateness_s: Sequence[float]) -> OwnLoad:
        late = lateness_s or [0.0]
        return OwnLoad(
            late_p99_s=percentile(late, 0.99),
            late_max_s=max(late),
            lag_p99_s=percentile(self._lags_s, 0.99),
            lag_max_s=max(self._lags_s),
            cpu_share=self._cpu_s / max(1e-9, self._end_s - self._start_s),
        )

    async def _measure(self) -> None:
        while True:
            slept_s = now_s()
            await asyncio.sleep(_PROBE_S)
            self._lags_s.append(max(0.0, now_s() - slept_s - _PROBE_S - _TIMER_S))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
