"""Arrivals in clumps, in bursts and at a trace's own times keep the mean rate; steps change the workload in time."""

import math
from itertools import islice, pairwise

import pytest

from tidegate.base.errors import ConfigError
from tidegate.bench.arrivals import POISSON, Bursts, Pattern
from tidegate.bench.plan import Amount, arrivals, find_workload, own_arrivals, own_rates, within
from tidegate.bench.schedule import Schedule
from tidegate.bench.traces import Trace
from tidegate.bench.workloads import WORKLOADS, Request, source

BURSTS = Bursts(factor=4.0, on_s=2.0, off_s=6.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed_with_burstiness_as_their_shape(burstiness):
    moments = list(islice(Pattern(burstiness).times(5.0, source(3)), 40_001))
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    mean = math.fsum(gaps) / len(gaps)
    variance = math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.03)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.06)


def test_bursts_have_their_factor_and_leave_the_mean_as_it_was():
    moments = within_times(Pattern(bursts=BURSTS).times(10.0, source(1)), 4000.0)
    on = sum(at_s % BURSTS.period_s < BURSTS.on_s for at_s in moments)
    rate_on, rate_off = on / (500 * BURSTS.on_s), (len(moments) - on) / (500 * BURSTS.off_s)
    assert rate_on / rate_off == pytest.approx(4.0, rel=0.05)
    assert len(moments) / 4000 == pytest.approx(10.0, rel=0.03)


def test_bursts_keep_the_order_of_arrivals_and_whole_turns():
    even = [i * 0.013 for i in range(3000)]
    moved = [BURSTS.at_s(at_s) for at_s in even]
    assert moved == sorted(moved)
    assert BURSTS.at_s(0.0) == 0.0
    assert BURSTS.at_s(3 * BURSTS.period_s) == pytest.approx(3 * BURSTS.period_s)
    assert BURSTS.at_s(8 * 4 * 2 / (4 * 2 + 6) * 0.5) == pytest.approx(1.0)  # half of a burst's requests in half of it


def within_times(times, seconds):
    return [at_s for at_s in islice(times, 100_000) if at_s < seconds]


def test_equal_seeds_give_equal_bursts_and_others_do_not():
    pattern = Pattern(0.5, BURSTS)
    once, again, other = (list(islice(arrivals(WORKLOADS["conv"], 3.0, seed, pattern), 100)) for seed in (1, 1, 2))
    assert once == again != other


def test_steps_draw_from_their_workload_in_their_time_and_repeat():
    schedule = find_workload("conv@3,code@2")
    assert isinstance(schedule, Schedule)
    assert schedule.period_s == 5.0
    assert [schedule.step_at(at_s) for at_s in (0.0, 2.9, 3.0, 4.9, 5.0, 8.1)] == [0, 0, 1, 1, 0, 1]
    requests = within(arrivals(schedule, 200.0, 4), 50.0)
    outputs = {0: [], 1: []}
    for request in requests:
        outputs[schedule.step_at(request.at_s)].append(request.output_tokens)
    assert len(outputs[0]) / len(outputs[1]) == pytest.approx(1.5, rel=0.1)
    assert sum(outputs[0]) / len(outputs[0]) == pytest.approx(211, rel=0.1)
    assert sum(outputs[1]) / len(outputs[1]) == pytest.approx(28, rel=0.2)


def test_a_last_step_without_seconds_does_not_end():
    schedule = find_workload("conv@3,code")
    assert schedule.period_s is None
    assert [schedule.step_at(at_s) for at_s in (0.0, 3.0, 1e9)] == [0, 1, 1]


def in_each_step(schedule, rate, seconds, pattern=POISSON):
    counts = [0] * len(schedule.steps)
    for request in within(arrivals(schedule, rate, 2, pattern), seconds):
        counts[schedule.step_at(request.at_s)] += 1
    return counts


@pytest.mark.parametrize("pattern", [POISSON, Pattern(bursts=Bursts(3.0, 0.5, 0.5))], ids=["poisson", "bursts"])
def test_steps_with_rates_keep_their_proportions_at_any_mean(pattern):
    """Scaling a whole trace: at twice the mean every step has twice the arrivals, and still in its own time."""
    schedule = find_workload("conv@3x20,code@2x5,long@5x2")
    assert schedule.mean_rate == pytest.approx(8.0)
    for rate in (8.0, 16.0):
        counts = in_each_step(schedule, rate, 2000.0, pattern)
        assert sum(counts) == pytest.approx(rate * 2000, rel=0.05)
        for count, step in zip(counts, schedule.steps, strict=True):
            assert count == pytest.approx(200 * step.seconds * step.rate * rate / 8.0, rel=0.1)


def test_steps_with_rates_keep_the_order_of_arrivals_and_whole_turns():
    schedule = find_workload("conv@3x20,code@2x5")
    moved = [schedule.at_s(i * 0.01) for i in range(2000)]
    assert moved == sorted(moved)
    assert schedule.at_s(0.0) == 0.0
    assert schedule.at_s(15.0) == pytest.approx(15.0)
    assert schedule.at_s(5 * 60 / 70) == pytest.approx(3.0)  # all of the first step's 60 of 70 requests


def test_without_a_rate_steps_have_their_own():
    assert own_rates(find_workload("conv@3x20,code@1x4")) == [16.0]
    assert own_rates(find_workload("conv@3,code@1")) == own_rates(WORKLOADS["conv"]) == []


@pytest.mark.parametrize("name", ["conv@30x20,code@30", "conv@30,code@30x2", "conv@30x20,code"])
def test_rates_of_some_steps_only_are_refused(name):
    with pytest.raises(ConfigError, match="all have a rate, as conv@30x20, or none has"):
        find_workload(name)


def test_without_an_amount_every_step_is_sent_once():
    assert Amount().covering(find_workload("conv@30,code@15")).at(2.0) == 90
    assert Amount().covering(find_workload("conv@40,code")).at(1.0) == 70
    assert Amount(seconds=10).covering(find_workload("conv@30,code@15")).at(2.0) == 20
    assert Amount().covering(WORKLOADS["conv"]).at(1.0) == 30


@pytest.mark.parametrize(
    "name",
    [
        "conv,code@30",
        "conv@x,code",
        "conv@0,code",
        "conv@-1",
        "conv@,code",
        "conv@inf,code",
        "conv@3x,code@3x2",
        "conv@3x0",
    ],
)
def test_steps_that_can_not_be_read_are_refused_with_an_example(name):
    with pytest.raises(ConfigError, match="not a step such as conv@30"):
        find_workload(name)


def test_a_step_of_a_workload_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="no workload 'talk'"):
        find_workload("talk@30,conv@30")


def test_a_traces_own_times_are_scaled_to_the_rate_and_go_round():
    recorded = [Request(10, 1, 0.0), Request(20, 1, 1.0), Request(30, 1, 7.0)]
    found = list(islice(own_arrivals(Trace(recorded, timed=True), rate=0.6), 6))
    assert [request.at_s for request in found] == pytest.approx([0.0, 10 / 21, 10 / 3, 5.0, 5 + 10 / 21, 5 + 10 / 3])
    assert [request.prompt_tokens for request in found] == [10, 20, 30] * 2
    many = within(own_arrivals(Trace(recorded, timed=True), rate=20.0), 100.0)
    assert len(many) == pytest.approx(2000, abs=3)


def test_a_trace_whose_requests_have_one_time_has_no_rate_to_scale():
    with pytest.raises(ConfigError, match="no rate that can be changed"):
        own_arrivals(Trace([Request(1, 1, 0.0), Request(1, 1, 0.0)], timed=True), rate=1.0)
