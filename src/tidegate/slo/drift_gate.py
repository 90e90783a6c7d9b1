"""Drift's rule (later MuxWise; arXiv 2504.14489): decode gets the smallest part of the device on which its next step
keeps the SLO even in the worst case; prefill gets the rest.

    worst case  the step's predicted time on the part, times its slowdown while prefill runs beside it, times a guard
                that covers ``SURE`` of the lane's measured errors
    slices      prefill is launched ahead for one decode step, or for as many as come nearest to a slice's time where
                steps are shorter: so a new division is in force at the next step or soon after. (Drift launches layers
                one by one; here a slice is a range of tokens, and short ones are inefficient.)

Decode's part grows at once when the one in force does not do any more; it shrinks only where a smaller one has done for
``PATIENCE`` steps on end, with ``ROOM`` to spare, so that a load between two parts does not make it flap. An SLO on the
mean TPOT is held in every step, as one on every gap is: this rule knows no banked time. So is the limit that a request
has brought itself while it decodes.

    by turns    a slice on the whole device, then a decode step on the whole device, the slice as long as the SLO leaves
                beside the step. It is ours, not Drift's: chosen where prompts get on faster so than beside decode, by
                ``ADVANTAGE`` to begin with. Long prompts under a wide limit do, since no part of a device is as fast as
                all of it, and a few decodes leave most of it idle

Drift also lets a short prompt with an earlier deadline preempt a long one, once. That is a matter of the order: "slack"
puts a long prompt off between any two slices if that saves others' deadlines, and sees to it that none starves.
"""

import math
from collections.abc import Callable

from tidegate.slo.divided_gate import DividedGate, OnPart
from tidegate.slo.gate import HOST_SECONDS, Allowance, Load
from tidegate.slo.latency import Division, Work
from tidegate.slo.outlook import Outlook


class DriftGate(DividedGate):
    name = "drift"
    SURE = 0.99
    ROOM = 0.97
    PATIENCE = 16
    ADVANTAGE = 1.15  # of turns that begin; turns that last may be so much behind
    TURN_SECONDS = 1.5e-3  # between a batch of one lane and one of the other, which waits for its end

    _decode = Work()  # of the last step that was planned
    _limit_s = math.inf  # for that step: the SLO's, or a request's own
    _patience = 0  # steps on end for which a smaller part would have done
    _turn_s = 0.0  # that a slice may take by turns; 0: side by side
    _whose = "P"  # turn it is
    _whole_slice = False  # prefill's last slice was for the whole device

    def allow(self, load: Load) -> Allowance:
        return self._prefill_next(load) if load.lane == "P" else self._decode_next(load)

    def outlook(self, lane: str, alone: bool) -> Outlook:
        if alone or not self.by_turns:
            return super().outlook(lane, alone)
        tokens = self.limits.full_speed_tokens
        slice_s = min(self._turn_s, self._slice_s(tokens, 0))
        return OnPart(self.model.whole, tokens, self.belief.factor("prefill") * self._cycle_s(slice_s) / slice_s)

    def _decode_next(self, load: Load) -> Allowance:
        self._decode = load.decode
        self._limit_s = load.tightest_s(self.slo.tpot_s, self._alone_s()) - HOST_SECONDS
        if load.other_busy or load.other_ready:
            wanted = self._smallest()
            self._take_turns(load, wanted)
            self._answer(wanted)
        if (load.other_busy and self._whole_slice) or (self.by_turns and load.chained and load.other_ready):
            return Allowance(0, hold=True)
        self._whose = "P"
        return Allowance(0)

    def _prefill_next(self, load: Load) -> Allowance:
        if not self.by_turns or not (load.other_busy or load.other_ready):
            self._whole_slice = self.by_turns
            return self._slice(load, self._ahead_s())
        if load.other_busy or self._whose == "D":
            return Allowance(0)
        self._whose, self._whole_slice = "D", True
        seconds = self._turn_s / self.belief.factor("prefill")
        return Allowance(self.limits.most_prompt_tokens, seconds, self.model.whole, self.limits.min_slice_tokens)

    # ---- by turns

    @property
    def by_turns(self) -> bool:
        return self._turn_s > 0.0

    def _take_turns(self, load: Load, division: Division) -> None:
        """Begins, goes on or ends, by whether prompts get on faster so than beside decode with this division."""
        before, start = self.by_turns, load.prompts[0].start if load.prompts else 0
        spare = self._limit_s - self.TURN_SECONDS - self._alone_s() * self._guard("decode")
        self._turn_s = max(0.0, spare / self._guard("prefill"))
        most, seconds = self.limits.most_prompt_tokens, self._turn_s / self.belief.factor("prefill")
        tokens = self.model.whole.most_new(Work(), start, most, seconds)
        if tokens >= self.limits.min_slice_tokens:
            rate = tokens / self._cycle_s(self._slice_s(tokens, start))
            if rate >= self._rate_beside(division, start) * (1.0 / self.ADVANTAGE if before else self.ADVANTAGE):
                self.moves += not before
                return
        self._turn_s = 0.0
        self.moves += before

    def _alone_s(self) -> float:
        """Decode's next step on the whole device."""
        return self.model.whole.seconds(self._decode) * self.belief.factor("decode")

    def _slice_s(self, tokens: int, start: int) -> float:
        """On the whole device."""
        return self.model.whole.seconds(Work().and_slice(start, tokens)) * self.belief.factor("prefill")

    def _cycle_s(self, slice_s: float) -> float:
        return slice_s + self._alone_s() + 2 * self.TURN_SECONDS

    def _guard(self, kind: str) -> float:
        return self.belief.guard(kind, self.SURE)

    def _rate_beside(self, division: Division, start: int) -> float:
        factor = self.belief.factor("prefill beside")
        return division.prefill_rate(start, self.limits.most_prompt_tokens, self._ahead_s(), factor)

    # ---- side by side

    def _answer(self, wanted: Division) -> None:
        self._patience = self._patience + 1 if wanted.share > self.division.share else 0
        if wanted.share < self.division.share or self._patience >= self.PATIENCE:
            self._move(wanted)
            self._patience = 0

    def _smallest(self) -> Division:
        """Of the divisions, the one with decode's smallest part that does; else the one with its largest."""
        current = self.division.share

        def does(division: Division) -> bool:
            room = self.ROOM if division.share > current else 1.0
            return self._worst_s(division) <= self._limit_s * room

        return _last(self.model.divisions, does) or self.model.divisions[0]

    def _worst_s(self, division: Division) -> float:
        return self._step_s(division) * self._guard("decode beside")

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
