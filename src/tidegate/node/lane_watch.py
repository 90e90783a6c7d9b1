"""How often a lane, or a process of one, may be lost."""

from collections import deque


class LaneWatch:
    """Decides whether a lost lane is started again: not after ``MAX_LOSSES`` losses within ``WINDOW_SECONDS``."""

    MAX_LOSSES = 6
    WINDOW_SECONDS = 60.0

    def __init__(self) -> None:
        self._losses: dict[str, deque[float]] = {}

    def may_restart(self, lane: str, now: float) -> bool:
        losses = self._losses.setdefault(lane, deque(maxlen=self.MAX_LOSSES))
        losses.append(now)
        return len(losses) < self.MAX_LOSSES or now - losses[0] > self.WINDOW_SECONDS
