"""What a batch rule sees and what it answers."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol


class Candidate(Protocol):
    """A request, as far as a rule needs to know it."""

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next token can be sampled."""
        ...

    @property
    def launched(self) -> int:
        """Tokens whose KV is computed, or will be by batches in flight: where the next slice begins."""
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


class Room(Protocol):
    """Says how large a slice may still be."""

    def tokens(self, start: int, most: int) -> int:
        """Of a slice that begins at position ``start``: at most ``most``; it is taken to be in the batch from now."""
        ...


class Budget(NamedTuple):
    """Of one batch. A hybrid batch's decodes count as tokens too."""

    tokens: int
    prompt_tokens: int  # of these at most
    prompts: int  # that may have a slice in it
    room: Room | None = None  # None: as many tokens as are left


class BatchRule(Protocol):
    """Who is in a lane's next batch."""

    def __call__(self, view: View, budget: Budget) -> Plan: ...


def fill(view: View, budget: Budget) -> list[tuple[Any, int]]:
    """Prompt tokens up to the budget, best candidate first, the last one cut to fit."""
    chosen: list[tuple[Any, int]] = []
    tokens = min(budget.tokens, budget.prompt_tokens)
    if tokens > 0:
        for candidate in view.prefills():
            count = most = min(candidate.remaining, tokens)
            if budget.room is not None:
                count = budget.room.tokens(candidate.launched, most)
                if not count:
                    break
            chosen.append((candidate, count))
            tokens -= count
            if tokens == 0 or count < most or len(chosen) == budget.prompts:
                break
    return chosen
