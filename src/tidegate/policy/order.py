"""In which order prompts are served. Requests of a lower ``priority`` come before all others in every order.

An order gives each prompt a key, by which they wait; and it may arrange those that could be next, each time that a
batch is made.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from tidegate.slo.outlook import Outlook


class Prompt(Protocol):
    """A request with prompt tokens left."""

    arrived_s: float
    deadline_s: float  # of its first token
    late: bool  # it can't make its deadline any more, even if it is served at once

    @property
    def priority(self) -> int: ...

    @property
    def begun(self) -> bool:
        """Whether its first token has been told: it is computed again after a preemption."""
        ...

    @property
    def launched(self) -> int: ...

    @property
    def remaining(self) -> int: ...


class Order(Protocol):
    def key(self, prompt: Prompt) -> float:
        """Ascending in a queue. Read again when its prefill advances, and when it turns ``late``."""
        ...

    def rank(self, prompts: Sequence[Any], now: float, outlook: Outlook) -> list[Any]:
        """``prompts``, which ascend by key, in the order in which they will be served if nobody else comes. Marks
        those that have become late."""
        ...

    def arrange(self, prompts: Sequence[Any], now: float, outlook: Outlook) -> list[Any]:
        """The same for the batch that is being made: it may be the turn of one whose rank is low."""
        ...

    def served(self, prompt: Prompt, tokens: int) -> None:
        """So many of its tokens are in the batch that is being made."""
        ...


class ByKey:
    """The base of orders that only sort."""

    def key(self, prompt: Prompt) -> float:
        raise NotImplementedError

    def rank(self, prompts: Sequence[Any], now: float, outlook: Outlook) -> list[Any]:
        return list(prompts)

    def arrange(self, prompts: Sequence[Any], now: float, outlook: Outlook) -> list[Any]:
        return list(prompts)

    def served(self, prompt: Prompt, tokens: int) -> None:
        pass


class ByArrival(ByKey):
    def key(self, prompt: Prompt) -> float:
        return prompt.arrived_s


class Shortest(ByKey):
    """Shortest remaining prompt first, with ageing: a second of waiting is worth ``ageing_tokens_per_s`` tokens.

    ``remaining - ageing * (now - arrived)`` orders requests as ``remaining + ageing * arrived`` does, whatever the
    time is; so the key needs no clock and the queue no re-sorting. A long prompt is overtaken by shorter ones only for
    as long as it would itself have run.
    """

    def __init__(self, ageing_tokens_per_s: float) -> None:
        self._ageing = ageing_tokens_per_s

    def key(self, prompt: Prompt) -> float:
        return prompt.remaining + self._ageing * prompt.arrived_s


class BySlack:
    """As many first tokens in time as can be: Moore and Hodgson's rule (J. M. Moore, Management Science 15, 1968).

    Requests that were preempted while somebody reads them come first. Then prompts are taken by deadline; whenever the
    one just taken would be late, the longest of those taken is put off. Before all of them are done others will come,
    for whom room is left: by ``ROOM`` of the work for each but the first, ``MOST_ROOM`` at most; and a first token is
    told when its batch ends. Those that were put off come next, and those that are late in any case last, by arrival:
    but so that none starves, late ones get ``LATE_SHARE`` of the tokens whenever there are any, first come first
    served.
    """

    LATE_SHARE = 1 / 32
    ROOM, MOST_ROOM = 0.05, 0.2
    FAR = 1e12  # later than any time: where late prompts wait
    NEVER = FAR / 2  # instead of a deadline that is infinite

    def __init__(self) -> None:
        self._due: dict[int, float] = {}  # by priority: tokens that late prompts may have before others

    def key(self, prompt: Prompt) -> float:
        if prompt.begun:
            return prompt.arrived_s - self.FAR
        return self.FAR + prompt.arrived_s if prompt.late else min(prompt.deadline_s, self.NEVER)

    def rank(self, prompts: Sequence[Any], now: float, outlook: Outlook) -> list[Any]:
        begun: list[Any] = []
        kept: list[tuple[float, Any]] = []
        put_off: list[Any] = []
        late: list[Any] = []
        total_s = 0.0
        for place, prompt in enumerate(prompts):
            if prompt.late and not prompt.begun:
                late += prompts[place:]  # their keys are the last
                break
            work_s = outlook.work_s(prompt.launched, prompt.remaining)
            if prompt.begun:
                begun.append(prompt)
                total_s += work_s
                continue
            if now + outlook.after_s(work_s) > prompt.deadline_s:
                prompt.late = True
                late.append(prompt)
                continue
            kept.append((work_s, prompt))
            total_s += work_s
            room = min(self.ROOM * (len(kept) - 1), self.MOST_ROOM)
            if now + outlook.after_s(total_s * (1.0 + room)) + outlook.batch_s / 2 > prompt.deadline_s:
                longest = max(kept, key=_work)
                kept.remove(longest)
                put_off.append(longest[1])
                total_s -= longest[0]
        return [*begun, *(prompt for _, prompt in kept), *put_off, *late]

    def arrange(self, prompts: Sequence[Any], now: float, outlook: Outlook) -> list[Any]:
        ranked = self.rank(prompts, now, outlook)
        first_late = next((i for i, prompt in enumerate(ranked) if prompt.late and not prompt.begun), None)
        if first_late is None:
            for prompt in ranked[:1]:
                self._due[prompt.priority] = 0.0
        elif self._due.get(ranked[0].priority, 0.0) > 0:
            ranked.insert(0, ranked.pop(first_late))
        return ranked

    def served(self, prompt: Prompt, tokens: int) -> None:
        due = self._due.get(prompt.priority, 0.0)
        if prompt.late and not prompt.begun:
            self._due[prompt.priority] = max(due, 0.0) - tokens
        else:
            self._due[prompt.priority] = due + tokens * self.LATE_SHARE


def _work(kept: tuple[float, Any]) -> float:
    return kept[0]


ORDERS = ("shortest", "arrival", "slack")


def order_by_name(name: str, ageing_tokens_per_s: float) -> Order:
    match name:
        case "arrival":
            return ByArrival()
        case "shortest":
            return Shortest(ageing_tokens_per_s)
        case "slack":
            return BySlack()
    raise KeyError(name)
