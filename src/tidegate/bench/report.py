"""What the records of a run say: distributions, rates, attainment and goodput. Pure; times in seconds."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from tidegate.bench.load import Record
from tidegate.bench.own_load import OwnLoad
from tidegate.slo.goodput import Latency, Metric, Slo, attainment, gaps_s, goodput, percentile, quarters


class Distribution(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """None without values. Percentiles as ``slo.goodput.percentile`` defines them."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, fraction) for fraction in (0.5, 0.9, 0.99))
        return cls(math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


class PromptQuartile(msgspec.Struct, frozen=True):
    """A quarter of the requests, by prompt length: ``from_tokens`` to ``to_tokens``, both included."""

    from_tokens: int
    to_tokens: int
    attainment: float


class Attainment(msgspec.Struct, frozen=True):
    """``by_prompt`` is empty where all prompts are equally long or there are fewer than four."""

    slo: Slo
    attainment: float
    by_prompt: list[PromptQuartile]


class TokenCheck(msgspec.Struct, frozen=True):
    """Of the requests that did not fail. ``differing``: requests with other numbers of events and tokens, in which gaps
    are between events. ``counted``: requests whose tokens the server counted."""

    events: int
    tokens: int
    differing: int
    counted: int


class RequestResult(msgspec.Struct, frozen=True):
    """``failure`` is the kind of failure, and ``latency`` None with it."""

    sent_s: float
    prompt_tokens: int
    output_tokens: int
    latency: Latency | None
    failure: str | None


class RunResult(msgspec.Struct, frozen=True):
    """One run at one rate. Latencies and throughputs are of the requests that did not fail; attainment is of all.

    ``offered_rate``: requests per second; None where all came at once. ``gap`` is over all gaps of all requests,
    ``gap_p99`` over each request's own 99th percentile, ``end_to_end`` from sending to the last token.
    ``duration_s``: from the first sending to the last token. ``warnings``: how the client may have moved the results.
    """

    offered_rate: float | None
    requests: int
    failures: dict[str, int]  # by kind
    failure_messages: dict[str, str]  # the first of each kind
    duration_s: float
    completed_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Distribution | None
    tpot: Distribution | None
    gap: Distribution | None
    gap_p99: Distribution | None
    end_to_end: Distribution | None
    turn_wait: Distribution | None  # for one of the places under a maximum of concurrency
    attainments: list[Attainment]
    token_check: TokenCheck
    own_load: OwnLoad
    warnings: list[str]
    each: list[RequestResult]

    def attainment(self, slo: Slo) -> Attainment:
        return next(found for found in self.attainments if found.slo == slo)

    def attained(self, slo: Slo) -> float:
        return self.attainment(slo).attainment

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


class Goodput(msgspec.Struct, frozen=True):
    """``lower_bound``: the SLO was attained at every rate tried."""

    slo: Slo
    requests_per_s: float
    lower_bound: bool


def run_result(
    offered_rate: float | None, records: Sequence[Record], own_load: OwnLoad, slos: Iterable[Slo]
) -> RunResult:
    """``records`` is not empty."""
    latencies = [record.latency for record in records]
    done = [(record, latency) for record, latency in zip(records, latencies, strict=True) if latency is not None]
    failures = [record.failure for record in records if record.failure is not None]
    first_s = min(record.sent_s for record in records)
    duration_s = max((record.times_s[-1] for record, _ in done), default=first_s) - first_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    ttft = Distribution.of([latency.ttft_s for _, latency in done])
    gap_p99 = Distribution.of([latency.gap_p99_s for _, latency in done])
    return RunResult(
        offered_rate=offered_rate,
        requests=len(records),
        failures=dict(Counter(failure.kind for failure in failures)),
        failure_messages={failure.kind: failure.message for failure in reversed(failures)},
        duration_s=duration_s,
        completed_per_s=len(done) * per_s,
        input_tokens_per_s=sum(input_tokens(record) for record, _ in done) * per_s,
        output_tokens_per_s=sum(record.tokens for record, _ in done) * per_s,
        ttft=ttft,
        tpot=Distribution.of([latency.tpot_s for _, latency in done]),
        gap=Distribution.of([gap for record, _ in done for gap in gaps_s(record.times_s)]),
        gap_p99=gap_p99,
        end_to_end=Distribution.of([record.times_s[-1] - record.sent_s for record, _ in done]),
        turn_wait=Distribution.of([record.sent_s - record.ready_s for record in records]),
        attainments=[
            Attainment(slo, attainment(latencies, slo), _by_prompt(records, latencies, slo))
            for slo in _with_both_metrics(slos)
        ],
        token_check=TokenCheck(
            events=sum(len(record.times_s) for record, _ in done),
            tokens=sum(record.tokens for record, _ in done),
            differing=sum(len(record.times_s) != record.tokens for record, _ in done),
            counted=sum(record.usage is not None for record, _ in done),
        ),
        own_load=own_load,
        warnings=own_load.warnings(ttft.p50 if ttft else 0.0, gap_p99.p50 if gap_p99 else 0.0),
        each=[_request_result(record, latency) for record, latency in zip(records, latencies, strict=True)],
    )


def input_tokens(record: Record) -> int:
    """As the server counted them, else as asked for."""
    return record.usage.prompt_tokens if record.usage is not None else record.prompt_tokens


def _request_result(record: Record, latency: Latency | None) -> RequestResult:
    failure = record.failure.kind if record.failure is not None else None
    return RequestResult(record.sent_s, input_tokens(record), record.tokens, latency, failure)


def goodputs(runs: Sequence[RunResult]) -> list[Goodput]:
    """For each SLO, over the runs that have a rate; nothing without such runs."""
    rated = [(run.offered_rate, run) for run in runs if run.offered_rate is not None]
    if not rated:
        return []
    highest = max(rate for rate, _ in rated)
    found = []
    for slo in (attained.slo for attained in rated[0][1].attainments):
        requests_per_s = goodput([(rate, run.attained(slo)) for rate, run in rated])
        found.append(Goodput(slo, requests_per_s, lower_bound=requests_per_s == highest))
    return found


def _with_both_metrics(slos: Iterable[Slo]) -> list[Slo]:
    """Each SLO with its own metric, then each with the other."""
    given = list(slos)
    other = {Metric.TPOT: Metric.GAP, Metric.GAP: Metric.TPOT}
    return given + [msgspec.structs.replace(slo, metric=other[slo.metric]) for slo in given]


def _by_prompt(records: Sequence[Record], latencies: Sequence[Latency | None], slo: Slo) -> list[PromptQuartile]:
    requests = [(record.prompt_tokens, latency) for record, latency in zip(records, latencies, strict=True)]
    parts = quarters(requests, lambda request: request[0])
    return [PromptQuartile(part[0][0], part[-1][0], attainment([of for _, of in part], slo)) for part in parts]
