"""What a gate says of the time that prompts will take: their order is made of it, and what newcomers are told."""

from typing import Protocol


class Outlook(Protocol):
    """How long prompts will take, as things are."""

    def work_s(self, start: int, tokens: int) -> float:
        """Of a prompt's next ``tokens`` from position ``start``: seconds of prefill at full speed."""
        ...

    def after_s(self, work_s: float) -> float:
        """Seconds from now until so much work is done."""
        ...

    @property
    def batch_s(self) -> float:
        """That a batch with prompt tokens takes, on average of late: it goes on when a prompt's work in it is done. 0
        where that is not worth reckoning with."""
        ...
