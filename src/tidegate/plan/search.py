"""Finds the candidates with the most goodput: bounds first, then simulations that get longer as fewer are left
(successive halving; Jamieson and Talwalkar, arXiv 1502.07943)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidegate.base.errors import ConfigError
from tidegate.plan.bounds import Bound, hardware_bound
from tidegate.plan.candidate import Candidate, Simulated
from tidegate.plan.colocated import Colocated, colocated
from tidegate.plan.disaggregated import Disaggregation, Split
from tidegate.plan.mixed import Mixed
from tidegate.plan.rate import Found, Length, highest_rate, probe
from tidegate.plan.setting import Setting
from tidegate.slo.goodput import GOODPUT_ATTAINMENT, Latency, Metric, percentile

ROUNDS = (100, 250, 900)  # requests of a simulation
FACTORS = (1.2, 1.1, 1.06)  # by which its rates differ at first
KEPT = (5, 3)  # candidates that go on to the next round
LEAST_SIMULATED, MOST_SIMULATED = 8, 16  # candidates
DOUBT = 1.1  # a ceiling may be too low by so much
FIRST_GUESS = 0.8  # of a ceiling
JUST_BELOW = 0.95  # of what was found before: where the next, longer simulation starts
FAR_BEHIND = 0.4  # of the best: nobody needs to know it better
MOST_SETTLED = 3  # candidates that turn out to be first after all
FEW = 60  # requests, to see what is reachable

Progress = Callable[[str, float], None]


class Measured(NamedTuple):
    """``round``: 1 for the shortest simulations."""

    candidate: Candidate
    found: Found
    round: int

    @property
    def total(self) -> float:
        """Requests/s of all copies."""
        return self.found.rate * self.candidate.copies


class Plan(NamedTuple):
    """``measured``: best first. ``passed_over``: with rates of a unit that they stay below, which is far less than what
    others attain; ``unreachable``: that can't meet the SLO at any rate."""

    measured: list[Measured]
    passed_over: Sequence[tuple[Candidate, float]]
    unreachable: Sequence[Candidate]
    bound: Bound


def search(setting: Setting, progress: Progress, rounds: Sequence[int] = ROUNDS) -> Plan:
    """``rounds``: requests of simulations, three ascending numbers. Raises ConfigError where nothing meets the SLO,
    saying what can be reached."""
    progress("computing bounds", 0.0)
    single = colocated(setting)
    disaggregation = Disaggregation(setting)
    splits: list[Split] = []
    if setting.gpus > 1:
        progress("prefill and decode apart", 0.02)
        splits = [*disaggregation.high_affinity(), *disaggregation.low_affinity()]
    proposed: list[Simulated] = sorted([*single, *splits], key=_total_ceiling, reverse=True)
    race = _Race(setting, progress, rounds)
    not_simulated = race.first([candidate for candidate in proposed if candidate.ceiling > 0])
    if race.results():
        race.next(1)
        race.next(2)
        race.settle()
    everyone = [*race.results(), *_mixes(race, disaggregation, setting)]
    measured = sorted((one for one in everyone if one.total > 0), key=_total, reverse=True)
    if not measured:
        raise ConfigError(unreached(setting, single))
    given_up = [(one.candidate, one.found.high) for one in everyone if one.total <= 0]
    below = [pair for pair in given_up if pair[1] > 0] + [(one, one.ceiling) for one in not_simulated]
    never = [one for one, high in given_up if high <= 0] + [one for one in proposed if one.ceiling <= 0]
    return Plan(measured, below, never, hardware_bound(setting))


class _Race:
    """Simulations of more and more requests, for fewer and fewer candidates."""

    def __init__(self, setting: Setting, progress: Progress, rounds: Sequence[int]) -> None:
        self._setting, self._progress, self._rounds = setting, progress, rounds
        self._bound = hardware_bound(setting).requests_per_s
        self._measured: dict[str, tuple[Simulated, Measured]] = {}

    def first(self, candidates: Sequence[Simulated]) -> list[Simulated]:
        """The shortest simulations, by descending ceiling, until no ceiling comes near the best. Returns the rest."""
        for index, candidate in enumerate(candidates):
            hopeless = index >= LEAST_SIMULATED and DOUBT * _total_ceiling(candidate) < self._best()
            if hopeless or index >= MOST_SIMULATED:
                return list(candidates[index:])
            self._progress(candidate.name, 0.1 + 0.4 * index / min(len(candidates), MOST_SIMULATED))
            self.measure(candidate, FIRST_GUESS * candidate.ceiling, 0)
        return []

    def next(self, of_round: int) -> None:
        """Longer simulations of the best so far."""
        best = sorted(self._measured.values(), key=lambda pair: _standing(pair[1]), reverse=True)[: KEPT[of_round - 1]]
        for index, (candidate, measured) in enumerate(best):
            self._progress(candidate.name, 0.3 + 0.2 * of_round + 0.2 * index / len(best))
            if measured.total > FAR_BEHIND * self._best():
                self.measure(candidate, JUST_BELOW * measured.found.rate, of_round)

    def settle(self) -> None:
        """The longest simulation for whoever is first with a shorter one, until the first has had it."""
        last = len(self._rounds) - 1
        for _ in range(MOST_SETTLED):
            candidate, measured = max(self._measured.values(), key=lambda pair: pair[1].total)
            if measured.round > last:
                break
            self._progress(candidate.name, 0.92)
            self.measure(candidate, JUST_BELOW * measured.found.rate, last)

    def _best(self) -> float:
        return max((measured.total for measured in self.results()), default=0.0)

    def results(self) -> list[Measured]:
        return [measured for _, measured in self._measured.values()]

    def measure(self, candidate: Simulated, guess: float, of_round: int) -> Measured:
        setting = self._setting
        length = Length(self._rounds[of_round] * candidate.instances, setting.settle_s, candidate.instances)
        most = min(self._bound * candidate.unit_gpus, candidate.capacity)
        factor = FACTORS[of_round]
        floor = FAR_BEHIND * self._best() / candidate.copies
        found = highest_rate(
            candidate.simulate, setting.demand, setting.slo, guess, length, most, of_round, factor, floor
        )
        measured = Measured(candidate, found, of_round + 1)
        self._measured[candidate.name] = candidate, measured
        return measured


def _mixes(race: _Race, disaggregation: Disaggregation, setting: Setting) -> list[Measured]:
    """Splits on k GPUs with the best engine on the rest: the two mixes that promise most."""
    engines = [measured for measured in race.results() if isinstance(measured.candidate, Colocated)]
    if setting.gpus < 3 or not engines:
        return []
    single = max(engines, key=_total)
    pairs = []
    for gpus in range(2, setting.gpus):
        z = (setting.gpus - gpus) // single.candidate.unit_gpus
        pairs += [(Mixed(split, single.candidate, z), split) for split in disaggregation.using(gpus) if z]
    pairs.sort(key=lambda pair: pair[0].ceiling, reverse=True)
    mixes = []
    for mix, split in pairs[:2]:
        found = race.measure(split, FIRST_GUESS * split.ceiling, 1).found
        if found.rate > 0 and single.found.rate > 0:
            mixes.append(Measured(mix, mix.found(found, single.found), single.round))
    return mixes


def _total(measured: Measured) -> float:
    return measured.total


def _standing(measured: Measured) -> tuple[int, float]:
    return measured.round, measured.total


def _total_ceiling(candidate: Candidate) -> float:
    return candidate.ceiling * candidate.copies


def unreached(setting: Setting, candidates: Sequence[Colocated]) -> str:
    """What the best candidate attains when hardly anybody asks, and the limits that would hold then."""
    slow = 0.1 / (setting.settle_s + setting.slo.ttft_s)
    autos = [candidate for candidate in candidates if candidate.adapts]
    tried = [
        (candidate, probe(candidate.simulate, setting.demand, setting.slo, slow, Length(FEW, 0.0)))
        for candidate in autos
    ]
    candidate, found = max(tried, key=lambda pair: pair[1].attained)
    latencies = [latency for latency in found.latencies if latency is not None]
    ttft_s = percentile((latency.ttft_s for latency in latencies), GOODPUT_ATTAINMENT)
    pace_s = percentile((_pace_s(latency, setting.slo.metric) for latency in latencies), GOODPUT_ATTAINMENT)
    return (
        f"nothing on {setting.gpus} × {setting.device.title} reaches TTFT {setting.slo.ttft_s * 1e3:g} ms and "
        f"{setting.slo.metric} {setting.slo.tpot_s * 1e3:g} ms for {GOODPUT_ATTAINMENT:.0%} of the requests: with one "
        f"request at a time {candidate.name} attains {found.attained:.0%}; --slo ttft={ttft_s * 1.01e3:.0f}ms,"
        f"tpot={pace_s * 1.01e3:.1f}ms would hold then"
    )


def _pace_s(latency: Latency, metric: Metric) -> float:
    return latency.gap_p99_s if metric is Metric.GAP else latency.tpot_s
