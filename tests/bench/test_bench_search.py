"""The search ends with two rates, as near as asked for, one that passes and one that does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.bench.search import Search


def searched(search, passes):
    """The rates tried, in order."""
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.learn(rate, passes(rate))
        assert len(tried) < 100
    return tried


def make(start=1.0, precision=0.05, lowest=0.01, highest=1000.0, step=2.0):
    return Search(start, precision=precision, lowest=lowest, highest=highest, step=step)


@given(st.floats(0.02, 900), st.floats(0.01, 1000), st.floats(0.01, 0.5), st.floats(1.05, 2))
def test_the_goodput_lies_between_two_rates_as_near_as_asked_for(truth, start, precision, step):
    search = make(start, precision, step=step)
    searched(search, lambda rate: rate <= truth)
    assert search.low <= truth < search.high <= search.low * (1 + precision)
    assert search.bracketed


def test_rates_double_and_are_then_halved_in_between():
    tried = searched(make(precision=0.2), lambda rate: rate <= 5)
    assert tried == pytest.approx([1, 2, 4, 8, 4 * 2**0.5, 4 * 2**0.25])


def test_near_a_good_guess_the_first_steps_are_small_and_then_grow():
    tried = searched(make(step=1.1), lambda rate: rate < 3)
    assert tried[:5] == pytest.approx([1, 1.1, 1.1**3, 1.1**7, 2 * 1.1**7])
    downward = searched(make(step=1.1), lambda rate: rate < 0.8)
    assert downward[:3] == pytest.approx([1, 1 / 1.1, 1 / 1.1**3])


def test_a_server_that_is_never_too_slow_is_tried_up_to_the_highest_rate():
    search = make(highest=10)
    assert searched(search, lambda rate: True) == [1, 2, 4, 8, 10]
    assert search.high is None and not search.bracketed


def test_a_server_that_is_always_too_slow_is_tried_down_to_the_lowest_rate():
    search = make(lowest=0.3)
    assert searched(search, lambda rate: False) == [1, 0.5, 0.3]
    assert search.low == 0.0 and not search.bracketed


def test_what_is_known_already_is_not_tried_again():
    search = make()
    search.learn(4.0, True)
    search.learn(4.1, False)
    assert search.next_rate() is None
