"""Gate "drift": decode's smallest part that keeps the SLO in the worst case."""

import math

import pytest
from simulated import LIMITS, MACHINE, Run, config, conversations, load, request, slower

from tidegate.base.errors import ConfigError
from tidegate.core.core import Core
from tidegate.slo.belief import Belief
from tidegate.slo.drift_gate import DriftGate
from tidegate.slo.gate import HOST_SECONDS, Allowance, Observation
from tidegate.slo.gates import make_gate
from tidegate.slo.goodput import Metric, Slo, attainment
from tidegate.slo.latency import LatencyModel


def gate(tpot_s, share=0.5, turns=False):
    made = DriftGate(LIMITS, Slo(0.5, tpot_s), Belief(MACHINE), share)
    if not turns:
        made.ADVANTAGE = math.inf
    return made


def worst_s(share, loaded, made):
    division = MACHINE.division(share)
    step = division.decode.seconds(loaded.decode) * division.decode_slowdown
    return step * made.belief.factor("decode beside") * made.belief.guard("decode beside", made.SURE)


def settle(made, loaded):
    for _ in range(50):
        made.allow(loaded)
    return made.shares["P"]


@pytest.mark.parametrize(("tpot_s", "share"), [(0.04, 0.75), (0.02, 0.5), (0.011, 0.25)])
def test_prefill_gets_all_but_the_smallest_part_that_does_for_decode(tpot_s, share):
    made, loaded = gate(tpot_s), load(ready=True)
    assert settle(made, loaded) == share
    assert worst_s(share, loaded, made) <= tpot_s
    assert share == 0.75 or worst_s(share + 0.25, loaded, made) > tpot_s


def test_where_no_part_does_decode_gets_the_largest():
    assert settle(gate(0.001), load(ready=True)) == 0.25


def test_a_decoding_request_with_a_tighter_limit_of_its_own_gets_decode_a_larger_part_while_it_decodes():
    made, loaded = gate(0.04), load(ready=True)
    assert settle(made, loaded._replace(own_tpots_s=[0.02])) == settle(gate(0.02), loaded) == 0.5
    assert settle(made, loaded) == settle(gate(0.04), loaded) == 0.75
    hopeless = 0.5 * MACHINE.whole.seconds(loaded.decode)
    assert settle(made, loaded._replace(own_tpots_s=[hopeless, 0.02])) == 0.5


def test_contention_counts_a_device_that_slows_decode_down_more_gives_it_more():
    loaded = load(ready=True)
    calm, measured = gate(0.02), gate(0.02)
    for _ in range(200):
        step = MACHINE.division(0.5).decode.seconds(loaded.decode)
        measured.belief.observe(Observation("D", 0.5, True, loaded.decode, 1.8 * step))
    assert settle(calm, loaded) == 0.5 and settle(measured, loaded) == 0.25


def test_decode_gets_more_at_once_and_less_only_after_a_while():
    made = gate(0.02)
    light, heavy = load(rows=8, ready=True), load(rows=250, context=4000, ready=True)
    settle(made, light)
    before = made.shares["P"]
    made.allow(heavy)
    assert made.shares["P"] < before
    for _ in range(made.PATIENCE - 1):
        made.allow(light)
    assert made.shares["P"] < before
    made.allow(light)
    assert made.shares["P"] == before


def test_a_load_at_the_border_of_two_parts_does_not_make_it_flap():
    made = gate(0.02)
    loads = [load(rows=64, context=1000 + 60 * i, ready=True) for i in range(80)]
    border = next(one for one in loads if worst_s(0.5, one, made) > 0.0198)
    rows = border.decode.rows
    for step in range(500):
        context = int(border.decode.context * (0.98 + 0.04 * (step % 5) / 4))
        made.allow(border._replace(decode=border.decode._replace(context=context, rows=rows)))
    assert made.moves <= 2


def test_nothing_moves_while_there_is_no_prefill():
    made = gate(0.04)
    settle(made, load())
    assert made.moves == 0 and made.shares == {"P": 0.5, "D": 0.5}


@pytest.mark.parametrize("rows", [8, 64, 256])
def test_a_slice_takes_about_as_long_as_whole_steps_of_decode(rows):
    made, loaded = gate(0.02), load(rows=rows, ready=True)
    settle(made, loaded)
    division = MACHINE.division(made.shares["P"])
    step = division.decode.seconds(loaded.decode) * division.decode_slowdown
    allowance = made.allow(loaded._replace(lane="P", other_busy=True))
    slice_s = allowance.seconds * division.prefill_slowdown
    assert slice_s / step == pytest.approx(max(1, round(slice_s / step))), "whole steps"
    assert slice_s <= max(step, 1.5 * LIMITS.slice_seconds)
    assert allowance.costs == division.prefill


