"""What a workload asks for: samples of it at any rate, and the averages that bounds are computed from."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

from tidegate.base.errors import ConfigError
from tidegate.bench.plan import find_workload
from tidegate.bench.traces import Trace
from tidegate.bench.workloads import Request, Workload, source
from tidegate.slo.latency import Work

SAMPLE = 4000  # requests that averages are of


class Arrival(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int


class Averages(NamedTuple):
    """Per request."""

    prompt_tokens: float
    output_tokens: float
    pairs: float  # keys that its prompt's tokens look at, itself included
    context: float  # Σ over its decode steps of how long it is

    def prefill(self, requests: float, chunk: int) -> Work:
        """Of so many requests' prompts, in slices of ``chunk`` tokens of which each reads what came before."""
        slices = self.prompt_tokens / chunk
        reused = max(0.0, slices - 1.0) / 2 * self.prompt_tokens
        return Work(round(requests * self.prompt_tokens), requests * self.pairs, round(requests * reused))

    def decode(self, rows: float) -> Work:
        """Of a step of so many requests in the middle of their answers."""
        return Work(rows=round(rows), context=round(rows * self.context / self.output_tokens))


class Demand:
    """Poisson arrivals of the lengths of a workload or a trace, whose own times and prefixes are left aside."""

    def __init__(self, lengths: Sequence[tuple[int, int]], seed: int = 0) -> None:
        """``lengths``: (prompt, output) in tokens; not empty. They are used in turns."""
        self._lengths, self._seed = lengths, seed
        prompts, outputs = zip(*lengths, strict=True)
        count = len(lengths)
        self.averages = Averages(
            sum(prompts) / count,
            sum(outputs) / count,
            sum(prompt * prompt / 2 for prompt in prompts) / count,
            sum(output * (prompt + output / 2) for prompt, output in lengths) / count,
        )
        self.longest_tokens = max(prompt + output for prompt, output in lengths)
        self.prompts = sorted(prompts)

    @classmethod
    def of(cls, name: str, seed: int = 0) -> "Demand":
        """A built-in workload, or the trace in a file of that name. Raises ConfigError."""
        workload = find_workload(name)
        if isinstance(workload, Workload):
            drawn: Sequence[Request] = list(islice(workload.requests(source(seed)), SAMPLE))
        elif isinstance(workload, Trace):
            drawn = workload.recorded
        else:
            raise ConfigError(f"a plan is for one load, not for the steps of {name!r}: plan for the heaviest of them")
        return cls([(request.prompt_tokens, request.output_tokens) for request in drawn], seed)

    def arrivals(self, rate: float, count: int, part: int = 0) -> list[Arrival]:
        """The same requests with the same pauses relative to 1/``rate``, whatever the rate, so that designs and rates
        are compared on equal terms. ``part``: another piece of the workload."""
        rng = source(self._seed, f"arrivals {part}")
        lengths = islice(cycle(self._lengths), (part * SAMPLE // 4) % len(self._lengths), None)
        at_s, arrivals = 0.0, []
        for prompt, output in islice(lengths, count):
            at_s += rng.expovariate(1.0) / rate
            arrivals.append(Arrival(at_s, prompt, output))
        return arrivals
