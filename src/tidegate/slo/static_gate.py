"""Shares that stay where they are put, and slices by the rate that was last seen: the baseline."""

from typing import NamedTuple

from tidegate.slo.gate import Allowance, Gate, Limits, Load, Observation
from tidegate.slo.outlook import Outlook
from tidegate.slo.rate import PrefillRate


class _AtRate(NamedTuple):
    tokens_per_s: float  # on the whole device, all of them prompts'
    share: float  # of that, which prompts have
    batch_s: float

    def work_s(self, start: int, tokens: int) -> float:
        return tokens / self.tokens_per_s

    def after_s(self, work_s: float) -> float:
        return work_s / self.share


class StaticGate(Gate):
    def __init__(self, limits: Limits, shares: dict[str, float]) -> None:
        self.limits = limits
        self.name = "static"
        self.choices: dict[str, int] = {}
        self.moves = 0
        self._shares = dict(shares)
        self._rates: dict[str, PrefillRate] = {}

    @property
    def shares(self) -> dict[str, float]:
        return self._shares

    def allow(self, load: Load) -> Allowance:
        return Allowance(self._most_tokens(load.lane, alone=not load.other_busy and not load.other_ready))

    def observe(self, seen: Observation) -> None:
        if seen.work.new:
            self._rate(seen.lane).observe(seen.work.new, seen.work.rows, seen.seconds, seen.share)

    def ask(self, shares: dict[str, float]) -> None:
        self._shares = dict(shares)

    def outlook(self, lane: str, alone: bool) -> Outlook:
        rate, tokens = self._rate(lane), self._most_tokens(lane, alone)
        of_prompts = max(tokens - rate.decodes, min(self.limits.slice_quantum_tokens, tokens))
        return _AtRate(rate.tokens_per_s, self._share(lane, alone) * (of_prompts / tokens), rate.batch_s)

    def _most_tokens(self, lane: str, alone: bool) -> int:
        """Of a batch."""
        limits = self.limits
        most = limits.max_num_batched_tokens
        least = min(limits.min_slice_tokens, most)
        return self._rate(lane).tokens_within(limits.slice_seconds, self._share(lane, alone), least, most)

    def _share(self, lane: str, alone: bool) -> float:
        return 1.0 if alone else self._shares.get(lane, 1.0)

    def _rate(self, lane: str) -> PrefillRate:
        if lane not in self._rates:
            self._rates[lane] = PrefillRate(self.limits.prefill_tokens_per_s, self.limits.slice_quantum_tokens)
        return self._rates[lane]
