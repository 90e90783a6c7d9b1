"""What the average load allows, without simulating: rates above which a design falls behind or misses its pace.

Let r be the rate of requests, L an average answer's length and T the time from one token to the next. By Little's law
r · L · T requests decode at once, and T follows from their number; so T is a fixed point, and where there is none
within a limit on T the rate is too high. With the SLO's limit that rate is a design's *ceiling*, with none its
*capacity*: above the one average requests get their tokens too slowly, above the other work piles up, even if the
requests that attain the SLO are enough for a while. Waiting and chance only make it worse.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from tidegate.plan.demand import Averages
from tidegate.plan.setting import FULL_BATCH, MAX_SEQS, Setting
from tidegate.slo.goodput import GOODPUT_ATTAINMENT, Metric
from tidegate.slo.latency import Costs, Division, Work

PRECISION = 0.005  # of a ceiling
MOST_RATE = 1e4


class Rates(NamedTuple):
    """In requests/s, of one instance. ``ceiling``: 0 if the SLO can't be met at any rate."""

    ceiling: float
    capacity: float


class Bound(NamedTuple):
    """The most requests/s a device could serve if its arithmetic and its memory were each busy all the time."""

    requests_per_s: float
    resource: str  # that binds: "prefill compute" or "decode bandwidth"
    compute_s: float  # a request's
    bandwidth_s: float


def hardware_bound(setting: Setting) -> Bound:
    """Per device. No design passes it, since every request's arithmetic and reading are to be done by somebody."""
    return max((_bound(setting, tp) for tp in setting.degrees), key=lambda bound: bound.requests_per_s)


def _bound(setting: Setting, tp: int) -> Bound:
    costs, each = setting.latency(tp).whole, setting.demand.averages
    token_s = min(seconds / tokens for tokens, seconds in zip(costs.tokens, costs.dense_s, strict=True))
    compute_s = tp * (token_s * (each.prompt_tokens + each.output_tokens) + costs.pair_s * each.pairs)
    rows = most_rows(setting, tp)
    while rows > 1 and costs.seconds(each.decode(rows)) > setting.slo.tpot_s:
        rows = max(1, int(rows * 0.95))
    bandwidth_s = tp * (each.context * costs.context_s + each.output_tokens * costs.dense_s[0] / rows)
    resource = "prefill compute" if compute_s >= bandwidth_s else "decode bandwidth"
    return Bound(1.0 / max(compute_s, bandwidth_s), resource, compute_s, bandwidth_s)


def most_rows(setting: Setting, tp: int) -> int:
    """Requests that decode at once at most, in an instance on ``tp`` devices: the engine's limit, or its memory's."""
    each = setting.demand.averages
    middle = each.context / each.output_tokens
    return max(1, min(MAX_SEQS, int(setting.memory(tp).kv_tokens / middle)))


# ---- kinds of instances


def prefill_first(setting: Setting, tp: int) -> Rates:
    costs, each = setting.latency(tp).whole, setting.demand.averages
    prefill_s = prefill_seconds(costs, each)

    def step(rate: float, pace_s: float, limit_s: float) -> float:
        left = 1.0 - rate * prefill_s
        return costs.seconds(each.decode(rate * each.output_tokens * pace_s)) / left if left > 0 else math.inf

    return rates(setting, tp, step, reaches(setting, costs))


def chunked(setting: Setting, tp: int, chunk: int) -> Rates:
    costs, each = setting.latency(tp).whole, setting.demand.averages
    every_gap = setting.slo.metric is Metric.GAP

    def step(rate: float, pace_s: float, limit_s: float) -> float:
        decode = each.decode(rate * each.output_tokens * pace_s)
        prefill = each.prefill(rate * pace_s, chunk)
        if decode.rows + prefill.new > chunk:
            return math.inf
        if every_gap:
            full = min(chunk - decode.rows, int(each.prompt_tokens))
            if costs.seconds(decode.and_slice(0, full)) > limit_s:
                return math.inf
        return costs.seconds(Work(prefill.new, prefill.pairs, prefill.reused, decode.rows, decode.context))

    return rates(setting, tp, step, reaches(setting, costs, chunk))


