"""Each step the best of decode alone, prefill alone, a hybrid step, and side by side: the most prefill progress among
those that keep every deadline that can be kept.

    base      time that a step with decodes may take, each or on average: the SLO's, less a margin
    fused     the chunk with which most work is done in a second, of those whose hybrid step takes at most that time:
              its decodes count too, or steps would be long, many would decode at once, and each step would be full of
              them
    spare     with an SLO on the mean, time until the earliest due time of a next token; it grows while steps are
              shorter than the SLO. When a prompt would otherwise miss its deadline if its steps took as long as nine of
              ten do at most, as much is spent as that needs and decode could spare then, else a small part of it a step
              (spent greedily it does harm). But none where prompts wait nearly all the time: decode that is put off is
              made up for only while none waits, or more and more decode at once
    beside    the share with the highest rate of prefill among those whose decode steps take at most that time, or with
              an SLO on the mean, among those that decode alone, in turns, can make up for. While prompts wait nearly
              all the time decodes count as work there, too

Beside wins by ``ADVANTAGE`` or not at all, since a change costs a step; what is in force needs no advantage.
"""

from typing import NamedTuple

from tidegate.slo.belief import Belief
from tidegate.slo.chunks import Chunk, fastest, in_turns, part_of_steps
from tidegate.slo.gate import HOST_SECONDS, Allowance, Gate, Limits, Load, Observation
from tidegate.slo.goodput import Metric, Slo
from tidegate.slo.lately import Lately
from tidegate.slo.latency import Costs, Division
from tidegate.slo.outlook import Outlook


class Option(NamedTuple):
    """A way to run decode's next step together with prefill."""

    division: Division | None  # None: fused
    tokens_per_s: float
    step_s: float  # that decode's steps take, on average
    tokens: int = 0  # of prompts, in the step (fused)
    seconds: float = 0.0  # that it may take (fused)
    rests: bool = False  # decode alone this time: shorter steps make up for longer ones (fused)
    over_s: float = 0.0  # by which a step beside prefill is longer than ``step_s``: decode alone makes up for it

    def work_per_s(self, decodes: float) -> float:
        """In prompt tokens; ``decodes``: to how many those of a step amount."""
        return self.tokens_per_s + decodes / self.step_s


