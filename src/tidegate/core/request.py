"""A request's life: named states, named transitions, and the counters that say how far it is.

    WAITING ── admit ──▶ PREFILLING ── prompt_done ──▶ DECODING ── end ──▶ ENDED
       ▲                     │                            │
       └───── preempt ───────┴────────────────────────────┘        (end is allowed from every state but ENDED)

While it is PREFILLING or DECODING a request holds a slot and blocks. ``in_flight`` counts the launched batches that
name it and have not been acknowledged; only the lane in ``lane`` may have any. A request that ends, or is preempted,
keeps slot and blocks until ``in_flight`` is 0: that is the fence of DESIGN rule 2.

Positions: ``tokens[p]`` is the token at position p. For p < ``done`` the KV is computed and acknowledged; for
p < ``launched`` it has been launched. A decoding request has computed all but its last token; the next input's
position is ``len(tokens) - 1 + in_flight``, since every batch in flight brings one token.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

from tidegate.base.request import Output, RequestSpec

if TYPE_CHECKING:
    from tidegate.core.lanes import Lane


PATIENCE_SECONDS = 10.0  # until the first token, of a request without an SLO among others that have one


class State(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class Request:
    __slots__ = (
        "arrived_s",
        "blocks",
        "cached_tokens",
        "capacity",
        "chain",
        "deadline_s",
        "decoded_s",
        "done",
        "first_s",
        "held",
        "id",
        "in_flight",
        "lane",
        "late",
        "launched",
        "limit",
        "losses",
        "order_key",
        "plain",
        "prefill_lane",
        "prompt_tokens",
        "reported",
        "seq",
        "skipped",
        "slot",
        "spec",
        "state",
        "stop_ids",
        "tabled",
        "tokens",
        "tpot_s",
    )

    def __init__(self, spec: RequestSpec, seq: int, arrived_s: float, deadline_s: float) -> None:
        self.spec = spec
        self.id = spec.id
        self.seq = seq  # order of arrival
        self.arrived_s = arrived_s
        self.tokens = list(spec.prompt)
        self.prompt_tokens = len(spec.prompt)
        self.limit = self.prompt_tokens + spec.max_tokens  # length at which it ends
        self.stop_ids = frozenset(spec.sampling.stop_token_ids)
        # Whether there is nothing about its tokens but how many there are.
        self.plain = not self.stop_ids and spec.sampling.logprobs is None
        self.state = State.WAITING
        self.order_key: tuple[int, float, int] = (spec.priority, 0.0, seq)
        self.lane: Lane | None = None  # the last one that was told how to sample for it
        self.prefill_lane: str | None = None  # where its last prefill ran, until its first decode
        self.in_flight = 0
        self.losses = 0  # of batches that named it, since it last got on
        self.chain: list[bytes] = []  # prefix keys: the root, then one for each full block so far
        self.cached_tokens = 0  # of the prompt, found in the cache at first admission
        self.held: Output | None = None  # its first token, until its first decode is launched
        self.reported = False  # whether an Output has told cached_tokens
        self.deadline_s = deadline_s  # of its first token
        self.late = False  # whether it can't make it any more
        self.tpot_s = spec.tpot_s  # its own SLO
        self.first_s: float | None = None  # when its first token was told
        self.decoded_s = -math.inf  # when it last decoded while others that had missed their SLO, too, did not
        self.slot = -1
        self._drop_progress()

    def _drop_progress(self) -> None:
        self.blocks: list[int] = []
        self.capacity = 0  # positions that the blocks hold
        self.tabled = 0  # blocks that the block table names already
        self.launched = 0
        self.done = 0
        self.skipped = 0  # leading positions taken from the prefix cache, not stored by any slice

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.launched

    @property
    def priority(self) -> int:
        return self.spec.priority

    @property
    def begun(self) -> bool:
        return self.first_s is not None

    @property
    def missed(self) -> bool:
        """Whether its first token has come after its deadline, or will."""
        return self.late if self.first_s is None else self.first_s > self.deadline_s

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def admit(self) -> None:
        assert self.state is State.WAITING
        self.state = State.PREFILLING

    def prompt_done(self) -> None:
        assert self.state is State.PREFILLING
        self.state = State.DECODING

    def preempt(self) -> None:
        """Back to the queue; all KV is given up and will be computed again from ``tokens``."""
        assert self.state in (State.PREFILLING, State.DECODING) and self.in_flight == 0
        self.state = State.WAITING
        self.lane = None
        self._drop_progress()

    def end(self) -> None:
        assert self.state is not State.ENDED
        self.state = State.ENDED

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.state.value} {self.prompt_tokens}+{self.num_output}>"
