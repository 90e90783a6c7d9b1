"""The search for a server's goodput under one setting: probes at one rate after another."""

import math
from collections.abc import Sequence

import msgspec

from tidegate.bench.arrivals import Pattern
from tidegate.bench.client import Client
from tidegate.bench.idle import IdleCheck
from tidegate.bench.load import Limits, Progress
from tidegate.bench.payload import PATHS, Payloads
from tidegate.bench.plan import AnyWorkload, Lengths, arrivals, own_arrivals, planned, within
from tidegate.bench.probe import Judging, Probe, run_probe
from tidegate.bench.search import Search
from tidegate.bench.traces import Trace
from tidegate.slo.goodput import Slo, goodput

_FEWEST_REQUESTS = 10  # that count, in a probe: at lower rates it could say nothing


class Hunt(msgspec.Struct, frozen=True):
    """What is searched, and how. Rates in requests per second.

    ``own_times``: a trace's own times, scaled to each rate, instead of ``pattern``. ``drain_s``: that the server has
    after each probe to become idle.
    """

    workload: AnyWorkload
    lengths: Lengths
    pattern: Pattern
    own_times: bool
    judging: Judging
    limits: Limits
    start_rate: float
    highest_rate: float
    precision: float
    drain_s: float

    @property
    def lowest_rate(self) -> float:
        return _FEWEST_REQUESTS / self.judging.looks_s[-1]

    @property
    def span_s(self) -> float:
        """Of a probe's arrivals: after the last that counts, they go on for as long as before the first."""
        return 2 * self.judging.warmup_s + self.judging.looks_s[-1]


class Found(msgspec.Struct, frozen=True):
    """Goodput under one SLO: at ``low`` enough requests attained it, at ``high`` too few.

    ``high`` is None when no rate was too high, ``low`` 0 when every rate was. ``undecided``: those of the two at which
    the sample did not decide with the confidence asked for. ``requests_per_s``: see ``slo.goodput.goodput``.
    """

    slo: Slo
    requests_per_s: float
    low: float
    high: float | None
    undecided: list[float]


class Watcher:
    """Is told how a search goes on. These methods do nothing, for those who don't want to know."""

    def preparing(self, rate: float | None) -> None: ...

    def progress(self, counts: Progress) -> None: ...

    def probed(self, probe: Probe) -> None: ...


class Prober:
    """Probes one server. Prompts of two probes are never the same."""

    def __init__(self, client: Client, payloads: Payloads, hunt: Hunt, watcher: Watcher) -> None:
        self.hunt = hunt
        self._client = client
        self._payloads = payloads
        self._watcher = watcher
        self._idle = IdleCheck(client, payloads, hunt.limits)
        self._number = 0

    async def prepare(self) -> None:
        """Before the first probe. Raises TidegateError when the server can't be measured at all."""
        await self._idle.learn()

    async def probe(self, rate: float, goal: int) -> Probe:
        """At this rate, to decide on the SLO with this index. Returns once the server is idle again.

        Raises TidegateError when it fails to answer afterwards.
        """
        hunt = self.hunt
        self._number += 1
        self._watcher.preparing(rate)
        if hunt.own_times and isinstance(hunt.workload, Trace):
            endless = own_arrivals(hunt.workload, rate)
        else:
            endless = arrivals(hunt.workload, rate, self._payloads.seed, hunt.pattern)
        requests = hunt.lengths.applied(within(endless, hunt.span_s))
        probe = await run_probe(
            self._client,
            PATHS[self._payloads.endpoint],
            planned(requests, self._payloads, self._number),
            hunt.limits,
            hunt.judging,
            number=self._number,
            rate=rate,
            goal=goal,
            progress=self._watcher.progress,
        )
        run = msgspec.structs.replace(probe.run, each=[])  # only what is said of all of them is kept
        probe = msgspec.structs.replace(probe, run=run, drained=await self._idle.wait(hunt.drain_s))
        self._watcher.probed(probe)
        return probe


async def find_goodput(prober: Prober, probes: list[Probe], start_rate: float, first_step: float = 2.0) -> None:
    """Adds probes to ``probes`` until the goodput under every SLO is known from them, one SLO after another.

    What earlier probes decided is not tried again.
    """
    hunt = prober.hunt
    for goal, slo in enumerate(hunt.judging.slos):
        search = Search(
            start_rate,
            precision=hunt.precision,
            lowest=hunt.lowest_rate,
            highest=hunt.highest_rate,
            step=first_step,
        )
        for probe in _telling(probes, goal):
            search.learn(probe.rate, probe.passes(slo, hunt.judging.threshold))
        while (rate := search.next_rate()) is not None:
            probe = await prober.probe(rate, goal)
            probes.append(probe)
            search.learn(rate, probe.passes(slo, hunt.judging.threshold))


def found(probes: Sequence[Probe], slos: Sequence[Slo], threshold: float) -> list[Found]:
    """The goodput under each SLO that ``probes`` say something about."""
    results = []
    for goal, slo in enumerate(slos):
        telling = sorted(_telling(probes, goal), key=lambda probe: probe.rate)
        if not telling:
            continue
        missed = [probe for probe in telling if not probe.passes(slo, threshold)]
        high = missed[0].rate if missed else math.inf
        below = [probe for probe in telling if probe.rate < high]
        ends = below[-1:] + missed[:1]
        points = [(probe.rate, probe.verdict(slo).interval.attainment) for probe in telling]
        results.append(
            Found(
                slo,
                goodput(points, threshold),
                below[-1].rate if below else 0.0,
                high if missed else None,
                [probe.rate for probe in ends if probe.verdict(slo).is_open],
            )
        )
    return results


def _telling(probes: Sequence[Probe], goal: int) -> list[Probe]:
    """Those that went on until the SLO with this index was decided, or their time was over."""
    return [
        probe
        for probe in probes
        if goal == probe.goal or not probe.verdicts[goal].is_open or probe.verdicts[probe.goal].is_open
    ]
