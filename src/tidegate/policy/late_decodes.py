"""Which decodes wait while prompts can still be in time.

A request whose first token came after its deadline has missed its SLO whatever its other tokens do, and in a batch with
prompts it would cost those time: the longest prompts are the ones that are given up, and each token reads all that is
known of them. So it is served as well as can be (the best-effort tier of SLOs-Serve, arXiv 2504.08784): it yields to
prompts of its own class and of more urgent ones that can be in time, as its prompt did, but never starves: it gets a
token every ``LONGEST`` times the TPOT. And where nobody else decodes, it does.
"""

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from tidegate.policy.order import Prompt

LONGEST = 4.0  # times the TPOT of the SLO: the time from one of its tokens to the next


class Decoding(Protocol):
    decoded_s: float  # when it was last let into a batch in which others yielded

    @property
    def missed(self) -> bool:
        """Whether its first token has come too late, or will."""
        ...

    @property
    def priority(self) -> int: ...


Ready = TypeVar("Ready", bound=Decoding)


def yielding(ready: list[Ready], prompts: Sequence[Prompt], now: float, tpot_s: float) -> list[Ready]:
    """Of the requests ``ready`` to decode those that do, while ``prompts`` wait."""
    urgent = min((prompt.priority for prompt in prompts if not prompt.late), default=math.inf)
    yields = [request.missed and request.priority >= urgent for request in ready]
    if all(yields):
        return ready
    chosen = []
    for request, may_wait in zip(ready, yields, strict=True):
        if may_wait:
            if now - request.decoded_s < LONGEST * tpot_s:
                continue
            request.decoded_s = now
        chosen.append(request)
    return chosen
