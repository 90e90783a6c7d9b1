"""One probe: Poisson or other arrivals at one rate, until it is decided whether enough of them attain the SLO."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

from tidegate.base.clock import now_s
from tidegate.bench.client import Client
from tidegate.bench.confidence import Decision, Interval
from tidegate.bench.load import Exchange, Limits, Planned, Progress, sleep_until
from tidegate.bench.outcome import outcome
from tidegate.bench.own_load import OwnLoadMeter
from tidegate.bench.report import PromptQuartile, RunResult, run_result
from tidegate.slo.goodput import Slo

_POLL_S = 0.02


class Judging(msgspec.Struct, frozen=True):
    """Arrivals of the first ``warmup_s`` seconds don't count. The others are looked at after ``looks_s`` more seconds
    of arrivals each (see ``confidence.looks``); the first look that decides on the goal ends the probe."""

    slos: Sequence[Slo]
    threshold: float  # the share of requests that has to attain an SLO
    confidence: float
    warmup_s: float
    looks_s: Sequence[float]


class Verdict(msgspec.Struct, frozen=True):
    """On one SLO. ``by_prompt``: see ``report.Attainment``."""

    slo: Slo
    interval: Interval
    decision: Decision
    by_prompt: list[PromptQuartile]

    @property
    def is_open(self) -> bool:
        return self.decision is Decision.OPEN


class Probe(msgspec.Struct, frozen=True):
    """``goal``: the index of the SLO on which it was to decide. ``counted_s``: seconds of arrivals that count.

    ``run`` is of the requests that count. Those that were certain to miss every SLO when the probe ended were
    abandoned, which is a kind of failure there. ``drained``: the server was idle again after it.
    """

    number: int
    rate: float
    goal: int
    counted_s: float
    verdicts: list[Verdict]
    run: RunResult
    drained: bool = True

    def verdict(self, slo: Slo) -> Verdict:
        return next(verdict for verdict in self.verdicts if verdict.slo == slo)

    def passes(self, slo: Slo, threshold: float) -> bool:
        """As the sample says, whether or not that is decided."""
        return self.verdict(slo).interval.attainment >= threshold


class _Arrivals:
    """Starts the requests of a plan at their times, each in a task of ``group``."""

    def __init__(self, client: Client, path: str, plan: Sequence[Planned], limits: Limits) -> None:
        self.exchanges: list[Exchange] = []
        self._client = client
        self._path = path
        self._plan = plan
        self._limits = limits
        self._tasks: list[asyncio.Task[None]] = []

    async def send(self, group: asyncio.TaskGroup) -> None:
        start_s = now_s()
        for planned in self._plan:
            await sleep_until(start_s + planned.due_s)
            exchange = Exchange(planned, start_s)
            self._tasks.append(group.create_task(exchange.run(self._client, self._path, self._limits)))
            self.exchanges.append(exchange)

    def abandon(self) -> None:
        for task in self._tasks:
            task.cancel()


async def run_probe(
    client: Client,
    path: str,
    plan: Sequence[Planned],
    limits: Limits,
    judging: Judging,
    *,
    number: int,
    rate: float,
    goal: int,
    progress: Callable[[Progress], None],
) -> Probe:
    """``plan`` goes on for longer than the last look, so that requests that count are not the last ones.

    What still runs in the end is abandoned by closing its connection.
    """
    due_s = [planned.due_s for planned in plan]
    first = bisect_left(due_s, judging.warmup_s)
    ends = [max(first + 1, bisect_left(due_s, judging.warmup_s + look_s)) for look_s in judging.looks_s]
    error = (1 - judging.confidence) / len(ends)
    arrivals = _Arrivals(client, path, plan, limits)
    met: list[list[bool]] = []  # a row for each request that counts, in order of arrival
    async with OwnLoadMeter() as meter, asyncio.TaskGroup() as group:
        sending = group.create_task(arrivals.send(group))
        for look_s, end in zip(judging.looks_s, ends, strict=True):
            counted_s = look_s
            while first + len(met) < end:
                met.append(await _settled(arrivals.exchanges, first + len(met), judging.slos))
                progress(Progress(ends[-1] - first, max(0, len(arrivals.exchanges) - first), len(met)))
            intervals = [Interval.of([row[i] for row in met], error) for i in range(len(judging.slos))]
            if intervals[goal].decision(judging.threshold) is not Decision.OPEN:
                break
        sending.cancel()
        arrivals.abandon()
    records = [exchange.record() for exchange in arrivals.exchanges[first : first + len(met)]]
    run = run_result(rate, records, meter.reading([record.ready_s - record.due_s for record in records]), judging.slos)
    verdicts = [
        Verdict(slo, interval, interval.decision(judging.threshold), run.attainment(slo).by_prompt)
        for slo, interval in zip(judging.slos, intervals, strict=True)
    ]
    return Probe(number, rate, goal, counted_s, verdicts, run)


async def _settled(exchanges: Sequence[Exchange], index: int, slos: Sequence[Slo]) -> list[bool]:
    """Whether the request with this index attains each SLO, once all of that is certain."""
    while True:
        if index < len(exchanges) and exchanges[index].sent_s is not None:
            met = [outcome(exchanges[index], slo, now_s()) for slo in slos]
            certain = [attained for attained in met if attained is not None]
            if len(certain) == len(slos):
                await asyncio.sleep(0)  # between two of the many that are certain already, tokens may come in
                return certain
        await asyncio.sleep(_POLL_S)
