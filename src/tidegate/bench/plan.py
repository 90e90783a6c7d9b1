"""Which requests a run sends and when."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import ClassVar

import msgspec

from tidegate.base.errors import ConfigError
from tidegate.bench.arrivals import POISSON, Pattern
from tidegate.bench.load import Planned
from tidegate.bench.payload import Payloads
from tidegate.bench.schedule import Schedule, Step
from tidegate.bench.traces import Trace, load_trace
from tidegate.bench.workloads import WORKLOADS, Request, Workload, source

AnyWorkload = Workload | Trace | Schedule


class Amount(msgspec.Struct, frozen=True):
    """How much is sent: so many requests, or as many as are expected in so many seconds."""

    DEFAULT_SECONDS: ClassVar = 30.0

    num_requests: int | None = None
    seconds: float | None = None

    def at(self, rate: float) -> int:
        """Requests at this rate. Raises ConfigError for a number that is not finite."""
        if self.num_requests is not None:
            return self.num_requests
        if math.isinf(rate):
            raise ConfigError("All at once (--rate inf) needs a number of requests: --num-requests.")
        return max(1, round(rate * (self.DEFAULT_SECONDS if self.seconds is None else self.seconds)))

    def covering(self, workload: AnyWorkload) -> "Amount":
        """The same; where nothing was said, long enough for every step of a schedule."""
        if isinstance(workload, Schedule) and self.num_requests is None and self.seconds is None:
            return Amount(seconds=workload.period_s or workload.lead_s + self.DEFAULT_SECONDS)
        return self


class Lengths(msgspec.Struct, frozen=True):
    """Lengths that replace those of the workload. A prompt of another length is like no other."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None

    def applied(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            if self.prompt_tokens is not None:
                request = msgspec.structs.replace(request, prompt_tokens=self.prompt_tokens, blocks=())
            if self.output_tokens is not None:
                request = msgspec.structs.replace(request, output_tokens=self.output_tokens)
            yield request


def find_workload(name: str) -> AnyWorkload:
    """A built-in workload, the trace in a file of that name, or steps such as "conv@30,code@30": workloads with their
    seconds, or "conv@30x20,code@30x12": and with their rates. A last step without seconds does not end; otherwise the
    steps repeat."""
    if Path(name).exists() or "@" not in name:
        return _find_one(name)
    parts = name.split(",")
    steps = [_step(part, name) for part in parts[:-1]]
    endless = "@" not in parts[-1]
    steps.append(Step(_find_one(parts[-1].strip()), math.inf) if endless else _step(parts[-1], name))
    if len({step.rate is None for step in steps}) > 1:
        raise ConfigError(f"Of the steps of the workload {name!r} all have a rate, as conv@30x20, or none has.")
    return Schedule(steps)


def _step(part: str, name: str) -> Step:
    which, _, amount = part.strip().rpartition("@")
    seconds, by, rate = amount.partition("x")
    if not _is_positive(seconds) or (by and not _is_positive(rate)):
        raise ConfigError(
            f"{part!r} in the workload {name!r} is not a step such as conv@30, a name and seconds, or conv@30x20, with "
            "requests per second."
        )
    return Step(_find_one(which), float(seconds), float(rate) if by else None)


def _find_one(name: str) -> Workload | Trace:
    if name in WORKLOADS:
        return WORKLOADS[name]
    if not Path(name).is_file():
        raise ConfigError(f"There is no workload {name!r}: it is a file, or one of {', '.join(WORKLOADS)}.")
    return load_trace(Path(name))


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def arrivals(workload: AnyWorkload, rate: float, seed: int, pattern: Pattern = POISSON) -> Iterator[Request]:
    """For ever, at random times, in the workload's order; steps with rates are as much faster or slower as makes their
    mean ``rate``. Equal seeds give equal lengths, whatever the rate (but for which step of a schedule a request falls
    into)."""
    rng = source(seed, "arrivals")
    if not isinstance(workload, Schedule):
        times_s = pattern.times(rate, rng)
        yield from (_at(request, at_s) for at_s, request in zip(times_s, _in_turn(workload, seed), strict=False))
        return
    steps = [_in_turn(step.workload, seed, f"step {index}") for index, step in enumerate(workload.steps)]
    times_s = pattern.times(rate, rng, workload.at_s)
    yield from (_at(next(steps[workload.step_at(at_s)]), at_s) for at_s in times_s)


def _in_turn(workload: Workload | Trace, seed: int, purpose: str = "") -> Iterator[Request]:
    return workload.requests(source(seed, purpose)) if isinstance(workload, Workload) else workload.requests()


def _at(request: Request, at_s: float) -> Request:
    return msgspec.structs.replace(request, at_s=at_s)


def replayed_requests(trace: Trace, speedup: float, amount: Amount) -> list[Request]:
    """At the trace's own times: all of it, or as much as ``amount`` says."""
    seconds = math.inf if amount.seconds is None else amount.seconds
    return within(trace.replay(speedup), seconds)[: amount.num_requests]


def own_arrivals(trace: Trace, rate: float) -> Iterator[Request]:
    """For ever, at the trace's own times, as much faster or slower as makes their mean rate ``rate``.

    A trace that is used up begins again, a mean gap after its last request. Raises ConfigError for one without a rate.
    """
    last_s = trace.recorded[-1].at_s or 0.0
    if not last_s:
        raise ConfigError("This trace's requests have no times, or one time, so they have no rate that can be changed.")
    turn_s = len(trace.recorded) / rate
    scale = (len(trace.recorded) - 1) / rate / last_s
    times_s = (turn * turn_s + (row.at_s or 0.0) * scale for turn in count() for row in trace.recorded)
    return (_at(request, at_s) for at_s, request in zip(times_s, trace.requests(), strict=False))


def own_rates(workload: AnyWorkload) -> list[float]:
    """The mean of a schedule's own rates, where it has some."""
    mean = workload.mean_rate if isinstance(workload, Schedule) else None
    return [] if mean is None else [mean]


def within(requests: Iterable[Request], seconds: float) -> list[Request]:
    """Those that come in the first ``seconds``, of requests in order of time."""
    return list(takewhile(lambda request: (request.at_s or 0.0) < seconds, requests))


def mean_rate(requests: Sequence[Request]) -> float | None:
    """Requests per second that arrive; None when all come at once."""
    last_s = requests[-1].at_s or 0.0
    return len(requests) / last_s if last_s else None


def planned(requests: Iterable[Request], payloads: Payloads, run: int) -> list[Planned]:
    """All bodies are made before the run, so that this does not take the client's time in it: about 6 bytes a token."""
    return [
        Planned(request.at_s or 0.0, request.prompt_tokens, request.output_tokens, payloads.body(run, index, request))
        for index, request in enumerate(requests)
    ]
