"""One reading of everything that the live page shows: the engine's statistics, what they say as rates, and what
requests experienced."""

import msgspec

from tidegate.base.stats import LaneStats, Stats
from tidegate.server.live import Served


class LaneRates(msgspec.Struct, frozen=True):
    """``busy``: part of the time, 0 to 1."""

    busy: float
    batches_per_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class Rates(msgspec.Struct, frozen=True):
    """``choices_per_s``: batches by what the gate chose for them; empty where it has nothing to choose."""

    choices_per_s: dict[str, float]
    lanes: dict[str, LaneRates]


class Snapshot(msgspec.Struct, frozen=True):
    """``time_s``: since the epoch. ``stats`` None: the engine was not asked, because nobody watched, or it is dead.
    ``rates`` None: there are no statistics of just before to compare with."""

    time_s: float
    alive: bool
    stats: Stats | None
    rates: Rates | None
    served: Served


def rates(stats: Stats, before: Stats, seconds: float) -> Rates:
    """``before``: the statistics of so many seconds earlier."""
    chosen = {
        choice: _rate(count, before.gate_choices.get(choice, 0), seconds)
        for choice, count in stats.gate_choices.items()
    }
    return Rates(
        {choice: rate for choice, rate in chosen.items() if rate > 0.0},
        {name: _lane(lane, before.lanes.get(name, LaneStats()), seconds) for name, lane in stats.lanes.items()},
    )


def _lane(lane: LaneStats, before: LaneStats, seconds: float) -> LaneRates:
    return LaneRates(
        busy=min(1.0, _rate(lane.busy_seconds, before.busy_seconds, seconds)),
        batches_per_s=_rate(lane.batches, before.batches, seconds),
        prefill_tokens_per_s=_rate(lane.prefill_tokens, before.prefill_tokens, seconds),
        decode_tokens_per_s=_rate(lane.decode_tokens, before.decode_tokens, seconds),
    )


def _rate(now: float, before: float, seconds: float) -> float:
    """Totals start at 0 again with a new gate, as after a change of mode."""
    return (now - before if now >= before else now) / seconds
