"""How far off a belief says that it is, by kind of step, and what it learns from that."""

import pytest

from tidegate.slo.belief import Belief, Errors
from tidegate.slo.gate import Observation
from tidegate.slo.latency import Work, rough

MODEL = rough(1000.0)
DECODE, PREFILL = Work(rows=8, context=800), Work(new=512, pairs=512 * 256.0)
HYBRID = Work(new=256, pairs=256 * 128.0, rows=8, context=800)


def seen(work, lane="D", share=1.0, beside=False, times=1.0):
    return Observation(lane, share, beside, work, MODEL.seconds(work, lane, share, beside) * times)


def test_the_factor_of_a_kind_of_step_follows_what_such_steps_take_and_no_others_does():
    belief = Belief(MODEL)
    for _ in range(200):
        belief.observe(seen(PREFILL, lane="P", times=1.4))
    assert belief.factors == {"prefill": pytest.approx(1.4, rel=0.01)} and belief.factor("decode") == 1.0


def test_the_error_is_told_by_kind_and_shrinks_as_the_factor_is_learnt():
    belief = Belief(MODEL)
    assert belief.accuracy() == {}
    belief.observe(seen(DECODE, times=1.25))
    assert belief.accuracy()["decode"].p50 == pytest.approx(0.2)
    for _ in range(Errors.KEPT + 100):
        belief.observe(seen(DECODE, times=1.25))
    error = belief.accuracy()["decode"]
    assert error.steps == Errors.KEPT and error.p95 < 0.01


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (seen(DECODE), "decode"),
        (seen(PREFILL), "prefill"),
        (seen(HYBRID), "hybrid"),
        (seen(HYBRID, beside=True), "hybrid"),
        (seen(DECODE, share=0.5, beside=True), "decode beside"),
        (seen(PREFILL, "P", 0.5, True), "prefill beside"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kinds_of_step(what, kind):
    belief = Belief(MODEL)
    belief.observe(what)
    assert set(belief.accuracy()) == {kind}


def test_quantiles_are_of_the_sizes_of_errors_whatever_their_sign():
    belief = Belief(MODEL)
    belief.WEIGHT = 0.0  # the factor stays 1
    for i in range(100):
        belief.observe(seen(DECODE, times=1 / (1.1 if i % 2 else 0.9) if i < 90 else 2.0))
    error = belief.accuracy()["decode"]
    assert (error.p50, error.p95) == (pytest.approx(0.1), pytest.approx(0.5))
