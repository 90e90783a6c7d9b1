"""What a batch rule sees and what it answers."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol


class Candidate(Protocol):
    """A request, as far as a rule needs to know it."""

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next token can be sampled."""
        ...


class View(Protocol):
    """The queues as one lane may use them now."""

    def prefills(self) -> Iterable[Any]:
        """Candidates with prompt tokens left, best first. Admits waiting ones (a slot, blocks) as they are reached,
        and ends where no more can be admitted."""
        ...

    def decodes(self) -> list[Any]:
        """Candidates whose next token can be computed."""
        ...


class Plan(NamedTuple):
    prefills: list[tuple[Any, int]]  # a candidate and how many of its tokens
    decodes: list[Any]


class BatchRule(Protocol):
    """Who is in a lane's next batch. ``budget_tokens`` bounds prompt tokens and, for hybrid batches, decodes too."""

    def __call__(self, view: View, budget_tokens: int) -> Plan: ...


def fill(view: View, budget_tokens: int) -> list[tuple[Any, int]]:
    """Prompt tokens up to the budget, best candidate first, the last one cut to fit."""
    chosen: list[tuple[Any, int]] = []
    if budget_tokens > 0:
        for candidate in view.prefills():
            count = min(candidate.remaining, budget_tokens)
            chosen.append((candidate, count))
            budget_tokens -= count
            if budget_tokens == 0:
                break
    return chosen
