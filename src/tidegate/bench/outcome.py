"""Whether a request attains an SLO, as soon as that is certain: a miss often is long before the answer has ended."""

from collections.abc import Sequence

from tidegate.bench.load import Exchange
from tidegate.slo.goodput import Latency, Metric, Slo, gaps_s, percentile


def outcome(exchange: Exchange, slo: Slo, now: float) -> bool | None:
    """Of a request that was sent; None while both are possible. Failed requests miss."""
    assert exchange.sent_s is not None, "it has not been sent"
    if exchange.ended:
        latency = exchange.record().latency
        return latency is not None and slo.met_by(latency)
    least = least_latency(exchange.sent_s, exchange.times_s, exchange.planned.output_tokens, now, slo.metric)
    return None if slo.met_by(least) else False


def least_latency(sent_s: float, times_s: Sequence[float], asked_tokens: int, now: float, metric: Metric) -> Latency:
    """No latency of a request whose output came at ``times_s`` so far can be smaller in the end, in TTFT and in what
    ``metric`` looks at: the next token comes at once, and all others together with it."""
    if not times_s:
        return Latency(now - sent_s, 0.0, 0.0)
    ttft_s = times_s[0] - sent_s
    if len(times_s) >= asked_tokens:
        now = times_s[-1]
    if metric is Metric.TPOT:
        return Latency(ttft_s, (now - times_s[0]) / max(1, asked_tokens - 1), 0.0)
    gaps = gaps_s([*times_s, now])
    return Latency(ttft_s, 0.0, percentile(gaps + [0.0] * (asked_tokens - 1 - len(gaps)), 0.99))
