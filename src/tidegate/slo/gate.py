"""The gate: how much prefill may run now, fused with decode's steps or beside them, and on what share of the device.

The core asks it each time that a lane could be given a batch. A gate decides from a ``Load`` alone, and from what it
has been told of measured batches and finished requests: so it needs no core to be tested.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from tidegate.slo.latency import Costs, Work
from tidegate.slo.outlook import Outlook

FULL_SPEED_TOKENS = 2048
HOST_SECONDS = 1.5e-3  # of a gap: by so much tokens of one step reach a client earlier or later than those of the next


class Limits(msgspec.Struct, frozen=True):
    """What a device and its user allow one batch to be."""

    max_num_batched_tokens: int  # of a batch; a hybrid batch's decodes count too
    max_prefill_tokens: int  # of its prompts
    slice_seconds: float  # that a slice may take, as predicted
    min_slice_tokens: int
    slice_quantum_tokens: int  # slices are whole multiples of it
    prefill_tokens_per_s: float  # a first guess of the whole device's rate; corrected by observation

    @property
    def most_prompt_tokens(self) -> int:
        """Of a batch of prompts alone."""
        return min(self.max_num_batched_tokens, self.max_prefill_tokens)

    @property
    def full_speed_tokens(self) -> int:
        """Of a batch at which a device prefills as fast as it can."""
        return min(FULL_SPEED_TOKENS, self.most_prompt_tokens)


class Pressing(NamedTuple):
    """A prompt that waits for its first token."""

    start: int  # tokens computed already
    remaining: int
    deadline_s: float


class Load(NamedTuple):
    """What a lane's next batch would have to do with."""

    now: float
    lane: str
    decode: Work  # of everybody's next token
    prompts: Sequence[Pressing]  # the first few, in the order in which this lane will serve them
    spares_s: Sequence[float]  # the shortest times within which requests on schedule must get their next tokens
    other_busy: bool  # the other lane has a batch in flight
    other_ready: bool  # it has none, but work to be given
    late: int = 0  # prompts that wait and can't make their deadlines any more
    own_tpots_s: Sequence[float] = ()  # ascending: limits that decoding requests have brought themselves
    chained: bool = False  # the lane has a batch in flight, which this one would follow

    def tightest_s(self, tpot_s: float, alone_s: float) -> float:
        """``tpot_s``, or the tightest limit that a decoding request has brought itself, of those that steps of decode
        alone can keep, which take ``alone_s``."""
        within = (own_s for own_s in self.own_tpots_s if alone_s <= own_s)
        return min(tpot_s, next(within, tpot_s))


class Allowance(NamedTuple):
    """For one batch."""

    tokens: int
    seconds: float = math.inf  # that it may take, by ``costs``
    costs: Costs | None = None
    least: int = 1  # prompt tokens, however long they take
    hold: bool = False  # no batch at all, not even of decodes, until something else has happened


class TimedRoom:
    """``policy.rule.Room`` of a batch that may take so many seconds."""

    def __init__(self, allowance: Allowance, decode: Work, quantum: int) -> None:
        assert allowance.costs is not None
        self._costs, self._seconds, self._least = allowance.costs, allowance.seconds, allowance.least
        self._work, self._quantum = decode, quantum

    def tokens(self, start: int, most: int) -> int:
        count = self._costs.most_new(self._work, start, most, self._seconds, self._quantum)
        count = max(count, min(self._least, most))
        self._least = 0
        self._work = self._work.and_slice(start, count)
        return count


class Observation(NamedTuple):
    """A batch that has been run."""

    lane: str
    share: float
    beside: bool  # whether the other lane ran for most of it
    work: Work
    seconds: float


class Ended(NamedTuple):
    """A request that has got all its tokens."""

    prompt_tokens: int
    ttft_s: float
    tpot_s: float  # mean; 0 for a single token
    first_s: float  # when its first token was told


class Gate(Protocol):
    name: str
    choices: dict[str, int]  # batches by what was chosen for them
    moves: int  # changes of the shares, and between fused and side by side

    @property
    def shares(self) -> dict[str, float]:
        """Of each lane while both run, for the next batches."""
        ...

    def allow(self, load: Load) -> Allowance: ...

    def rests(self, lane: str) -> bool:
        """Whether the lane would be allowed nothing, whatever its load."""
        return False

    def outlook(self, lane: str, alone: bool) -> Outlook:
        """How long prompts will take on this lane. ``alone``: no other lane runs, or is about to."""
        ...

    # What follows a gate is told; one that decides without it leaves it as it is.

    def observe(self, seen: Observation) -> None:
        """A batch has been run."""
        return

    def first_token(self, ttft_s: float, now: float) -> None:
        """A request has just been told its first token."""
        return

    def ended(self, request: Ended, now: float) -> None:
        """A request has got all its tokens."""
        return

    def ask(self, shares: dict[str, float]) -> None:
        """An operator wants these."""
        return
