"""The highest rate is found where it is known."""

import pytest
import toy

from tidegate.plan.rate import Length, Probe, highest_rate, summed_up
from tidegate.plan.setting import rescaled
from tidegate.slo.goodput import Latency, Slo

SLO = Slo(1.0, 0.1)
GOOD, LATE = Latency(0.5, 0.05, 0.05), Latency(2.0, 0.05, 0.05)


def failing_above(limit):
    """Everybody attains the SLO up to a rate, and half of them above it."""

    def simulate(arrivals, seed):
        rate = (len(arrivals) - 1) / (arrivals[-1].at_s - arrivals[0].at_s)
        return [GOOD if rate <= limit or i % 2 else LATE for i in range(len(arrivals))]

    return simulate


@pytest.mark.parametrize("guess", [2.0, 9.0, 25.0])
def test_the_rate_found_lies_at_the_edge_within_its_interval(guess):
    demand = toy.setting().demand
    found = highest_rate(failing_above(10.0), demand, SLO, guess, Length(400, 0.0), 1000.0)
    edge = max(rate for rate, attained, _ in found.probes if attained == 1.0)
    assert edge <= found.rate <= found.beyond.rate
    assert found.low <= found.rate <= found.high
    assert found.beyond.attained == pytest.approx(0.5, abs=0.01)


def test_a_rate_is_never_above_what_the_caller_allows():
    found = highest_rate(failing_above(100.0), toy.setting().demand, SLO, 40.0, Length(50, 0.0), 60.0)
    assert found.rate == found.high == 60.0


def test_what_fails_at_every_rate_has_none():
    found = highest_rate(failing_above(0.0), toy.setting().demand, SLO, 10.0, Length(50, 0.0), 100.0)
    assert (found.rate, found.low, found.high) == (0.0, 0.0, 0.0)


def test_what_fails_far_below_what_matters_is_given_up():
    found = highest_rate(failing_above(1.0), toy.setting().demand, SLO, 40.0, Length(50, 0.0), 100.0, floor=20.0)
    assert found.rate == 0.0
    assert 1.0 < found.high <= 20.0


def test_more_requests_make_the_interval_narrower():
    def interval(count):
        latencies = [LATE if i % 20 == 0 else GOOD for i in range(count)]
        return Probe(5.0, 0.95, latencies).interval

    few, many = interval(100), interval(1000)
    assert few[0] < many[0] < 0.95 < many[1] < few[1]


def test_the_interval_of_a_rate_that_always_does_reaches_to_the_most_allowed():
    found = summed_up([Probe(4.0, 1.0, [GOOD] * 100)], 12.0)
    assert (found.rate, found.low, found.high) == (4.0, 4.0, 12.0)


def test_requests_that_find_the_engine_still_empty_are_not_counted():
    count = []

    def simulate(arrivals, seed):
        count.append(len(arrivals))
        return [LATE] * 50 + [GOOD] * (len(arrivals) - 50)

    found = highest_rate(simulate, toy.setting().demand, SLO, 10.0, Length(100, 5.0), 10.0)
    assert count == [150]
    assert found.rate == 10.0


def test_equal_requests_come_at_every_rate_only_faster():
    demand = toy.setting(lengths=[(i, 10) for i in range(1, 50)]).demand
    slow, fast = demand.arrivals(2.0, 200), demand.arrivals(4.0, 200)
    assert [a[1:] for a in slow] == [a[1:] for a in fast]
    assert [a.at_s for a in slow] == pytest.approx([2 * a.at_s for a in fast])
    assert demand.arrivals(2.0, 200, part=1) != slow


def test_a_measured_model_is_rescaled_as_the_roofline_goes_from_one_device_to_several():
    setting = toy.setting(None, of=toy.model(num_heads=8, num_layers=32, hidden_size=4096, ffn_size=14336))
    one, four = setting.latency(1), setting.latency(4)
    found = rescaled(one, one, four)
    assert found.whole.dense_s == pytest.approx(four.whole.dense_s)
    for mine, theirs in zip(found.divisions, four.divisions, strict=True):
        assert mine.decode.context_s == pytest.approx(theirs.decode.context_s)
        assert mine.prefill.dense_s == pytest.approx(theirs.prefill.dense_s)
