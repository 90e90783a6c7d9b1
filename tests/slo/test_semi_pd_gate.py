"""Gate "semi-pd": after a window that missed the SLO, the nearest share predicted to meet it, by the model's scale."""

import pytest
from simulated import LIMITS, MACHINE, Run, config, conversations, load, slower

from tidegate.core.core import Core
from tidegate.slo.belief import Belief
from tidegate.slo.gate import Ended, Observation
from tidegate.slo.goodput import Metric, Slo, attainment
from tidegate.slo.latency import Work
from tidegate.slo.semi_pd_gate import SemiPdGate

SLO = Slo(0.5, 0.025)
STEP, SLICE = Work(rows=32, context=32_000), Work(512, 512 * 256.0)


class Story:
    """What a gate is told, window after window. ``busy``: the part of the time that prefill runs."""

    def __init__(self, share, slo=SLO, error=1.0):
        self.gate, self.now, self.error = SemiPdGate(LIMITS, slo, Belief(MACHINE), share), 100.0, error
        self.gate.first_token(0.1, self.now)  # from here on windows are counted

    def window(self, ttft_s=0.2, tpot_s=0.015, busy=0.6, late=0):
        """One window, of 40 requests. Returns prefill's share after it."""
        interval_s = SemiPdGate.WINDOW_SECONDS * 1.001 / 40
        gate, division = self.gate, self.gate.division
        for _ in range(40):
            self.now += interval_s
            step_s = division.decode.seconds(STEP) * division.decode_slowdown * self.error
            gate.observe(Observation("D", 1 - division.share, True, STEP, step_s))
            gate.observe(Observation("P", division.share, True, SLICE, interval_s * busy))
            gate.ended(Ended(500, ttft_s, tpot_s, first_s=self.now), self.now)
            gate.allow(load(late=late))
            gate.first_token(ttft_s, self.now)
        return gate.shares["P"]


def test_nothing_moves_while_the_slo_is_met_however_easily():
    story = Story(0.5)
    assert [story.window(0.01, 0.001, busy=0.1) for _ in range(20)] == [0.5] * 20
    assert story.gate.moves == 0


def test_slow_tokens_give_decode_the_nearest_share_that_meets_both_after_one_window():
    """Steps take two thirds as long on three quarters of the device as on half of it."""
    assert Story(0.5).window(tpot_s=0.030) == 0.25


def test_decode_gets_as_much_as_it_needs_at_once():
    """From a quarter to half of the device the mean step gets a third shorter; where that is too little, more."""
    assert Story(0.75).window(tpot_s=0.034, ttft_s=0.05) == 0.5
    assert Story(0.75).window(tpot_s=0.045, ttft_s=0.05) == 0.25


def test_late_first_tokens_take_from_decode_but_not_after_a_single_window():
    story = Story(0.25)
    patience = SemiPdGate.PATIENCE[0]
    shares = [story.window(ttft_s=0.8, tpot_s=0.004, busy=0.9) for _ in range(patience)]
    assert shares == [0.25] * (patience - 1) + [0.5]


def test_late_first_tokens_now_and_then_take_nothing_from_decode():
    story = Story(0.25)
    assert [story.window(ttft_s=0.8 if i % 2 else 0.2, tpot_s=0.004) for i in range(8)] == [0.25] * 8


@pytest.mark.parametrize(("ttft_s", "busy", "share"), [(1.4, 0.9, 0.5), (1.4, 0.1, 0.75), (0.9, 0.1, 0.5)])
def test_first_tokens_that_queue_need_less_speed_than_first_tokens_that_take_long(ttft_s, busy, share):
    """Twice the share halves the time of a slice, but cuts the wait in a queue that is nearly full by far more: so the
    next share cures a TTFT of 1.4 s where prefill is busy, and does not where that is the prompt's own time."""
    story = Story(0.25)
    for _ in range(SemiPdGate.PATIENCE[0]):
        story.window(ttft_s, tpot_s=0.004, busy=busy)
    assert story.gate.shares["P"] == share


