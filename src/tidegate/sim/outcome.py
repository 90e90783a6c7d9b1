"""What a simulation says: attainment, latencies, and what the device and the gate did."""

import math
from collections.abc import Sequence

import msgspec

from tidegate.sim.engine import SimulatedEngine
from tidegate.sim.served import Served
from tidegate.slo.goodput import Slo, attainment, percentile, quarters


class Percentiles(msgspec.Struct, frozen=True):
    """In seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles | None":
        """None without values."""
        return cls(*(percentile(values, fraction) for fraction in (0.5, 0.9, 0.99))) if values else None


class Quartile(msgspec.Struct, frozen=True):
    """A quarter of the requests, by prompt length: ``from_tokens`` to ``to_tokens``, both included."""

    from_tokens: int
    to_tokens: int
    attainment: float
    ttft_p90_s: float | None


class Outcome(msgspec.Struct, frozen=True):
    """Of all engines of a simulation together. Latencies are of answered requests, attainment is of all."""

    requests: int
    failed: int
    seconds: float  # until the last token, of simulated time
    requests_per_s: float  # that were answered
    output_tokens_per_s: float
    attainment: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    gap_p99: Percentiles | None  # of each request's own 99th percentile
    by_prompt: list[Quartile]  # empty where ``slo.goodput.quarters`` are
    busy: dict[str, float]  # share of the time, by lane
    beside: float  # share of the time in which two lanes ran
    spent: dict[str, float]  # shares of the time in which anything ran, by what it was
    choices: dict[str, float]  # share of the gate's choices
    moves: int  # of the gate
    preemptions: int


def outcome(engines: Sequence[SimulatedEngine], slo: Slo) -> Outcome:
    """Once all requests have ended. Raises ValueError where there were none."""
    served = [one for engine in engines for one in engine.records]
    if not served:
        raise ValueError("no request was served")
    done = [(one, one.latency) for one in served if one.latency is not None]
    readings = [engine.readings for engine in engines]
    stats = [engine.core.stats() for engine in engines]
    seconds = max(reading.seconds for reading in readings)
    total_s = math.fsum(reading.seconds for reading in readings) or 1.0
    lanes = sorted({lane for reading in readings for lane in reading.busy_s})
    kinds = sorted({what for reading in readings for what in reading.spent_s})
    spent_s = {what: math.fsum(reading.spent_s.get(what, 0.0) for reading in readings) for what in kinds}
    names = sorted({name for stat in stats for name in stat.gate_choices})
    chosen = {name: sum(stat.gate_choices.get(name, 0) for stat in stats) for name in names}
    return Outcome(
        requests=len(served),
        failed=len(served) - len(done),
        seconds=seconds,
        requests_per_s=len(done) / (seconds or 1.0),
        output_tokens_per_s=sum(one.output_tokens for one, _ in done) / (seconds or 1.0),
        attainment=attainment([one.latency for one in served], slo),
        ttft=Percentiles.of([latency.ttft_s for _, latency in done]),
        tpot=Percentiles.of([latency.tpot_s for _, latency in done]),
        gap_p99=Percentiles.of([latency.gap_p99_s for _, latency in done]),
        by_prompt=_quartiles(served, slo),
        busy={lane: math.fsum(reading.busy_s.get(lane, 0.0) for reading in readings) / total_s for lane in lanes},
        beside=math.fsum(reading.beside_s for reading in readings) / total_s,
        spent={what: seconds / math.fsum(spent_s.values()) for what, seconds in spent_s.items()},
        choices={name: count / sum(chosen.values()) for name, count in chosen.items()},
        moves=sum(stat.gate_moves for stat in stats),
        preemptions=sum(stat.preemptions for stat in stats),
    )


def _quartiles(served: Sequence[Served], slo: Slo) -> list[Quartile]:
    quartiles = []
    for part in quarters(served, lambda one: one.prompt_tokens):
        ttfts = [one.latency.ttft_s for one in part if one.latency is not None]
        ttft_p90_s = percentile(ttfts, 0.9) if ttfts else None
        met = attainment([one.latency for one in part], slo)
        quartiles.append(Quartile(part[0].prompt_tokens, part[-1].prompt_tokens, met, ttft_p90_s))
    return quartiles
