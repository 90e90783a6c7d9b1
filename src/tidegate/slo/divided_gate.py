"""What gates that divide a device share: the division in force, and slices and outlook of prefill on its part."""

from typing import NamedTuple

from tidegate.slo.belief import Belief
from tidegate.slo.gate import Allowance, Gate, Limits, Load
from tidegate.slo.goodput import Slo
from tidegate.slo.latency import Costs, Division, Work
from tidegate.slo.outlook import Outlook


class OnPart(NamedTuple):
    """Prefill in chunks on one part of the device, every batch ``slower`` times as long as ``costs`` say."""

    costs: Costs
    chunk: int  # tokens
    slower: float
    batch_s: float = 0.0

    def work_s(self, start: int, tokens: int) -> float:
        middle = start + tokens // 2
        return self.costs.seconds(Work(self.chunk, self.chunk * middle, middle)) * tokens / self.chunk

    def after_s(self, work_s: float) -> float:
        return work_s * self.slower


class DividedGate(Gate):
    """Decode and prefill run beside each other, never fused. A rule moves ``division``."""

    name: str

    def __init__(self, limits: Limits, slo: Slo, belief: Belief, share: float) -> None:
        """``share``: prefill's, to begin with. The belief's model has divisions."""
        self.limits, self.slo, self.belief, self.model = limits, slo, belief, belief.model
        self.division: Division = self.model.division(share)
        self.choices: dict[str, int] = {}
        self.moves = 0

    @property
    def shares(self) -> dict[str, float]:
        return {"P": self.division.share, "D": 1.0 - self.division.share}

    def allow(self, load: Load) -> Allowance:
        return Allowance(0) if load.lane == "D" else self._slice(load, self.limits.slice_seconds)

    def outlook(self, lane: str, alone: bool) -> Outlook:
        costs, slower = self._prefill(alone)
        return OnPart(costs, self.limits.full_speed_tokens, slower)

    def _slice(self, load: Load, seconds: float) -> Allowance:
        """Of prefill, predicted to take at most so long."""
        costs, slower = self._prefill(alone=not load.other_busy and not load.other_ready)
        return Allowance(self.limits.most_prompt_tokens, seconds / slower, costs, self.limits.min_slice_tokens)

    def _prefill(self, alone: bool) -> tuple[Costs, float]:
        """Where prefill runs now, and by which factor its batches take longer than the costs say."""
        if alone:
            return self.model.whole, self.belief.factor("prefill")
        return self.division.prefill, self.division.prefill_slowdown * self.belief.factor("prefill beside")

    def _move(self, division: Division) -> None:
        self.moves += division is not self.division
        self.division = division
