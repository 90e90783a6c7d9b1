"""What is decided with a confidence is wrong no more often than that allows, however often the sample is looked at."""

import math
import random

import pytest

from tidegate.bench.confidence import Decision, Interval, beta_below, clopper_pearson, design_effect, looks


@pytest.mark.parametrize("size", [1, 7, 100, 800])
@pytest.mark.parametrize("share", [0.03, 0.5, 0.9, 0.995])
def test_the_beta_distribution_equals_the_binomials_tail(size, share):
    for hits in {1, (size + 1) // 2, size}:
        tail = math.fsum(math.comb(size, k) * share**k * (1 - share) ** (size - k) for k in range(hits, size + 1))
        assert beta_below(share, hits, size - hits + 1) == pytest.approx(tail, abs=1e-10)


@pytest.mark.parametrize(
    ("hits", "size", "low", "high"),
    [(0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (90, 100, 0.8238, 0.9510), (81, 263, 0.2527, 0.3676)],
)
def test_clopper_and_pearsons_interval_as_in_tables(hits, size, low, high):
    assert clopper_pearson(hits, size, 0.05) == pytest.approx((low, high), abs=1e-4)


def test_looks_double_from_the_least_to_the_most_time():
    assert looks(20, 120) == [20, 40, 80, 120]
    assert looks(20, 90) == [20, 40, 90]  # and not at 80 too, which would see nearly the same
    assert looks(20, 20) == [20]


def test_looks_see_whole_periods():
    assert looks(20, 120, period_s=60) == [60, 120]
    assert looks(20, 100, period_s=30) == [30, 60, 90]
    assert looks(0.2, 0.99, period_s=0.1) == pytest.approx([0.2, 0.4, 0.9])


def test_the_design_effect_is_the_size_of_groups_that_share_a_fate():
    rng = random.Random(1)
    effects = [design_effect([met for met in draws(rng, 0.8, 400) for _ in range(5)]) for _ in range(200)]
    assert sum(effects) / len(effects) == pytest.approx(5, rel=0.15)
    assert design_effect([True] * 50) == design_effect([False] * 50) == 1.5


def draws(rng, share, count):
    return [rng.random() < share for _ in range(count)]


def in_groups(rng, share, count):
    """Requests that attain or miss together, by ones, twos and threes."""
    met = []
    while len(met) < count:
        met += [rng.random() < share] * rng.randint(1, 3)
    return met[:count]


def sequential(sample, threshold, confidence):
    """As a probe does it: a look at 100 requests, 200, 400, 600; the first that decides ends it."""
    ends = looks(100, 600)
    for end in ends:
        decision = Interval.of(sample[: int(end)], (1 - confidence) / len(ends)).decision(threshold)
        if decision is not Decision.OPEN:
            return decision
    return Decision.OPEN


@pytest.mark.parametrize("draw", [draws, in_groups])
def test_the_sequential_test_is_wrong_no_more_often_than_its_confidence_allows(draw):
    """At a share that is the threshold itself, either decision is an error: the worst case."""
    rng = random.Random(7)
    decisions = [sequential(draw(rng, 0.9, 600), 0.9, 0.9) for _ in range(500)]
    wrong = sum(decision is not Decision.OPEN for decision in decisions) / len(decisions)
    assert wrong <= 0.1


@pytest.mark.parametrize(("share", "decision"), [(0.96, Decision.ATTAINED), (0.82, Decision.MISSED)])
def test_the_sequential_test_decides_what_is_clear(share, decision):
    rng = random.Random(3)
    decisions = [sequential(draws(rng, share, 600), 0.9, 0.95) for _ in range(100)]
    assert decisions.count(decision) >= 95


def test_nothing_is_decided_without_requests():
    assert Interval.of([], 0.05).decision(0.9) is Decision.OPEN
