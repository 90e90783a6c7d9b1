"""What a strategy proposes and the search measures."""

from collections.abc import Sequence
from typing import Protocol

from tidegate.plan.demand import Arrival
from tidegate.slo.goodput import Latency


class Candidate(Protocol):
    """A unit of one or several instances that serves whole requests, and copies of it on the GPUs there are."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> str:
        """What it has in common with candidates that differ in sizes only."""
        ...

    @property
    def unit_gpus(self) -> int: ...

    @property
    def copies(self) -> int: ...

    @property
    def kv_tokens(self) -> int:
        """That a unit has room for beside weights and workspace, where requests decode."""
        ...

    @property
    def ceiling(self) -> float:
        """Requests/s of a unit, as ``bounds`` says; 0: the SLO can't be met at any rate."""
        ...

    @property
    def runnable(self) -> bool:
        """Whether this version can run it."""
        ...

    def commands(self) -> list[str]:
        """That start a unit, one an instance."""
        ...


class Simulated(Candidate, Protocol):
    """A unit that can be simulated by itself."""

    @property
    def capacity(self) -> float:
        """Requests/s of a unit, as ``bounds`` says."""
        ...

    @property
    def instances(self) -> int: ...

    def simulate(self, arrivals: Sequence[Arrival], seed: int) -> list[Latency | None]:
        """What requests to one unit experience, in their order. Equal arguments, equal results."""
        ...