def semi(setting: Setting, tp: int, division: Division) -> Rates:
    each = setting.demand.averages
    prefill_s = prefill_seconds(division.prefill, each) * division.prefill_slowdown

    def step(rate: float, pace_s: float, limit_s: float) -> float:
        if rate * prefill_s > 1.0:
            return math.inf
        return division.decode.seconds(each.decode(rate * each.output_tokens * pace_s)) * division.decode_slowdown

    return rates(setting, tp, step, reaches(setting, setting.latency(tp).whole))


def prefill_only(setting: Setting, tp: int) -> Rates:
    """Of an instance that only prefills."""
    costs = setting.latency(tp).whole
    capacity = 1.0 / prefill_seconds(costs, setting.demand.averages)
    return Rates(capacity if reaches(setting, costs) else 0.0, capacity)


def decode_only(setting: Setting, tp: int) -> Rates:
    """Of an instance that only decodes."""
    costs, each = setting.latency(tp).whole, setting.demand.averages

    def step(rate: float, pace_s: float, limit_s: float) -> float:
        return costs.seconds(each.decode(rate * each.output_tokens * pace_s))

    return rates(setting, tp, step, reaches=True)


# ---- what they are made of


def prefill_seconds(costs: Costs, each: Averages, chunk: int = FULL_BATCH) -> float:
    """Of an average prompt's part in full batches."""
    prefill = each.prefill(1.0, chunk)
    attention = costs.pair_s * prefill.pairs + costs.reused_s * prefill.reused
    return costs.dense(chunk) / chunk * each.prompt_tokens + attention


def first_token_s(costs: Costs, prompt_tokens: int, chunk: int = FULL_BATCH) -> float:
    """Of a prompt that has the device to itself."""
    seconds, start = 0.0, 0
    while start < prompt_tokens:
        count = min(chunk, prompt_tokens - start)
        seconds += costs.seconds(Work().and_slice(start, count))
        start += count
    return seconds


def reaches(setting: Setting, costs: Costs, chunk: int = FULL_BATCH) -> bool:
    """Whether enough requests would meet the SLO if each were alone."""
    prompts = setting.demand.prompts
    long = prompts[min(len(prompts) - 1, int(GOODPUT_ATTAINMENT * len(prompts)))]
    alone = costs.seconds(Work(rows=1, context=long))
    return first_token_s(costs, long, chunk) <= setting.slo.ttft_s and alone <= setting.slo.tpot_s


Step = Callable[[float, float, float], float]
"""Of (rate, pace, limit): how long a step takes if requests get their tokens at that pace; infinity if it can't be, or
if steps beside the average one take longer than the limit."""


def rates(setting: Setting, tp: int, step: Step, reaches: bool) -> Rates:
    within_slo = highest_steady(setting, tp, step, setting.slo.tpot_s) if reaches else 0.0
    return Rates(within_slo, highest_steady(setting, tp, step, math.inf))


def highest_steady(setting: Setting, tp: int, step: Step, limit_s: float) -> float:
    """The highest rate with a steady pace within ``limit_s``."""
    rows, output_tokens = most_rows(setting, tp), setting.demand.averages.output_tokens

    def steady(rate: float) -> bool:
        pace_s = 0.0
        for _ in range(200):
            later_s = step(rate, pace_s, limit_s)
            if later_s > limit_s or rate * output_tokens * later_s > rows:
                return False
            if later_s <= pace_s * (1 + 1e-3):
                return True
            pace_s = later_s
        return True

    low, high = 0.0, 1.0
    while high < MOST_RATE and steady(high):
        low, high = high, 2.0 * high
    while high - low > PRECISION * high and high > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if steady(middle) else (low, middle)
    return low
