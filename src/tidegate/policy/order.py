"""In which order prompts are served: a sort key, fixed when a request is queued and re-read as its prefill advances.

A lower key is served first; requests of a lower ``priority`` come before all others.
"""

from collections.abc import Callable

Order = Callable[[float, int], float]  # (arrival in seconds, tokens left to compute) -> key


def by_arrival(arrived_s: float, remaining_tokens: int) -> float:
    return arrived_s


def shortest(ageing_tokens_per_s: float) -> Order:
    """Shortest remaining prompt first, with ageing: a second of waiting is worth ``ageing_tokens_per_s`` tokens.

    ``remaining - ageing * (now - arrived)`` orders requests as ``remaining + ageing * arrived`` does, whatever the
    time is; so the key needs no clock and the queue no re-sorting. A long prompt is overtaken by shorter ones only for
    as long as it would itself have run.
    """

    def key(arrived_s: float, remaining_tokens: int) -> float:
        return remaining_tokens + ageing_tokens_per_s * arrived_s

    return key


ORDERS = ("shortest", "arrival")


def order_by_name(name: str, ageing_tokens_per_s: float) -> Order:
    return {"arrival": by_arrival, "shortest": shortest(ageing_tokens_per_s)}[name]
