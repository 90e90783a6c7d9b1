"""Goodput under many settings of one running server, one combination of values after another.

A combination is cut off early when it is far below the best so far: its first probe is at a share of the best goodput,
and if too few requests attain the (first) SLO there, with the confidence asked for, its goodput is below that.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import product
from typing import NamedTuple

import msgspec

from tidegate.base.errors import ConfigError
from tidegate.bench.admin import Admin, Combination, Refused, Value
from tidegate.bench.confidence import Decision
from tidegate.bench.goodput import Found, Prober, find_goodput, found
from tidegate.bench.probe import Probe

_GOAL = 0  # the index of the SLO that combinations are compared under
_NEAR_STEP = 1.25  # outward, from a rate near another combination's goodput


class Dimension(NamedTuple):
    """A setting's name, as ``admin.Admin`` takes it, and the values to try."""

    name: str
    values: Sequence[Value]


class State(StrEnum):
    MEASURED = "measured"
    CUT_OFF = "cut off"
    SAME = "same"  # as an earlier one, which differs in what is not in force
    REFUSED = "refused"
    UNFINISHED = "unfinished"


class Row(msgspec.Struct):
    """One combination; empty without a sweep. ``note``: the server's words for a refusal, or the same combination."""

    setting: Combination
    state: State = State.UNFINISHED
    note: str = ""
    found: list[Found] = []
    probes: list[Probe] = []

    @property
    def name(self) -> str:
        return setting_text(self.setting)


def setting_text(setting: Combination) -> str:
    return " ".join(f"{name}={value}" for name, value in setting.items())


class Watcher:
    """Is told how a sweep goes on. These methods do nothing, for those who don't want to know."""

    def begun(self, row: Row) -> None: ...

    def ended(self, row: Row) -> None: ...


def combinations(dimensions: Sequence[Dimension]) -> list[Combination]:
    """All, the last dimension changing fastest. Raises ConfigError for a name that comes twice."""
    names = [dimension.name for dimension in dimensions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--sweep names {twice[0]} twice: give all of its values at once.")
    return [dict(zip(names, values, strict=True)) for values in product(*(each.values for each in dimensions))]


async def measure_one(prober: Prober, rows: list[Row]) -> None:
    """The server as it is. ``rows`` gets one row, at once, for the case that the measurement is broken off."""
    row = Row({})
    rows.append(row)
    await _measure(prober, row, best=None, cut_off=0.0)


async def sweep(
    prober: Prober, admin: Admin, all_settings: Sequence[Combination], cut_off: float, rows: list[Row], watcher: Watcher
) -> None:
    """Adds a row for each combination to ``rows`` as it comes to it. Leaves the server at the best.

    ``cut_off``: the share of the best goodput so far that a combination must reach; 0 measures all. Raises ConfigError
    where the server takes none of the combinations.
    """
    refusals = await _refusals(admin, all_settings)
    seen: dict[str, Row] = {}
    for setting, refusal in zip(all_settings, refusals, strict=True):
        row = Row(setting)
        rows.append(row)
        watcher.begun(row)
        if refusal is not None:
            row.state, row.note = State.REFUSED, refusal
        else:
            await admin.set(setting)
            first = seen.setdefault(setting_text(await admin.in_force(setting)), row)
            if first is row:
                await _measure(prober, row, _best(rows), cut_off)
            else:
                row.state, row.note, row.found = State.SAME, first.name, first.found
        watcher.ended(row)
    best = best_row(rows)
    if best is not None:
        await admin.set(best.setting)


def best_row(rows: Sequence[Row]) -> Row | None:
    """The first of those with the highest goodput; None where none is above 0."""
    measured = [row for row in rows if row.state is State.MEASURED and row.found[_GOAL].requests_per_s > 0]
    return max(measured, key=lambda row: row.found[_GOAL].requests_per_s, default=None)


async def _refusals(admin: Admin, all_settings: Sequence[Combination]) -> list[str | None]:
    """The server's words for each combination that it does not take. All are tried before anything is measured, so
    that a wrong name or value shows at once."""
    refusals: list[str | None] = []
    for setting in all_settings:
        try:
            await admin.set(setting)
        except Refused as refusal:
            refusals.append(str(refusal))
        else:
            refusals.append(None)
    if None not in refusals:
        raise ConfigError(f"The server takes none of the settings to sweep: {refusals[0]}")
    return refusals


def _best(rows: Sequence[Row]) -> float | None:
    best = best_row(rows)
    return best.found[_GOAL].requests_per_s if best is not None else None


async def _measure(prober: Prober, row: Row, best: float | None, cut_off: float) -> None:
    hunt = prober.hunt
    judging = hunt.judging
    try:
        at = cut_off * best if best else 0.0
        if at > hunt.lowest_rate:
            first = await prober.probe(at, _GOAL)
            row.probes.append(first)
            if first.verdicts[_GOAL].decision is Decision.MISSED:
                row.state = State.CUT_OFF
                return
        await find_goodput(prober, row.probes, best or hunt.start_rate, _NEAR_STEP if best else 2.0)
        row.state = State.MEASURED
    finally:
        row.found = found(row.probes, judging.slos, judging.threshold)
