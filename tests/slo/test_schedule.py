"""The time that decoding requests can do without, under an SLO on the mean TPOT."""

import pytest

from tidegate.slo.schedule import Schedule

TPOT = 0.02


def schedule(lengths=(), pace_s=None):
    made = Schedule()
    for length in lengths:
        made.ended(length)
    if pace_s is not None:
        made.step(pace_s)
    return made


def test_a_spare_is_the_budget_to_the_last_token_less_what_the_rest_will_take():
    """First token at 10.0, 5 told; of answers longer than that all have 21 tokens, so 15 follow the next one."""
    (spare,) = schedule([21] * 30, pace_s=0.012).spares_s([(10.0, 5, TPOT)], now=10.05, count=4)
    assert spare == pytest.approx(10.0 + 20 * TPOT - 15 * 0.012 - 10.05)


def test_without_earlier_answers_the_next_token_is_taken_to_be_the_last():
    (spare,) = schedule().spares_s([(10.0, 5, TPOT)], now=10.05, count=4)
    assert spare == pytest.approx(10.0 + 5 * TPOT - 10.05)


def test_answers_are_taken_to_be_short_so_that_most_get_longer():
    """Nine in ten answers have 100 tokens, one in twenty 10: counted on is what 90 % of those still running exceed."""
    steps = schedule([100] * 95 + [10] * 5, pace_s=0.01)
    (spare,) = steps.spares_s([(0.0, 4, TPOT)], now=0.04, count=1)
    assert spare == pytest.approx(99 * TPOT - 95 * 0.01 - 0.04)
    cautious = schedule([100] * 80 + [10] * 20, pace_s=0.01)
    (spare,) = cautious.spares_s([(0.0, 4, TPOT)], now=0.04, count=1)
    assert spare == pytest.approx(9 * TPOT - 5 * 0.01 - 0.04)


def test_a_pace_slower_than_the_slo_is_not_counted_on():
    (spare,) = schedule([21] * 30, pace_s=0.5).spares_s([(10.0, 5, TPOT)], now=10.05, count=1)
    assert spare == pytest.approx(10.0 + 20 * TPOT - 15 * TPOT - 10.05)


def test_requests_that_cannot_meet_their_slo_any_more_are_left_out():
    hopeless, well = (0.0, 5, TPOT), (10.0, 5, TPOT)
    assert len(schedule().spares_s([hopeless, well], now=10.05, count=4)) == 1


def test_one_that_is_a_little_late_can_still_meet_it():
    """Its next step may be shorter. To leave it out would be to give it up: the others can spare more."""
    behind, far_behind = (10.0 - 0.4 * TPOT, 1, TPOT), (10.0 - 0.6 * TPOT, 1, TPOT)
    (spare,) = schedule().spares_s([behind, far_behind], now=10.0, count=4)
    assert spare == pytest.approx(0.6 * TPOT)


def test_the_shortest_spares_come_first_and_no_more_than_asked_for():
    requests = [(10.0 + late, 50, TPOT) for late in (0.3, 0.1, 0.2, 0.4)]
    spares = schedule().spares_s(requests, now=10.5, count=3)
    assert len(spares) == 3 and spares == sorted(spares)
    assert spares[0] == pytest.approx(10.1 + 50 * TPOT - 10.5)


def test_old_answers_are_forgotten():
    steps = schedule([1000] * 10 + [6] * Schedule.KEPT)
    (spare,) = steps.spares_s([(10.0, 4, TPOT)], now=10.0, count=1)
    assert spare == pytest.approx(5 * TPOT - 1 * TPOT)