def test_prefill_is_given_nothing_that_would_make_tokens_slow():
    """The mean step would take half as long again on a quarter of the device: 27 ms."""
    story = Story(0.5)
    assert [story.window(ttft_s=2.0, tpot_s=0.018, busy=0.95) for _ in range(8)] == [0.5] * 8


def test_where_nothing_meets_both_tokens_come_first():
    story = Story(0.75)
    assert story.window(ttft_s=5.0, tpot_s=0.030, busy=0.95) == 0.5
    assert Story(0.75).window(ttft_s=5.0, tpot_s=0.5, busy=0.95) == 0.25


def test_prompts_that_wait_and_are_late_already_count_too():
    """An order that serves the late last tells first tokens in time only."""
    story = Story(0.25)
    for late in (20, 40, 60):
        share = story.window(ttft_s=0.3, tpot_s=0.004, busy=0.95, late=late)
    assert share > 0.25


def test_what_counts_is_what_came_under_the_share_in_force():
    """Requests that had slow tokens before a move end after it: they do not cause another one."""
    story = Story(0.75)
    assert story.window(tpot_s=0.034, ttft_s=0.05) == 0.5
    moved_s = story.now
    for _ in range(50):
        story.gate.ended(Ended(500, 0.1, 0.2, first_s=moved_s - 5.0), moved_s + 1.0)
    assert story.window(tpot_s=0.020) == 0.5


def test_a_step_that_had_to_be_taken_back_is_tried_again_later_and_later():
    """On a device where decode needs more than the model's scale says, the share does not swing to and fro."""
    story = Story(0.25)
    for _ in range(60):
        on_half = story.gate.shares["P"] >= 0.5
        story.window(ttft_s=0.1 if on_half else 1.0, tpot_s=0.027 if on_half else 0.010, busy=0.8)
    assert story.gate.moves <= 12


def test_only_the_scale_is_predicted_so_an_error_common_to_all_shares_does_no_harm():
    for error in (0.5, 1.0, 2.0):
        assert Story(0.5, error=error).window(tpot_s=0.030) == 0.25


def test_an_slo_on_every_gap_is_held_against_the_longest_steps():
    slo = Slo(0.5, 0.011, Metric.GAP)
    step_s = MACHINE.division(0.5).decode.seconds(STEP) * 1.2
    assert step_s > slo.tpot_s
    assert Story(0.5, slo).window(tpot_s=0.001) == 0.25, "the mean does not matter"
    assert Story(0.5, Slo(0.5, 0.05, Metric.GAP)).window(tpot_s=1.0) == 0.5


def test_slices_are_sized_for_the_part_they_run_on():
    gate = SemiPdGate(LIMITS, SLO, Belief(MACHINE), 0.5)
    beside = gate.allow(load(lane="P", prompts=[(4000, 0.4)], busy=True))
    alone = gate.allow(load(lane="P", rows=0, prompts=[(4000, 0.4)]))
    assert beside.costs == MACHINE.division(0.5).prefill and alone.costs is MACHINE.whole
    assert beside.seconds * 1.2 == pytest.approx(alone.seconds) == pytest.approx(LIMITS.slice_seconds)


@pytest.mark.parametrize(("share", "metric"), [(0.25, Metric.TPOT), (0.25, Metric.GAP), (0.75, Metric.GAP)])
def test_from_a_share_that_misses_the_slo_and_with_a_wrong_belief_it_comes_to_hold_it(share, metric):
    """On a device 1.3 times as slow as believed half of it is right."""
    slo, attained, gates = Slo(0.5, 0.025, metric), {}, {}
    for name in ("static", "semi-pd"):
        shares = {"P": share, "D": 1 - share}
        core = Core(config(mode="semi", gate=name, order="slack", slo=slo, shares=shares))
        run = conversations(Run(core, slower(MACHINE, 1.3), noise=0.02), rate=17, seconds=25)
        settled = [latency for request, latency in run.latencies.items() if run.arrived_s[request] > 15.0]
        attained[name], gates[name] = attainment(settled, slo), core.gate
    assert attained["static"] < 0.7 and attained["semi-pd"] > 0.95
    assert gates["semi-pd"].shares["P"] == 0.5 and gates["semi-pd"].moves <= 2
