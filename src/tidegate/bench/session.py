"""A whole measurement of one server: checks it with one request, then runs one rate after another."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from tidegate.base.errors import ConfigError, TidegateError
from tidegate.bench.arrivals import POISSON, Pattern
from tidegate.bench.client import Client
from tidegate.bench.connection import ExchangeFailed
from tidegate.bench.idle import check_server
from tidegate.bench.load import Limits, Progress, run_load
from tidegate.bench.payload import PATHS, Payloads
from tidegate.bench.plan import Amount, AnyWorkload, Lengths, arrivals, mean_rate, planned, replayed_requests
from tidegate.bench.report import RunResult, run_result
from tidegate.bench.traces import Trace
from tidegate.bench.whole import Whole
from tidegate.bench.workloads import Request
from tidegate.slo.goodput import Slo


class Measurement(msgspec.Struct, frozen=True):
    """``rates`` in requests per second, infinite for all at once; none: a trace's own times, ``speedup`` times as fast.

    ``stop_below``: no higher rate is tried after one at which no SLO is attained by this share of the requests.
    """

    workload: AnyWorkload
    lengths: Lengths
    rates: Sequence[float]
    amount: Amount
    slos: Sequence[Slo]
    limits: Limits
    speedup: float = 1.0
    stop_below: float = 0.0
    pattern: Pattern = POISSON


class Watcher:
    """Is told how a measurement goes on. These methods do nothing, for those who don't want to know."""

    def preparing(self, rate: float | None) -> None: ...

    def progress(self, counts: Progress) -> None: ...

    def finished(self, run: RunResult) -> None: ...


async def measure(client: Client, payloads: Payloads, measurement: Measurement, watcher: Watcher) -> list[RunResult]:
    """The results of all runs, in order of the rate. Raises TidegateError when the server can't be measured at all."""
    await check_server(client, payloads, measurement.limits)
    results: list[RunResult] = []
    for number, (rate, requests) in enumerate(_runs(measurement, payloads.seed), 1):
        watcher.preparing(rate)
        plan = planned(measurement.lengths.applied(requests), payloads, number)
        records, own_load = await run_load(client, PATHS[payloads.endpoint], plan, measurement.limits, watcher.progress)
        results.append(run_result(rate, records, own_load, measurement.slos))
        watcher.finished(results[-1])
        if all(results[-1].attained(slo) < measurement.stop_below for slo in measurement.slos):
            break
    return results


async def first_model(client: Client) -> str:
    """The name of the first of the server's models. Raises TidegateError."""
    answer = Whole()
    try:
        await client.get("/v1/models", answer)
        models = msgspec.json.decode(answer.body, type=_Models).data
    except ExchangeFailed as failure:
        raise TidegateError(f"The server can't be asked for its models: {failure}.") from None
    except msgspec.MsgspecError:
        models = []
    if not models:
        raise TidegateError(f"The server did not say which models it has (status {answer.status}): {answer.text}")
    return models[0].id


def _runs(measurement: Measurement, seed: int) -> Iterator[tuple[float | None, list[Request]]]:
    """The nominal rate of each run, None when all requests come at once, and its requests."""
    workload = measurement.workload
    amount = measurement.amount.covering(workload)
    if measurement.rates:
        for rate in sorted(measurement.rates):
            endless = arrivals(workload, rate, seed, measurement.pattern)
            yield rate if math.isfinite(rate) else None, list(islice(endless, amount.at(rate)))
    elif isinstance(workload, Trace) and workload.timed:
        requests = replayed_requests(workload, measurement.speedup, amount)
        yield mean_rate(requests), requests
    else:
        raise ConfigError("This workload has no times of its own, so it needs a rate.")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []
