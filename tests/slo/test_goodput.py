"""Latencies, SLOs, percentiles and goodput are what their definitions say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.slo.goodput import Latency, Metric, Slo, attainment, gaps_s, goodput, percentile, quarters

times = st.lists(st.floats(0, 100), min_size=1, max_size=40).map(sorted)
shares = st.floats(0, 1)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]))
def test_a_percentile_is_the_smallest_value_with_more_than_that_share_at_or_below_it(values, share):
    candidates = [v for v in values if sum(other <= v for other in values) > share * len(values)]
    assert percentile(values, share) == min(candidates, default=max(values))


def test_percentiles_are_values_that_occurred_and_the_higher_of_two():
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert percentile(range(1, 101), 0.99) == 100
    assert percentile([5.0], 0.01) == 5.0


def test_there_is_no_percentile_of_nothing():
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


def test_the_latency_of_a_request_written_out_by_hand():
    latency = Latency.of(10.0, [10.5, 10.6, 10.8, 11.3])
    assert latency.ttft_s == pytest.approx(0.5)
    assert latency.tpot_s == pytest.approx(0.8 / 3)
    assert latency.gap_p99_s == pytest.approx(0.5)


def test_a_single_token_has_no_pace_to_miss():
    latency = Latency.of(1.0, [3.0])
    assert latency == Latency(2.0, 0.0, 0.0)
    assert Slo(2.0, 0.0).met_by(latency)


@given(times)
def test_mean_tpot_is_the_mean_gap(moments):
    latency = Latency.of(0.0, moments)
    gaps = gaps_s(moments)
    assert len(gaps) == len(moments) - 1
    if gaps:
        assert latency.tpot_s == pytest.approx(math.fsum(gaps) / len(gaps))
        assert min(gaps) <= latency.gap_p99_s <= max(gaps)


@given(times, st.integers(41, 200))
def test_tokens_that_came_together_share_the_time_between_the_first_and_the_last(moments, tokens):
    assert Latency.of(0.0, moments, tokens).tpot_s == pytest.approx((moments[-1] - moments[0]) / (tokens - 1))


def test_the_99th_percentile_of_gaps_leaves_out_one_of_more_than_a_hundred():
    moments = [0.1 * i for i in range(151)]
    late = [*moments[:-1], moments[-1] + 5]
    assert Latency.of(0.0, late).gap_p99_s == pytest.approx(0.1)
    assert Latency.of(0.0, late[-90:]).gap_p99_s == pytest.approx(5.1)


def test_an_slo_is_met_up_to_and_including_its_limits():
    latency = Latency(ttft_s=0.5, tpot_s=0.02, gap_p99_s=0.08)
    assert Slo(0.5, 0.02).met_by(latency)
    assert not Slo(0.49, 0.02).met_by(latency)
    assert not Slo(0.5, 0.019).met_by(latency)
    assert not Slo(0.5, 0.02, Metric.GAP).met_by(latency)
    assert Slo(0.5, 0.08, Metric.GAP).met_by(latency)


def test_a_failed_request_attains_nothing_and_counts():
    good = Latency(0.1, 0.01, 0.01)
    assert attainment([good, None, good, Latency(9.0, 0.01, 0.01)], Slo(1.0, 1.0)) == 0.5
    assert math.isnan(attainment([], Slo(1.0, 1.0)))


@given(st.lists(st.integers(1, 50), max_size=30))
def test_quarters_are_as_equal_as_can_be_and_ascend_where_lengths_tell_requests_apart(lengths):
    parts = quarters(lengths, lambda length: length)
    assert (len(parts) == 4) == (len(lengths) >= 4 and len(set(lengths)) > 1)
    if parts:
        assert [length for part in parts for length in part] == sorted(lengths)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(2, 1.0), (4, 0.95), (8, 0.75)], 5.0),  # 0.05 of the 0.2 that are lost on 4 requests/s
        ([(2, 1.0), (4, 0.9), (8, 0.3)], 4.0),
        ([(2, 1.0), (4, 1.0)], 4.0),
        ([(4, 0.6)], 1.0),  # between nothing at rate 0 and 0.4 at 4
        ([(2, 0.5), (4, 1.0)], 0.4),  # what comes after the first miss is luck
        ([], 0.0),
    ],
)
def test_goodput_is_interpolated_at_the_first_miss(points, expected):
    assert goodput(points) == pytest.approx(expected)
    assert goodput(reversed(points)) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(1, 1000), shares), max_size=12, unique_by=lambda point: point[0]))
def test_goodput_lies_between_the_last_rate_that_attains_and_the_first_that_misses(points):
    points.sort()
    misses = [i for i, (_, attained) in enumerate(points) if attained < 0.9]
    attaining = points[: misses[0]] if misses else points
    low = attaining[-1][0] if attaining else 0
    high = points[misses[0]][0] if misses else low
    assert low - 1e-9 <= goodput(points) <= high + 1e-9
