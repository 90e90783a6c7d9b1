"""Shares that stay where they are put, and slices by the rate that was last seen: the baseline."""

from typing import NamedTuple

from tidegate.slo.gate import Allowance, Gate, Limits, Load, Observation, Outlook
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
        self._tokens: dict[str, int] = {}  # that a lane's last batch could have
        self._decodes: dict[str, int] = {}  # in a lane's last batch with prompts: so many fewer tokens of these

    @property
    def shares(self) -> dict[str, float]:
        return self._shares

    def allow(self, load: Load) -> Allowance:
        limits = self.limits
        alone = not load.other_busy and not load.other_ready
        most = limits.max_num_batched_tokens
        tokens = self._rate(load.lane).tokens_within(
            limits.slice_seconds, 1.0 if alone else self._share(load.lane), min(limits.min_slice_tokens, most), most
        )
        self._tokens[load.lane] = tokens
        return Allowance(tokens)

    def observe(self, seen: Observation) -> None:
        if seen.work.new:
            self._decodes[seen.lane] = seen.work.rows
            self._rate(seen.lane).observe(seen.work.new + seen.work.rows, seen.seconds, seen.share)

    def ask(self, shares: dict[str, float]) -> None:
        self._shares = dict(shares)

    def outlook(self, lane: str, alone: bool) -> Outlook:
        rate, share = self._rate(lane), 1.0 if alone else self._share(lane)
        return _AtRate(rate.tokens_per_s, share * self._of_prompts(lane), rate.batch_s / 2)

    def _of_prompts(self, lane: str) -> float:
        """Their part of a batch that has as many tokens as it can."""
        tokens = self._tokens.get(lane, 1)
        least = min(self.limits.slice_quantum_tokens, tokens)
        return max(least, tokens - self._decodes.get(lane, 0)) / tokens

    def _share(self, lane: str) -> float:
        return self._shares.get(lane, 1.0)

    def _rate(self, lane: str) -> PrefillRate:
        if lane not in self._rates:
            self._rates[lane] = PrefillRate(self.limits.prefill_tokens_per_s, self.limits.slice_quantum_tokens)
        return self._rates[lane]
