"""When a lane's batch will end, so that the next one can be asked for just in time."""

from collections.abc import Hashable


class Usually:
    """What a duration seldom exceeds, as far as has been seen of late: it rises with longer ones and falls slowly."""

    UP, DOWN = 0.2, 0.005  # weights of a new observation
    LONGEST = 0.006  # seconds: what takes longer is an exception

    def __init__(self, first: float, least: float = 0.0) -> None:
        self.seconds, self._least = first, least

    def seen(self, seconds: float) -> None:
        more = min(seconds, self.LONGEST) - self.seconds
        self.seconds = max(self._least, self.seconds + more * (self.UP if more > 0.0 else self.DOWN))


class Foresight:
    """By kind of step, how long it took of late: relative to what it was believed to take, where something was, since
    steps of one kind differ in their context. And how long the core takes to decide on the next, and preparing it. One
    thread tells when a batch is called ending and when it has ended, another one when the next has come."""

    DECIDE_SECONDS = 1.0e-3  # at least: for the decision and the hand-overs between threads
    WEIGHT = 0.2  # of a new observation of a step

    def __init__(self) -> None:
        self._ratios: dict[Hashable, float] = {}  # or seconds, where nothing is believed
        self._prepare = Usually(2e-3)
        self._decide = Usually(self.DECIDE_SECONDS, self.DECIDE_SECONDS)
        self._asked: float | None = None  # when; None: no batch is ending

    def asked(self, now: float) -> None:
        """The lane's batch is called ending."""
        self._asked = now

    def ended(self) -> None:
        """It has ended. What comes now may be the answer to that."""
        self._asked = None

    def came(self, now: float) -> None:
        """The next batch."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._decide.seen(now - asked)

    def prepared(self, seconds: float) -> None:
        self._prepare.seen(seconds)

    def observed(self, kind: Hashable, seconds: float, expected: float) -> None:
        ratio = seconds / (expected or 1.0)
        known = self._ratios.get(kind, ratio)
        self._ratios[kind] = min(ratio, known + self.WEIGHT * (ratio - known))

    def wait_before_ending(self, kind: Hashable, start: float, now: float, expected: float) -> float:
        """Seconds from ``now`` until a step that starts at ``start`` and is ``expected`` to take so long (0: nobody
        knows) should be called ending; 0 for unknown kinds."""
        needed = self._prepare.seconds + self._decide.seconds
        return max(0.0, start + self._ratios.get(kind, 0.0) * (expected or 1.0) - needed - now)
