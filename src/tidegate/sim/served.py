"""What simulated requests experienced, a few numbers each."""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from tidegate.slo.goodput import Latency


class Served(NamedTuple):
    """A request that has ended. ``latency``: None if it got no answer (refused, or never fitted)."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    latency: Latency | None


class Records:
    """Served requests in the order in which they ended, in 44 bytes each."""

    def __init__(self) -> None:
        self._arrived = array("d")
        self._lengths = array("i")
        self._latencies = array("d")  # three a request; a failed one's TTFT is negative

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[Served]:
        lengths, latencies = iter(self._lengths), iter(self._latencies)
        for arrived_s in self._arrived:
            prompt_tokens, output_tokens = next(lengths), next(lengths)
            latency = Latency(next(latencies), next(latencies), next(latencies))
            yield Served(arrived_s, prompt_tokens, output_tokens, latency if latency.ttft_s >= 0 else None)

    def add(self, served: Served) -> None:
        latency = served.latency
        self._arrived.append(served.arrived_s)
        self._lengths.extend((served.prompt_tokens, served.output_tokens))
        self._latencies.extend((latency.ttft_s, latency.tpot_s, latency.gap_p99_s) if latency else (-1.0, 0.0, 0.0))
