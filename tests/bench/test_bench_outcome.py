"""A request is called a miss before its end only if it is one in the end."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.bench.outcome import least_latency
from tidegate.slo.goodput import Latency, Metric, Slo

waits = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=150)


@given(waits, st.floats(0, 1), st.integers(0, 30), st.floats(0.01, 1), st.floats(0.001, 1), st.sampled_from(Metric))
def test_what_is_certain_is_never_revoked(gaps, when, unsaid, ttft_s, tpot_s, metric):
    """``unsaid``: tokens that were asked for and did not come."""
    times = list(accumulate(gaps))
    now = times[-1] * when
    slo = Slo(ttft_s, tpot_s, metric)
    least = least_latency(0.0, [at for at in times if at <= now], len(times) + unsaid, now, metric)
    assert slo.met_by(least) or not slo.met_by(Latency.of(0.0, times))


@pytest.mark.parametrize(
    ("times", "now", "metric", "miss"),
    [
        ([], 0.9, Metric.TPOT, False),
        ([], 1.1, Metric.TPOT, True),  # no first token yet
        ([0.5], 1.5, Metric.TPOT, False),
        ([0.5], 6.0, Metric.TPOT, True),  # 10 more tokens, at 0.5 s each, had to be there
        ([0.5, 0.6], 1.0, Metric.GAP, False),
        ([0.5, 0.6], 1.2, Metric.GAP, True),  # the gap that goes on is too long already
        ([0.5 + 0.1 * i for i in range(11)], 99.0, Metric.TPOT, False),  # all came; only the end of the stream is late
        ([0.5 + 0.1 * i for i in range(11)], 99.0, Metric.GAP, False),
    ],
)
def test_a_miss_is_seen_as_soon_as_it_is_certain(times, now, metric, miss):
    assert Slo(1.0, 0.5, metric).met_by(least_latency(0.0, times, 11, now, metric)) is not miss
