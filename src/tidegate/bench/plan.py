"""Which requests a run sends and when."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import ClassVar

import msgspec

from tidegate.base.errors import ConfigError
from tidegate.bench.load import Planned
from tidegate.bench.payload import Payloads
from tidegate.bench.traces import Trace, load_trace
from tidegate.bench.workloads import WORKLOADS, Request, Workload, poisson_arrivals, source


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


def find_workload(name: str) -> Workload | Trace:
    """A built-in workload, or the trace in a file of that name."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    if not Path(name).exists():
        raise ConfigError(f"There is no workload {name!r}: it is a file, or one of {', '.join(WORKLOADS)}.")
    return load_trace(Path(name))


def poisson_requests(workload: Workload | Trace, rate: float, amount: Amount, seed: int) -> list[Request]:
    """Arrivals at random times, in the workload's order. Equal seeds give equal lengths, whatever the rate."""
    lengths = workload.requests(source(seed)) if isinstance(workload, Workload) else workload.requests()
    arrivals = poisson_arrivals(rate, source(seed, "arrivals"))
    pairs = zip(lengths, arrivals, strict=False)
    return [msgspec.structs.replace(request, at_s=at_s) for request, at_s in islice(pairs, amount.at(rate))]


def replayed_requests(trace: Trace, speedup: float, amount: Amount) -> list[Request]:
    """At the trace's own times: all of it, or as much as ``amount`` says."""
    seconds = math.inf if amount.seconds is None else amount.seconds
    within = takewhile(lambda request: (request.at_s or 0.0) < seconds, trace.replay(speedup))
    return list(islice(within, amount.num_requests))


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
