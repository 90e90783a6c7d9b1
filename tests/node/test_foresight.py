"""When a batch is called ending: just so long before its end that the next one is there."""

import random

import pytest

from tidegate.node.foresight import Foresight, Usually

STEP = 0.018


def lead(foresight, step=STEP):
    return step - foresight.wait_before_ending("kind", 0.0, 0.0, 0.0)


def run(foresight, decide, prepare, steps=300, step=STEP):
    """Steps on end, the next of each decided on and prepared in so many seconds. How many came too late."""
    late = 0
    for _ in range(steps):
        ending = foresight.wait_before_ending("kind", 0.0, 0.0, 0.0)
        foresight.asked(ending)
        came = ending + decide()
        ready = came + prepare()
        if came < step:
            foresight.came(came)
        foresight.prepared(ready - came)
        foresight.observed("kind", step, 0.0)
        foresight.ended()
        if came >= step:
            foresight.came(came)
        late += ready > step
    return late


def test_a_kind_of_step_that_is_not_known_is_called_ending_at_once():
    assert Foresight().wait_before_ending("kind", 5.0, 5.0, 0.02) == 0.0


def test_a_step_of_a_kind_is_known_by_how_such_steps_differed_from_what_was_expected_of_them():
    """Two of one shape take as long as their contexts make them; both are a tenth longer than believed."""
    foresight = Foresight()
    for expected in (0.02, 0.04) * 20:
        foresight.observed("kind", 1.1 * expected, expected)
    short, long = (foresight.wait_before_ending("kind", 0.0, 0.0, expected) for expected in (0.02, 0.04))
    assert long - short == pytest.approx(1.1 * 0.02)


@pytest.mark.parametrize("decide, prepare", [(0.0002, 0.0005), (0.0016, 0.0011), (0.004, 0.001)])
def test_next_batches_come_in_time_however_long_deciding_and_preparing_take_and_little_earlier(decide, prepare):
    random.seed(1)
    foresight = Foresight()

    def varied(seconds):
        return lambda: seconds * random.uniform(0.8, 1.2)

    run(foresight, varied(decide), varied(prepare))
    assert run(foresight, varied(decide), varied(prepare)) < 0.1 * 300
    assert lead(foresight) <= max(1.25 * decide, Foresight.DECIDE_SECONDS) + 1.25 * prepare


def test_a_batch_that_comes_after_the_end_tells_nothing_of_how_long_deciding_takes():
    """It may have been decided on at the end: counted, each would make the next question earlier, without bound."""
    foresight = Foresight()
    run(foresight, lambda: 0.001, lambda: 0.001)
    before = lead(foresight)
    for _ in range(100):
        foresight.asked(0.0)
        foresight.ended()
        foresight.came(0.01)
    assert lead(foresight) == before


def test_one_exception_moves_what_is_usual_a_little_and_is_forgotten():
    usually = Usually(0.001)
    usually.seen(1.0)
    assert usually.seconds < 0.4 * Usually.LONGEST
    for _ in range(1000):
        usually.seen(0.001)
    assert usually.seconds == pytest.approx(0.001, rel=0.1)
