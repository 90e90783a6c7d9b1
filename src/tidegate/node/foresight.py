"""When a lane's batch will end, so that the next one can be asked for just in time."""

from collections.abc import Hashable


class Foresight:
    """Durations by kind of step, as last seen, and how long preparing a step takes."""

    SLACK_SECONDS = 1.0e-3  # for the core's decision and the hand-overs between threads
    WEIGHT = 0.2  # of a new observation

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}
        self._prepare_seconds = 2e-3

    def prepared(self, seconds: float) -> None:
        self._prepare_seconds += self.WEIGHT * (min(seconds, 0.02) - self._prepare_seconds)

    def observed(self, kind: Hashable, seconds: float) -> None:
        known = self._seconds.get(kind, seconds)
        self._seconds[kind] = min(seconds, known + self.WEIGHT * (seconds - known))

    def wait_before_ending(self, kind: Hashable, start: float, now: float) -> float:
        """Seconds from ``now`` until a step that starts at ``start`` should be called ending; 0 for unknown kinds."""
        seconds = self._seconds.get(kind, 0.0)
        return max(0.0, start + seconds - self._prepare_seconds - self.SLACK_SECONDS - now)
