"""Which decodes wait while prompts can still be in time.

A request whose first token came after its deadline has missed its SLO whatever its other tokens do, and in a batch with
prompts it would cost those time: the longest prompts are the ones that are given up, and each token reads all that is
known of them. So it is served as well as can be (the best-effort tier of SLOs-Serve, arXiv 2504.08784): it yields to
prompts of its own class and of more urgent ones that can be in time, as its prompt did, but never starves: it gets a
token every ``LONGEST`` times the TPOT. And where nobody else decodes, it does.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from tidegate.policy.order import Prompt

LONGEST = 4.0  # times the TPOT of the SLO: the time from one of its tokens to the next


class Decoding(Protocol):
    id: str
    decoded_s: float  # when it was last let into a batch in which others yielded

    @property
    def missed(self) -> bool:
        """Whether its first token has come too late, or will."""
        ...

    @property
    def priority(self) -> int: ...


Ready = TypeVar("Ready", bound=Decoding)


def yielding(ready: Sequence[Ready], prompts: Sequence[Prompt], now: float, tpot_s: float) -> list[Ready]:
    """Of the requests ``ready`` to decode those that do, while ``prompts`` wait."""
    urgent = min((prompt.priority for prompt in prompts if not prompt.late), default=None)
    if urgent is None:
        return list(ready)
    missed = [request for request in ready if request.missed and request.priority >= urgent]
    if not missed or len(missed) == len(ready):
        return list(ready)
    left_out = {request.id for request in missed if now - request.decoded_s < LONGEST * tpot_s}
    for request in missed:
        if request.id not in left_out:
            request.decoded_s = now
    return [request for request in ready if request.id not in left_out]