def test_prefill_alone_has_the_whole_device():
    allowance = gate(0.02).allow(load(lane="P", rows=0, prompts=[(4000, 0.4)]))
    assert allowance.costs is MACHINE.whole and allowance.seconds == LIMITS.slice_seconds


# ---- by turns


def turns_of(tpot_s=0.05, rows=8):
    """A gate that has just launched a decode step by turns, and the loads of both lanes since."""
    made, decode = gate(tpot_s, turns=True), load(rows=rows, prompts=[(8000, 0.4)], ready=True)
    assert made.allow(decode) == Allowance(0) and made.by_turns
    return made, decode, load(lane="P", rows=0, prompts=[(8000, 0.4)], ready=True)


def test_each_lane_waits_for_the_end_of_the_others_batch_and_then_has_the_whole_device():
    made, decode, prefill = turns_of()
    assert made.allow(prefill._replace(other_busy=True, other_ready=False)).tokens == 0, "decode's step still runs"
    assert made.allow(decode._replace(chained=True)).hold, "no second step before the slice"
    slice_ = made.allow(prefill)
    assert slice_.tokens and slice_.costs is MACHINE.whole
    assert made.allow(decode._replace(other_busy=True, other_ready=False)).hold, "the slice still runs"
    assert made.allow(prefill).tokens == 0, "no second slice before the step"
    assert not made.allow(decode).hold


@pytest.mark.parametrize("tpot_s", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("rows", [1, 32])
def test_a_slice_and_a_step_keep_the_slo_together(tpot_s, rows):
    made, decode, prefill = turns_of(tpot_s, rows)
    cycle_s = made.allow(prefill).seconds + MACHINE.whole.seconds(decode.decode)
    assert 0.7 * tpot_s < cycle_s < tpot_s - HOST_SECONDS


def test_a_lane_without_work_is_not_waited_for():
    made, decode, prefill = turns_of()
    nothing_to_decode = prefill._replace(other_ready=False)
    assert made.allow(nothing_to_decode).tokens and made.allow(nothing_to_decode).tokens
    made.allow(decode)
    assert not made.allow(decode._replace(chained=True, other_ready=False)).hold, "no prompt waits"


def test_where_turns_begin_a_slice_beside_decode_is_not_waited_for_and_a_whole_one_is_where_they_end():
    made, decode, prefill = turns_of()
    made, beside = gate(0.05, turns=True), prefill._replace(other_busy=True)
    assert made.allow(beside).tokens and not made.by_turns
    flying = decode._replace(other_busy=True, other_ready=False)
    assert not made.allow(flying).hold and made.by_turns
    assert made.allow(prefill).tokens
    many = flying._replace(decode=load(rows=250, context=8000).decode)
    assert made.allow(many).hold and not made.by_turns


def test_where_a_step_alone_takes_what_the_slo_gives_there_are_no_turns():
    made = gate(0.011, turns=True)
    made.allow(load(rows=250, prompts=[(8000, 0.4)], ready=True))
    assert not made.by_turns


def test_long_prompts_under_a_wide_limit_attain_more_by_turns_than_beside_decode():
    slo, attained = Slo(0.5, 0.05, Metric.GAP), []
    for advantage in (math.inf, DriftGate.ADVANTAGE):
        core = Core(config(mode="semi", gate="drift", order="slack", slo=slo))
        core.gate.ADVANTAGE = advantage
        run = Run(core, noise=0.02)
        for i in range(60):
            run.arrive(0.13 * i, request(i, 2000 + 997 * i % 6000, 40))
        run.until()
        attained.append(attainment(run.latencies.values(), slo))
    assert all(latency.gap_p99_s <= slo.tpot_s for latency in run.latencies.values())
    beside, by_turns = attained
    assert by_turns > beside + 0.05


@pytest.mark.parametrize("metric", list(Metric))
def test_a_device_slower_than_believed_keeps_the_slo_all_the_same(metric):
    slo = Slo(0.5, 0.025, metric)
    core = Core(config(mode="semi", gate="drift", order="slack", slo=slo))
    run = conversations(Run(core, slower(MACHINE, 1.3), noise=0.02), rate=16, seconds=8)
    assert attainment(run.latencies.values(), slo) > 0.9


@pytest.mark.parametrize("name", ["drift", "semi-pd"])
def test_a_device_that_cannot_be_divided_has_no_such_gate(name):
    with pytest.raises(ConfigError, match="can't be divided"):
        make_gate(name, LIMITS, {"P": 0.5, "D": 0.5}, Slo(0.5, 0.02), Belief(LatencyModel(MACHINE.whole)))