class Pace(NamedTuple):
    """How fast prompts get done: beside decode at the part ``speed`` of what the device can do without it; but decode
    can be put off for ``credit_s``."""

    costs: Costs  # of the whole device
    chunk: int  # tokens of the prefill batches that full speed is meant for
    slower: float  # by which prefill takes longer than the costs say
    speed: float
    batch_s: float
    credit_s: float = 0.0

    def work_s(self, start: int, tokens: int) -> float:
        pairs, chunks = tokens * (start + tokens / 2), tokens / self.chunk
        attention = self.costs.pair_s * pairs + self.costs.reused_s * (start + tokens / 2) * chunks
        return (self.costs.dense(self.chunk) * chunks + attention) * self.slower

    def after_s(self, work_s: float) -> float:
        late = max(0.0, work_s - self.credit_s)
        return work_s - late + late / self.speed

    def asked(self, load: Load) -> list[tuple[float, float]]:
        """Of each prompt: its work, and the time left. In the order in which they are served."""
        return [(self.work_s(p.start, p.remaining), p.deadline_s - load.now) for p in load.prompts]

    def kept(self, asked: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Of each prompt that makes its deadline: the work up to its end, and the time left. In the order in which they
        are served, and without those that do not make it."""
        kept, total = [], 0.0
        for work, left in asked:
            if self.after_s(total + work) <= left:
                total += work
                kept.append((total, left))
        return kept

    def needed_s(self, kept: list[tuple[float, float]], longer: float) -> float:
        """The credit without which one of these would not, should its work take ``longer`` times what is believed."""
        if self.speed >= 1.0:
            return 0.0
        needs = [(work * longer - left * self.speed) / (1.0 - self.speed) for work, left in kept]
        return max([0.0, *needs])


class AutoGate(Gate):
    MARGIN = 0.97  # of an SLO on the mean that steps may take
    SURE = 0.995  # of the steps must keep an SLO on every gap
    LIKELY = 0.9  # of the steps take at most what is reckoned with where a prompt is in a hurry
    ADVANTAGE = 1.2
    PRESSED, MEMORY = 0.85, 3.0  # of the time of late (seconds): where prompts waited for more, no decode is put off
    BANKED = 8  # steps for which the time that everybody can spare must do, if none of them needs it now
    LONGEST = 2.5  # of the base: a step for which no prompt asks
    SAVED = 0.5  # of the base: the most that short steps leave for a long one
    WEIGHT = 0.1  # of a new batch, in what is known of batches of late
    KEPT = 4096  # rates beside decode

    def __init__(self, limits: Limits, slo: Slo, belief: Belief) -> None:
        self.limits, self.slo, self.belief, self.model = limits, slo, belief, belief.model
        self.name = "auto"
        self.choices: dict[str, int] = {}
        self.moves = 0
        self._division: Division | None = None  # in force; None: fused
        self._share = 0.5  # of the last one in force: prefill's slice in flight still has it when steps are fused again
        self._waited = Lately(self.MEMORY)  # prompts
        self._over_s = 0.0  # of what is in force
        self._base_s = slo.tpot_s * self.MARGIN
        self._most_saved_s = self.SAVED * self._base_s
        self._saved_s = 0.0  # by which steps were shorter than the base, of late
        self._batch_s = 0.0  # that batches with prompts took, on average of late
        self._pace = self._full_pace()
        self._rates_beside: dict[tuple[float, int], float] = {}  # by share and start of a slice, as believed now

    # ---- Gate

    @property
    def shares(self) -> dict[str, float]:
        return {"P": self._share, "D": 1.0 - self._share}

    def allow(self, load: Load) -> Allowance:
        return self._slice_beside(load) if load.lane == "P" else self._step(load)

    def rests(self, lane: str) -> bool:
        return lane == "P" and self._division is None

    def observe(self, seen: Observation) -> None:
        if seen.work.new:
            self._batch_s += self.WEIGHT * (seen.seconds - self._batch_s)
        if seen.lane == "P":
            self._rates_beside.clear()
        elif seen.work.rows:
            saved_s, most_s = self._saved_s + self._base_s - seen.seconds, self._most_saved_s
            self._saved_s = max(-most_s, min(saved_s, most_s))

    def outlook(self, lane: str, alone: bool) -> Outlook:
        return self._pace

    # ---- decode's next step

    def _step(self, load: Load) -> Allowance:
        self._waited.told(load.now, bool(load.prompts))
        if not load.prompts:
            return self._chose("decode beside prefill" if load.other_busy else "decode", Allowance(0))
        whole, most = self.model.whole, self.limits.max_num_batched_tokens
        if not load.decode.rows and not load.other_busy:
            self._enter(None)
            seconds = self.limits.slice_seconds / self.belief.factor("prefill")
            self._pace = self._full_pace()
            return self._chose("prefill", Allowance(most, seconds, whole, self.limits.min_slice_tokens))
        limit, best = self._gap_kept(load) if self.slo.metric is Metric.GAP else self._mean_kept(load)
        if sum(prompt.remaining for prompt in load.prompts) > best.tokens:
            best = self._best_beside(load, limit, best)
        self._enter(best.division)
        self._over_s = best.over_s
        if best.division is not None or load.other_busy:
            # From side by side to fused decode goes on alone until the slice in flight is done.
            return self._chose("decode beside prefill", Allowance(0))
        if best.rests:
            return self._chose("decode", Allowance(0))
        # However late decode is, prefill goes on: with the least chunk.
        least = self.limits.min_slice_tokens
        if whole.padding.tokens:
            most = min(most, whole.padding.padded_rows(load.decode.rows) + max(best.tokens, least))
        return self._chose("hybrid", Allowance(most, best.seconds / self.belief.factor("hybrid"), whole, least))

    def _gap_kept(self, load: Load) -> tuple[float, Option]:
        """Seconds that decode's next step may take beside prefill, and what is best fused."""
        gap = load.tightest_s(self.slo.tpot_s, self.model.whole.seconds(load.decode) * self.belief.factor("decode"))
        decodes = self._decodes(load)
        best = self._fused(load, gap / self.belief.guard("hybrid", self.SURE) - HOST_SECONDS, decodes)
        beside = gap / self.belief.guard("decode beside", self.SURE) - HOST_SECONDS
        self._pace = self._pace_beside(load, beside, best)
        return beside, best

    def _mean_kept(self, load: Load) -> tuple[float, Option]:
        """The same with an SLO on the mean: the base, and of what decoding requests can spare as much as prompts need.
        To take more than one of them can spare costs that one its SLO, and is done if it saves more prompts."""
        base = limit = self._base_s
        decodes = self._decodes(load)
        spares = load.spares_s if self._waited.part < self.PRESSED else ()
        if spares:
            limit = max(base, min(spares[0] / self.BANKED, self.LONGEST * base))
        usual = self._most_work(load, limit, decodes)
        longer = self.belief.guard("hybrid", self.LIKELY)
        credits_s = [max(0.0, spare * self.MARGIN / longer - base) for spare in spares]
        plain = best = self._pace_beside(load, limit, usual)
        asked = plain.asked(load)
        kept = plain.kept(asked)
        most = len(kept)
        # Where all prompts make it, there is none to save.
        for lost, credit_s in enumerate(credits_s if most < len(asked) else ()):
            pace = plain._replace(credit_s=credit_s)
            saving = pace.kept(asked)
            if len(saving) - lost > most:
                best, kept, most = pace, saving, len(saving) - lost
        self._pace = best
        asked_s = base + min(best.needed_s(kept, longer), max([best.credit_s, *credits_s[:1]]))
        return (asked_s, self._fused(load, asked_s)) if asked_s > limit else (limit, usual)

    def _full_pace(self) -> Pace:
        """Of prefill that has the whole device."""
        slower = self.belief.factor("prefill")
        return Pace(self.model.whole, self.limits.full_speed_tokens, slower, 1.0, self._batch_s)

    def _pace_beside(self, load: Load, limit: float, fused: Option) -> Pace:
        """Of prefill beside decode whose steps take at most ``limit``. Its speed is the work of the best option's
        prompt tokens, over the time in which it does them."""
        least = Option(None, self.limits.min_slice_tokens / limit, limit)
        best = max(fused, least, key=lambda option: option.tokens_per_s)
        best = self._best_beside(load, limit, best)
        tokens = best.tokens or max(1, int(best.tokens_per_s * self.limits.slice_seconds))
        pace = self._full_pace()
        work_s = pace.work_s(load.prompts[0].start, tokens)
        return pace._replace(speed=min(1.0, work_s * best.tokens_per_s / tokens))

    # ---- options

    def _fused(self, load: Load, limit: float, decodes: float = 0.0) -> Option:
        """As much prefill as steps of at most ``limit`` can have, or where the device pads, as much work: ``decodes``
        prompt tokens' worth of it is not prefill."""
        whole, factor, start = self.model.whole, self.belief.factor("hybrid"), load.prompts[0].start
        if whole.padding.tokens:
            best = fastest(self._chunks(load), limit, decodes)
        else:
            tokens = whole.most_new(load.decode, start, self._most_new(load), limit / factor)
            best = Chunk(whole.seconds(load.decode.and_slice(start, tokens)) * factor, tokens)
        if best is None or not best.tokens:
            return Option(None, 0.0, limit, 0, limit)
        return Option(None, best.tokens / best.seconds, best.seconds, best.tokens, limit)

    def _most_work(self, load: Load, mean: float, decodes: float) -> Option:
        """The same, of steps that take so long on average: where none with prefill takes so little, some without make
        up for it."""
        padded = bool(self.model.whole.padding.tokens)
        usual = self._fused(load, mean, decodes)
        if usual.tokens >= (1 if padded else self.limits.min_slice_tokens):
            return usual
        turns = in_turns(self._chunks(load), mean)
        if turns is None:
            return usual
        if self._made_up_for(turns.chunk.seconds - mean):
            return Option(None, turns.tokens_per_s, mean, turns.chunk.tokens, turns.chunk.seconds)
        return Option(None, turns.tokens_per_s, mean, 0, mean, rests=True)

    def _chunks(self, load: Load) -> list[Chunk]:
        """Decode alone and each size of step, or where the device does not pad, the least chunk; as if the first prompt
        went on for ever."""
        whole, factor, start = self.model.whole, self.belief.factor("hybrid"), load.prompts[0].start
        alone = Chunk(whole.seconds(load.decode) * self.belief.factor("decode"), 0)
        if whole.padding.tokens:
            sizes = whole.chunks(load.decode, start, self._most_new(load))
        else:
            least = min(self.limits.min_slice_tokens, load.prompts[0].remaining)
            sizes = [(whole.seconds(load.decode.and_slice(start, least)), least)]
        return [alone, *(Chunk(seconds * factor, tokens) for seconds, tokens in sizes)]

    def _decodes(self, load: Load) -> float:
        """How many prompt tokens are as much work."""
        return self.model.whole.in_prompt_tokens(load.decode, self.limits.full_speed_tokens)

    def _most_new(self, load: Load) -> int:
        return min(self.limits.max_num_batched_tokens - load.decode.rows, self.limits.max_prefill_tokens)

    def _best_beside(self, load: Load, limit: float, best: Option) -> Option:
        """Whichever lets prompts get on fastest, as long as no less work is done; where prompts wait nearly all the
        time, whichever does the most work."""
        if len(self._rates_beside) > self.KEPT:
            self._rates_beside.clear()
        slower = self.belief.factor("decode beside")
        decodes = self._decodes(load)
        counted = decodes if self._waited.part >= self.PRESSED else 0.0
        alone = self.model.whole.seconds(load.decode) * self.belief.factor("decode")
        for division in self.model.divisions:
            step = division.decode.seconds(load.decode) * division.decode_slowdown * slower
            part = self._part_beside(alone, step, limit)
            if part > 0.0:
                place = (division.share, load.prompts[0].start)
                if place not in self._rates_beside:
                    self._rates_beside[place] = self._rate_beside(division, load.prompts[0].start)
                mean = min(step, limit)
                beside = Option(division, self._rates_beside[place] * part, mean, over_s=step - mean)
                needed = 1.0 if self._division is division else self.ADVANTAGE
                less = beside.work_per_s(decodes) < best.work_per_s(decodes)
                if not less and beside.work_per_s(counted) > best.work_per_s(counted) * needed:
                    best = beside
        return best

    def _part_beside(self, alone: float, step: float, limit: float) -> float:
        """The part of the time in which prefill may run beside decode's steps, which then take ``step`` and otherwise
        ``alone``: where that is more than a mean may be, steps of decode alone make up for it."""
        if step <= limit:
            return 1.0
        if self.slo.metric is Metric.GAP or alone >= limit:
            return 0.0
        return part_of_steps(alone, step, limit) * step / limit

    def _rate_beside(self, division: Division, start: int) -> float:
        factor = self.belief.factor("prefill beside")
        return division.prefill_rate(start, self.limits.most_prompt_tokens, self.limits.slice_seconds, factor)

    # ---- prefill beside decode

    def _slice_beside(self, load: Load) -> Allowance:
        if self._division is None or not load.prompts:
            return Allowance(0)
        if (load.other_busy or load.other_ready) and not self._made_up_for(self._over_s):
            return Allowance(0)
        slower = self._division.prefill_slowdown * self.belief.factor("prefill beside")
        seconds = self.limits.slice_seconds / slower
        most, least = self.limits.max_num_batched_tokens, self.limits.min_slice_tokens
        return Allowance(most, seconds, self._division.prefill, least)

    # ---- bookkeeping

    def _made_up_for(self, over_s: float) -> bool:
        """Whether shorter steps have saved what a step takes that is so much longer than the mean may be; or all that
        they can save, since prefill must go on."""
        return self._saved_s >= min(over_s, self._most_saved_s)

    def _enter(self, division: Division | None) -> None:
        self.moves += division is not self._division
        self._division = division
        if division is not None:
            self._share = division.share

    def _chose(self, what: str, allowance: Allowance) -> Allowance:
        self.choices[what] = self.choices.get(what, 0) + 1
        return allowance
