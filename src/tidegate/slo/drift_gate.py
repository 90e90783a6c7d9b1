"""Drift's rule (later MuxWise; arXiv 2504.14489): decode gets the smallest part of the device on which its next step
keeps the SLO even in the worst case; prefill gets the rest.

    worst case  the step's predicted time on the part, times its slowdown while prefill runs beside it, times a guard
                that covers ``SURE`` of the lane's measured errors
    slices      prefill is launched ahead for one decode step, or for as many as come nearest to a slice's time where
                steps are shorter: so a new division is in force at the next step or soon after. (Drift launches layers
                one by one; here a slice is a range of tokens, and short ones are inefficient.)

Decode's part grows at once when the one in force does not do any more; it shrinks only where a smaller one has done for
``PATIENCE`` steps on end, with ``ROOM`` to spare, so that a load between two parts does not make it flap. An SLO on the
mean TPOT is held in every step, as one on every gap is: this rule knows no banked time.

Drift also lets a short prompt with an earlier deadline preempt a long one, once. That is a matter of the order: "slack"
puts a long prompt off between any two slices if that saves others' deadlines, and sees to it that none starves.
"""

from collections.abc import Callable

from tidegate.slo.divided_gate import DividedGate
from tidegate.slo.gate import HOST_SECONDS, Allowance, Load
from tidegate.slo.latency import Division, Work


class DriftGate(DividedGate):
    name = "drift"
    SURE = 0.99
    ROOM = 0.97
    PATIENCE = 16

    _decode = Work()  # of the last step that was planned
    _patience = 0  # steps on end for which a smaller part would have done

    def allow(self, load: Load) -> Allowance:
        if load.lane == "P":
            return self._slice(load, self._ahead_s())
        self._decode = load.decode
        if load.other_busy or load.other_ready:
            self._answer(self._smallest())
        return Allowance(0)

    def _answer(self, wanted: Division) -> None:
        self._patience = self._patience + 1 if wanted.share > self.division.share else 0
        if wanted.share < self.division.share or self._patience >= self.PATIENCE:
            self._move(wanted)
            self._patience = 0

    def _smallest(self) -> Division:
        """Of the divisions, the one with decode's smallest part that does; else the one with its largest."""
        limit, current = self.slo.tpot_s - HOST_SECONDS, self.division.share

        def does(division: Division) -> bool:
            room = self.ROOM if division.share > current else 1.0
            return self._worst_s(division) <= limit * room

        return _last(self.model.divisions, does) or self.model.divisions[0]

    def _worst_s(self, division: Division) -> float:
        return self._step_s(division) * self.belief.guard("decode beside", self.SURE)

    def _step_s(self, division: Division) -> float:
        return division.decode.seconds(self._decode) * division.decode_slowdown * self.belief.factor("decode beside")

    def _ahead_s(self) -> float:
        """The number of whole decode steps that comes nearest to a slice's time, or one."""
        if not self._decode.rows:
            return self.limits.slice_seconds
        step = self._step_s(self.division)
        return step * max(1, round(self.limits.slice_seconds / step))


def _last(divisions: tuple[Division, ...], does: Callable[[Division], bool]) -> Division | None:
    return next((division for division in reversed(divisions) if does(division)), None)
