"""One kernel is chosen where it was measured to be faster, never beyond what was measured of prompts, and a shape is
said to have no such batch only if it has none."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.base.batch import Batch, Slice
from tidegate.kernels.pod_rule import AXES, LEAST_GAIN, Axes, HybridWork, PodRule, partial_bytes


def rule_of(pod_seconds):
    """``pod_seconds``: of a work, where two kernels take one second."""
    return PodRule({work: (1.0, pod_seconds(work)) for work in AXES.points()})


def test_at_measured_points_the_faster_form_is_chosen():
    rule = rule_of(lambda work: 0.8 if work.rows >= 64 and work.prompt_tokens <= 256 else 1.2)
    for work in AXES.points():
        assert rule.wins(work) == (work.rows >= 64 and work.prompt_tokens <= 256)


def test_a_gain_that_may_be_noise_is_none():
    work = AXES.points()[0]
    assert not rule_of(lambda _: 1 / (1 + LEAST_GAIN / 2)).wins(work)
    assert rule_of(lambda _: 1 / (1 + 2 * LEAST_GAIN)).wins(work)


def test_between_points_the_gain_is_interpolated_and_outside_it_is_that_at_the_border():
    rule = rule_of(lambda work: 0.5 if work.context >= 4096 else 1.0)
    assert rule.gain(HybridWork(128, 0, 64, 2048)) == pytest.approx(math.log(2) / 2), "half way, in powers of two"
    assert rule.gain(HybridWork(128, 0, 500, 9000)) == pytest.approx(math.log(2))
    assert rule.gain(HybridWork(3, 0, 1, 5)) == pytest.approx(0.0)
    by_start = rule_of(lambda work: 0.5 if work.start else 1.0)
    assert by_start.gain(HybridWork(128, 1024, 64, 2048)) == pytest.approx(math.log(2) / 4)


def test_more_prompt_tokens_than_were_measured_run_apart():
    rule = rule_of(lambda _: 0.5)
    most = AXES.prompt_tokens[-1]
    assert rule.wins(HybridWork(most, 0, 64, 4096)) and not rule.wins(HybridWork(most + 1, 0, 64, 4096))
    assert rule.may_win((most - 100, most + 100), (49, 64)) and not rule.may_win((most + 1, most + 100), (49, 64))


@given(
    st.lists(st.floats(0.5, 2.0), min_size=len(AXES.points()), max_size=len(AXES.points())),
    st.integers(1, 1200), st.integers(0, 300), st.integers(1, 256), st.data(),
)  # fmt: skip
def test_a_shape_of_which_no_batch_may_win_has_none_that_wins(pod_seconds, least, width, rows, data):
    rule = PodRule({work: (1.0, seconds) for work, seconds in zip(AXES.points(), pod_seconds, strict=True)})
    tokens = data.draw(st.integers(least, least + width))
    work = HybridWork(tokens, data.draw(st.integers(0, 9000)), rows, data.draw(st.integers(1, 9000)))
    if rule.wins(work):
        assert rule.may_win((least, least + width), (max(1, rows - 15), rows))


def test_a_device_on_which_two_kernels_are_always_faster_prepares_nothing():
    rule = rule_of(lambda _: 1.01)
    assert not rule.may_win((1, 1024), (1, 256))
    assert str(rule) == f"one kernel wins on 0 of {len(AXES.points())} shapes"
    assert "64 of 64 shapes, at best 2.00 times" in str(rule_of(lambda _: 0.5))


def test_the_work_of_a_batch_counts_what_its_rows_read():
    slices = [Slice(0, 1000, [1] * 30, True), Slice(1, 0, [1] * 90, False)]
    batch = Batch(0, 1.0, slices, [2, 3], [99, 299], [], [])
    assert HybridWork.of(batch) == HybridWork(120, 250.0, 2, 200.0)


def test_a_rule_can_be_measured_on_other_axes():
    axes = Axes((64, 128), (0,), (8, 16), (512,))
    rule = PodRule(dict.fromkeys(axes.points(), (2.0, 1.0)), axes)
    assert len(axes.points()) == 4 and rule.wins(HybridWork(100, 70, 12, 600))


@pytest.mark.parametrize(
    ("tokens", "rows", "tile", "padded"),
    [
        (128, 1, 128, 33),  # few tiles: the grid is two blocks for each SM, over the KV heads
        (1024, 16, 128, 32 + 15),  # tiles of 128 rows, and one that is not full for each further sequence
        (64, 64, 16, 16 + 63),
    ],
)
def test_partial_results_are_sized_as_flashinfer_pads_its_grid(tokens, rows, tile, padded):
    assert partial_bytes(32, 8, 128, tokens, rows, tile, sms=132) == padded * tile * 32 * 129 * 4
