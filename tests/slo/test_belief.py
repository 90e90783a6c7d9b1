"""A gate's belief follows what is measured, and says how sure it is."""

import random

import pytest
from simulated import MACHINE

from tidegate.slo.belief import Belief
from tidegate.slo.gate import Observation
from tidegate.slo.latency import Work

STEP = Work(rows=32, context=32_000)


def seen(ratio, lane="D", share=1.0, beside=False):
    return Observation(lane, share, beside, STEP, ratio * MACHINE.seconds(STEP, lane, share, beside))


def test_the_factor_follows_the_device_and_each_kind_of_step_has_its_own():
    belief = Belief(MACHINE)
    assert belief.factor("decode") == belief.factor("decode beside") == 1.0
    for _ in range(150):
        belief.observe(seen(1.3))
        belief.observe(seen(0.8, share=0.5, beside=True))
    assert belief.factor("decode") == pytest.approx(1.3, rel=0.01)
    assert belief.factor("decode beside") == pytest.approx(0.8, rel=0.01)
    for _ in range(150):
        belief.observe(seen(1.0))
    assert belief.factor("decode") == pytest.approx(1.0, rel=0.01)


def test_one_batch_that_took_absurdly_long_hardly_moves_it():
    belief = Belief(MACHINE)
    belief.observe(seen(1000.0))
    assert belief.factor("decode") <= 1.05


@pytest.mark.parametrize("fraction", [0.9, 0.99])
def test_the_guard_covers_the_stated_fraction_of_batches(fraction):
    rng, belief = random.Random(5), Belief(MACHINE)
    for _ in range(2000):
        belief.observe(seen(1.2 * rng.lognormvariate(0.0, 0.05)))
    guard = belief.guard("decode", fraction)
    fresh = [1.2 * rng.lognormvariate(0.0, 0.05) for _ in range(4000)]
    covered = sum(ratio <= belief.factor("decode") * guard for ratio in fresh) / len(fresh)
    assert covered == pytest.approx(fraction, abs=0.03)


def test_before_enough_was_measured_the_guard_is_no_smaller_than_a_guess_or_the_worst_so_far():
    belief = Belief(MACHINE)
    assert belief.guard("decode", 0.99) == 1.05
    belief.observe(seen(1.4))
    assert belief.guard("decode", 0.99) == pytest.approx(1.4)


def test_the_guard_forgets_what_is_long_past():
    belief = Belief(MACHINE)
    for ratio in [1.9] * 50 + [1.0] * 1100:
        belief.observe(seen(ratio))
    assert belief.guard("decode", 0.99) == pytest.approx(1.0, abs=0.01)
