"""Which division of a device is in force, and which is being prepared beside it, where shares are fixed when a process
starts: a pure state machine. Its driver starts and ends processes; see ``node.mps_lanes``.

    spare:  none ──Prepare──▶ preparing ──prepared──▶ ready ──Swap──▶ ready (what was in force)
              ▲                   │ failed               │ another is wanted, or failed
              └──────retired── ending ◀───────Retire─────┘

There is at most one division beside the one in force, so that what it costs in memory is known. The last one that was
in force stays ready, for the share to go back at once. One that is being prepared is finished even if the wish has
changed meanwhile: shares that are asked for faster than they can be had must not keep every one of them from being had.
"""

import enum
from dataclasses import dataclass

MOST_FAILURES = 2  # in a row, of one division, after which it is given up until another is wanted


@dataclass(frozen=True)
class Division:
    """Per cent of the device for each lane that is kept to a part, by name in order."""

    percents: tuple[tuple[str, int], ...]

    def percent(self, lane: str) -> int | None:
        """None: the lane is not kept to a part."""
        return dict(self.percents).get(lane)


@dataclass(frozen=True)
class Prepare:
    """Start what runs the division; ``prepared`` or ``failed`` answers."""

    division: Division


@dataclass(frozen=True)
class Swap:
    """The division is in force: each lane goes over to it at its next step. What was in force before stays ready."""

    division: Division


@dataclass(frozen=True)
class Retire:
    """End what runs the division; ``retired`` answers."""

    division: Division


Move = Prepare | Swap | Retire


class Spare(enum.Enum):
    NONE = enum.auto()
    PREPARING = enum.auto()
    READY = enum.auto()
    ENDING = enum.auto()


class Rotation:
    """Every event answers with the moves to make, in order."""

    def __init__(self, division: Division) -> None:
        self.active = division
        self.wanted = division
        self.state = Spare.NONE
        self.spare: Division | None = None  # None in ``Spare.NONE`` only
        self._failures = 0  # of the wanted division, since it was wanted

    @property
    def gave_up(self) -> bool:
        """Whether the wanted division could not be had."""
        return self.wanted != self.active and self._failures >= MOST_FAILURES

    def want(self, division: Division) -> list[Move]:
        if division != self.wanted:
            self.wanted, self._failures = division, 0
        return self._next()

    def prepared(self) -> list[Move]:
        """What ``Prepare`` named is up."""
        assert self.state is Spare.PREPARING
        self.state = Spare.READY
        if self.spare != self.wanted and self.active != self.wanted:
            return [self._swap(), *self._next()]  # nearer in time to what is wanted than the one in force
        return self._next()

    def failed(self) -> list[Move]:
        """The spare has died, or a part of it."""
        assert self.state in (Spare.PREPARING, Spare.READY)
        if self.spare == self.wanted:
            self._failures += 1
        return [self._retire()]

    def retired(self) -> list[Move]:
        """What ``Retire`` named has ended."""
        assert self.state is Spare.ENDING
        self.state, self.spare = Spare.NONE, None
        return self._next()

    def reset(self) -> None:
        """Everything has ended, the division in force too. What starts next starts as wanted."""
        self.active, self.state, self.spare, self._failures = self.wanted, Spare.NONE, None, 0

    def _next(self) -> list[Move]:
        if self.wanted == self.active or self.gave_up:
            return []
        if self.state is Spare.READY:
            return [self._swap() if self.spare == self.wanted else self._retire()]
        if self.state is Spare.NONE:
            self.state, self.spare = Spare.PREPARING, self.wanted
            return [Prepare(self.wanted)]
        return []

    def _swap(self) -> Swap:
        assert self.spare is not None
        self.active, self.spare = self.spare, self.active
        return Swap(self.active)

    def _retire(self) -> Retire:
        assert self.spare is not None
        self.state = Spare.ENDING
        return Retire(self.spare)
