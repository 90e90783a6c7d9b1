"""What passes between the core and its gate: what the gate is asked, and all that it is told.

Owns the gate in force, the belief that outlives it, and the schedule of those that decode.
"""

from collections.abc import Sequence

from tidegate.core.binding import LaneView
from tidegate.core.config import CoreConfig
from tidegate.core.lanes import Flight, Lane
from tidegate.core.queues import Queues
from tidegate.core.request import Request, State
from tidegate.policy.modes import Mode
from tidegate.slo.belief import Belief
from tidegate.slo.gate import Ended, Gate, Load, Observation, Pressing
from tidegate.slo.gates import make_gate
from tidegate.slo.goodput import Metric
from tidegate.slo.latency import Work
from tidegate.slo.later import WorkedOutLater
from tidegate.slo.schedule import Schedule, Standing

PRESSING = 16  # prompts that a gate is told of
SPARES = 4  # decoding requests, those with the least time to spare, that a gate is told of


class Guidance:
    def __init__(self, config: CoreConfig, mode: Mode, queues: Queues) -> None:
        """Raises ConfigError where the mode's gate can't be had."""
        self.belief = Belief(config.latency) if config.latency else None
        self._config, self._queues = config, queues
        self._picky: dict[str, Request] = {}  # living requests that have brought a limit on TPOT
        self._schedule = Schedule()
        self._stepped_s: float | None = None  # when a batch with decodes last ended; None: nobody has decoded since
        self.gate = self.gate_for(config, mode)

    def gate_for(self, config: CoreConfig, mode: Mode) -> Gate:
        """Raises ConfigError where it can't be had."""
        return make_gate(config.gate_of(mode), config.limits, config.shares, config.slo, self.belief)

    def follow(self, config: CoreConfig, mode: Mode) -> None:
        """From now on the gate is that of these settings. Raises ConfigError, and changes nothing, if there is none."""
        self.gate, self._config = self.gate_for(config, mode), config

    @property
    def pace_s(self) -> float:
        """Mean time between decode steps of late; 0 before there were any."""
        return self._schedule.pace_s or 0.0

    # ---- asking

    def load(self, view: LaneView, now: float, busy: bool, ready: bool) -> Load:
        spec = view.lane.spec
        decode = view.decoding() if spec and spec.decodes else Work()
        own = self._own_tpots_s() if self._picky else []
        pressing, late = self._pressing(view), self._queues.late_waiting
        chained = bool(view.lane.flights)
        return Load(now, view.lane.name, decode, pressing, self._spares(now), busy, ready, late, own, chained)

    def _own_tpots_s(self) -> list[float]:
        return sorted(r.tpot_s for r in self._picky.values() if r.tpot_s and r.state is State.DECODING)

    def _pressing(self, view: LaneView) -> Sequence[Pressing]:
        first = view.prompts[:PRESSING]
        return WorkedOutLater(lambda: [Pressing(r.launched, r.remaining, r.deadline_s) for r in first])

    def _spares(self, now: float) -> Sequence[float]:
        slo = self._config.slo
        if slo is None or slo.metric is Metric.GAP:
            return []
        return WorkedOutLater(lambda: self._schedule.spares_s(self._standing(now, slo.tpot_s), now, SPARES))

    def _standing(self, now: float, tpot_s: float) -> list[Standing]:
        return [
            (r.first_s or now, len(r.tokens) - r.prompt_tokens + r.in_flight, r.tpot_s or tpot_s)
            for r in self._queues.decoding.values()
        ]

    def offer(self, lane: Lane, decode: Work, now: float) -> None:
        """Asks about a batch of these decodes alone: there is no answer to be heeded, but a gate counts and moves."""
        self.gate.allow(Load(now, lane.name, decode, [], [], other_busy=False, other_ready=False))

    def expected_s(self, lane: Lane, flight: Flight) -> float:
        """That a batch is believed to take; 0 where nothing is believed."""
        if self.belief is None:
            return 0.0
        return self.belief.model.seconds(flight.work, lane.name, flight.share, flight.beside)

    # ---- telling

    def arrived(self, request: Request) -> None:
        if request.tpot_s is not None:
            self._picky[request.id] = request

    def ran(self, lane: Lane, flight: Flight, seconds: float, now: float) -> None:
        """A batch, and took so long."""
        seen = Observation(lane.name, flight.share, flight.beside, flight.work, seconds)
        if self.belief is not None:
            self.belief.observe(seen)
        self.gate.observe(seen)
        if flight.decodes:
            self._schedule.step(seconds if self._stepped_s is None else now - self._stepped_s)
            self._stepped_s = now

    def first_token(self, request: Request, now: float) -> None:
        self.gate.first_token(now - request.arrived_s, now)

    def ended(self, request: Request, first_s: float | None, now: float) -> None:
        """``first_s``: when the first of all its tokens was told; None if it did not get all of them."""
        self._picky.pop(request.id, None)
        if not self._queues.decoding:
            self._stepped_s = None  # until the next decode step is idleness
        if first_s is not None:
            tpot_s = (now - first_s) / max(1, request.num_output - 1)
            self._schedule.ended(request.num_output)
            self.gate.ended(Ended(request.prompt_tokens, first_s - request.arrived_s, tpot_s, first_s), now)
