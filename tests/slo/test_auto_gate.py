"""Gate "auto" picks the best way to run each step, keeps a step's limit, and spends spare time only where needed."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from simulated import LIMITS, MACHINE, Run, config, conversations, load, slower

from tidegate.core.core import Core
from tidegate.slo.auto_gate import AutoGate
from tidegate.slo.belief import Belief
from tidegate.slo.gate import Observation, Pressing, TimedRoom
from tidegate.slo.goodput import Metric, Slo, attainment
from tidegate.slo.latency import Costs, LatencyModel, Padding, Work

MEAN, GAP = Slo(0.5, 0.025), Slo(0.5, 0.025, Metric.GAP)
LONG = [(8000, 0.4)]


def slowed(slowdown):
    """MACHINE, but lanes slow each other down by so much."""
    divisions = (replace(d, prefill_slowdown=slowdown, decode_slowdown=slowdown) for d in MACHINE.divisions)
    return LatencyModel(MACHINE.whole, tuple(divisions))


def chunk(gate, loaded):
    """Prompt tokens of the hybrid step that the gate allows."""
    allowance = gate.allow(loaded)
    if allowance.costs is None:
        return 0
    room = TimedRoom(allowance, loaded.decode, LIMITS.slice_quantum_tokens)
    first = loaded.prompts[0]
    return room.tokens(first.start, min(first.remaining, allowance.tokens - loaded.decode.rows))


# ---- the choice


def test_without_prompts_decode_runs_alone():
    gate = AutoGate(LIMITS, MEAN, Belief(MACHINE))
    assert chunk(gate, load()) == 0 and gate.choices == {"decode": 1}


def test_without_decodes_prefill_has_the_whole_device_for_a_slice():
    gate = AutoGate(LIMITS, MEAN, Belief(MACHINE))
    allowance = gate.allow(load(rows=0, prompts=LONG))
    assert gate.choices == {"prefill": 1}
    assert allowance.costs is MACHINE.whole and allowance.seconds == LIMITS.slice_seconds


def test_where_lanes_slow_each_other_down_much_the_step_is_hybrid():
    gate = AutoGate(LIMITS, MEAN, Belief(slowed(3.0)))
    assert chunk(gate, load(prompts=LONG)) > 0
    assert gate.choices == {"hybrid": 1}


def test_where_lanes_hardly_disturb_each_other_and_steps_are_short_they_run_beside_each_other():
    """In 12 ms a hybrid step has room for little besides its decodes; three quarters of the device do for these, and
    the rest prefills faster."""
    gate = AutoGate(LIMITS, replace(MEAN, tpot_s=0.0119), Belief(slowed(1.0)))
    loaded = load(rows=240, context=500, prompts=LONG)
    assert chunk(gate, loaded) == 0
    assert gate.choices == {"decode beside prefill": 1}
    beside = gate.allow(loaded._replace(lane="P", other_busy=True))
    division = MACHINE.division(gate.shares["P"])
    assert beside.costs == division.prefill and beside.tokens > 0


def test_back_to_hybrid_steps_the_share_stays_what_the_slice_in_flight_has():
    """Decode would otherwise move to another part for the few steps until that slice is done."""
    gate = AutoGate(LIMITS, replace(MEAN, tpot_s=0.0119), Belief(slowed(1.0)))
    gate.allow(load(rows=240, context=500, prompts=LONG))
    beside = gate.shares
    assert gate.moves == 1 and beside != {"P": 0.5, "D": 0.5}
    gate.allow(load(rows=8, context=500, prompts=[(48, 0.4)], busy=True))
    assert gate.moves == 2 and gate.shares == beside


def test_prefill_that_ends_with_the_next_hybrid_step_is_not_moved_to_a_lane_of_its_own():
    gate = AutoGate(LIMITS, replace(MEAN, tpot_s=0.0125), Belief(slowed(1.0)))
    assert chunk(gate, load(rows=240, context=500, prompts=[(48, 0.4)])) == 48


HALVES = next(division for division in slowed(1.0).divisions if division.share == 0.5)


def test_decode_that_is_too_slow_beside_prefill_is_made_up_for_by_decode_alone():
    """Alone a step takes 17 ms, beside prefill 22, and the mean may be 20: slices wait until enough has been saved."""
    slo, model = replace(MEAN, tpot_s=0.02 / AutoGate.MARGIN), LatencyModel(MACHINE.whole, (HALVES,))
    gate, loaded = AutoGate(LIMITS, slo, Belief(model)), load(rows=200, context=1500, prompts=LONG)
    alone, beside = MACHINE.whole.seconds(loaded.decode), HALVES.decode.seconds(loaded.decode)
    assert alone < 0.02 < beside
    seconds = []
    for _ in range(300):
        assert chunk(gate, loaded) == 0
        sliced = gate.allow(loaded._replace(lane="P", other_busy=True)).tokens > 0
        seconds.append(beside if sliced else alone)
        gate.observe(Observation("D", 1.0, sliced, loaded.decode, seconds[-1]))
    assert gate.moves == 1 and set(seconds) == {alone, beside}
    assert sum(seconds) / 300 == pytest.approx(0.02, rel=0.02)
    every_gap = AutoGate(LIMITS, replace(slo, metric=Metric.GAP), Belief(model))
    assert chunk(every_gap, loaded) > 0, "no gap may be longer"


def test_where_prompts_wait_nearly_all_the_time_decodes_count_as_work_beside_prefill_too():
    """Beside prefill decode is as fast as alone here, and prefill half as fast. What counts is how soon prompts are
    done, but where more and more would wait, all that is done."""
    model = LatencyModel(MACHINE.whole, (replace(HALVES, decode=MACHINE.whole),))
    for wait_s, beside in ((0.5, False), (1.0, True)):
        gate = AutoGate(LIMITS, MEAN, Belief(model))
        for second in range(20):
            gate.allow(load(now=float(second), prompts=[(48, 0.5)]))
            if wait_s < 1.0:
                gate.allow(load(now=second + wait_s))
        assert (chunk(gate, load(rows=200, context=500, prompts=LONG, now=20.0)) == 0) == beside


def test_prompts_do_not_get_on_faster_at_the_price_of_less_work():
    """A step of 512 has room for 64 prompt tokens beside 448 decodes, and one of 1,024 would take too long. Beside
    decode prefill gets on four times as fast, but decode takes 1.6 times as long."""
    whole = Costs((512, 1024), (0.011, 0.023), 0.0, 0.0, 2e-8, Padding((512, 1024), 16))
    loaded = load(rows=448, context=400, prompts=LONG)
    for decode_slowdown, beside in ((1.6, False), (1.1, True)):
        division = replace(HALVES, prefill=whole, decode=whole, prefill_slowdown=2.5, decode_slowdown=decode_slowdown)
        gate = AutoGate(LIMITS, MEAN, Belief(LatencyModel(whole, (division,))))
        prompts = division.prefill_rate(0, LIMITS.most_prompt_tokens, LIMITS.slice_seconds, 1.0)
        assert prompts > 4 * 64 / whole.seconds(loaded.decode.and_slice(0, 64))
        assert (chunk(gate, loaded) == 0) == beside


def test_while_prefill_has_a_batch_in_flight_decode_goes_on_beside_it():
    gate = AutoGate(LIMITS, MEAN, Belief(slowed(3.0)))
    assert chunk(gate, load(prompts=LONG, busy=True)) == 0


# ---- the limit


loads = st.builds(
    load,
    rows=st.integers(1, 256),
    context=st.integers(1, 4000),
    prompts=st.lists(st.tuples(st.integers(1, 8000), st.floats(-0.2, 0.5)), min_size=1, max_size=4),
)


@given(loads, st.sampled_from([MEAN, GAP]), st.floats(0.7, 1.5))
def test_no_chunk_is_predicted_to_exceed_the_limit_unless_it_is_the_least(loaded, slo, error):
    gate = AutoGate(LIMITS, slo, Belief(slowed(3.0)))
    for _ in range(80):
        step = Work(rows=32, context=32_000)
        gate.observe(Observation("D", 1.0, False, step, error * MACHINE.whole.seconds(step)))
    tokens = chunk(gate, loaded)
    if tokens > LIMITS.min_slice_tokens:
        step = loaded.decode.and_slice(0, tokens)
        assert MACHINE.whole.seconds(step) * gate.belief.factor("hybrid") <= slo.tpot_s * 1.0001


def test_however_late_decode_is_prefill_goes_on_with_the_least_chunk():
    gate = AutoGate(LIMITS, replace(MEAN, tpot_s=0.001), Belief(slowed(3.0)))
    assert chunk(gate, load(prompts=LONG)) == LIMITS.min_slice_tokens


def test_near_equal_options_do_not_make_it_flap():
    """Whatever slowdown makes both ways about as good, small changes of the load do not change the way."""
    for slowdown in (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5):
        gate = AutoGate(LIMITS, MEAN, Belief(slowed(slowdown)))
        for step in range(200):
            gate.allow(load(rows=100 + step % 3, context=1000 + 10 * (step % 7), prompts=LONG))
        assert gate.moves <= 2, slowdown


PADDING = Padding((256, 512, 640, 768, 1024), rows=16)
PADDED = LatencyModel(Costs(PADDING.tokens, (0.008, 0.0115, 0.0149, 0.0173, 0.0212), 0.0, 0.0, 0.0, PADDING))


@pytest.mark.parametrize("slo", [MEAN, GAP])
def test_of_padded_sizes_that_keep_the_slo_the_one_with_which_most_work_is_done_is_taken(slo):
    """512 tokens fill this device better than 768, though these hold more of prompts: decode is work, too."""
    for rows in (16, 96):
        gate = AutoGate(LIMITS, replace(slo, tpot_s=0.02), Belief(PADDED))
        assert chunk(gate, load(rows=rows, prompts=LONG)) == 512 - rows


def test_where_no_padded_size_keeps_the_mean_the_one_that_fills_the_device_best_takes_turns_with_decode_alone():
    """Decode alone takes 8 ms, and 512 tokens fill this device better than 256."""
    gate = AutoGate(LIMITS, replace(MEAN, tpot_s=0.0085), Belief(PADDED))
    taken, seconds = [], []
    for _ in range(200):
        loaded = load(rows=250, context=1000, prompts=LONG)
        taken.append(chunk(gate, loaded))
        step = loaded.decode.and_slice(0, taken[-1])
        seconds.append(PADDED.whole.seconds(step))
        gate.observe(Observation("D", 1.0, False, step, seconds[-1]))
    assert set(taken) == {0, 512 - 256}
    assert sum(seconds) / 200 == pytest.approx(0.0085 * AutoGate.MARGIN, rel=0.02)


def test_where_the_least_chunk_takes_too_long_steps_without_one_make_up_for_it():
    """Decode alone takes 8 ms, with the least chunk 20 ms, and the mean may be 14 ms: every other step has one."""
    whole = Costs((32, 64, 4096), (0.006, 0.018, 0.8), 0.0, 0.0, 1e-7)
    gate = AutoGate(LIMITS, replace(MEAN, tpot_s=0.014 / AutoGate.MARGIN), Belief(LatencyModel(whole)))
    taken = []
    for _ in range(200):
        loaded = load(rows=20, context=1000, prompts=LONG)
        taken.append(chunk(gate, loaded))
        step = loaded.decode.and_slice(0, taken[-1])
        gate.observe(Observation("D", 1.0, False, step, whole.seconds(step)))
    assert set(taken) == {0, LIMITS.min_slice_tokens}
    alone, least = whole.seconds(loaded.decode), whole.seconds(loaded.decode.and_slice(0, LIMITS.min_slice_tokens))
    part = (0.014 - alone) / (least - alone)
    assert taken.count(0) == pytest.approx(200 * (1 - part), rel=0.1)


def test_prefill_goes_on_also_where_a_step_with_the_least_chunk_is_longer_than_short_ones_can_make_up_for():
    whole = Costs((32, 64, 4096), (0.006, 0.5, 9.0), 0.0, 0.0, 1e-7)
    gate = AutoGate(LIMITS, MEAN, Belief(LatencyModel(whole)))
    taken = []
    for _ in range(100):
        loaded = load(rows=20, context=1000, prompts=LONG)
        taken.append(chunk(gate, loaded))
        step = loaded.decode.and_slice(0, taken[-1])
        gate.observe(Observation("D", 1.0, False, step, whole.seconds(step)))
    assert 0 in taken and LIMITS.min_slice_tokens in taken


# ---- spare time


def limit(gate, loaded):
    """Seconds that the hybrid step may take."""
    return gate.allow(loaded).seconds * gate.belief.factor("hybrid")


BASE = MEAN.tpot_s * AutoGate.MARGIN


def test_spare_time_is_left_alone_while_prompts_are_in_time_without_it():
    gate = AutoGate(LIMITS, MEAN, Belief(slowed(3.0)))
    assert limit(gate, load(prompts=[(2000, 0.5)], spares_s=[0.15, 0.15])) == pytest.approx(BASE)


def test_of_much_spare_time_a_small_part_a_step_is_spent_unasked():
    """Others may come, who will need what is prefilled now to be out of their way."""
    gate = AutoGate(LIMITS, MEAN, Belief(slowed(3.0)))
    given_s = limit(gate, load(prompts=[(2000, 0.5)], spares_s=[0.3, 0.3]))
    assert BASE < given_s == pytest.approx(0.3 / AutoGate.BANKED)
    most = limit(gate, load(prompts=[(2000, 0.5)], spares_s=[9.0, 9.0]))
    assert most == pytest.approx(AutoGate.LONGEST * BASE)


def test_where_prompts_wait_nearly_all_the_time_no_spare_time_is_spent():
    """What is put off comes back soon, as more that decode at once."""
    for wait_s, spent in ((0.7, True), (0.95, False)):
        gate = AutoGate(LIMITS, MEAN, Belief(slowed(3.0)))
        for second in range(20):
            gate.allow(load(now=float(second), prompts=[(2000, 0.5)]))
            gate.allow(load(now=second + wait_s))
        given_s = limit(gate, load(now=20.0, prompts=[(2000, 0.5)], spares_s=[9.0, 9.0]))
        assert (given_s > BASE * 1.01) == spent


def test_spare_time_is_left_alone_where_it_would_save_nobody():
    gate = AutoGate(LIMITS, MEAN, Belief(slowed(3.0)))
    assert limit(gate, load(prompts=[(8000, 0.05)], spares_s=[0.06, 0.06])) == pytest.approx(BASE)


@example(0.12295086531903011, 6067, 0.25)  # where also a part is spent unasked
@given(st.floats(0.1, 0.5), st.integers(1000, 8000), st.floats(0.03, 0.4))
def test_no_more_spare_time_is_spent_than_a_prompt_needs_and_than_there_is(left_s, tokens, spare_s):
    """But for the part that is spent unasked. With what was taken the prompt is just in time, should steps take as long
    as nine of ten do at most."""
    belief = Belief(slowed(3.0))
    gate, loaded = AutoGate(LIMITS, MEAN, belief), load(prompts=[(tokens, left_s)], spares_s=[spare_s] * 2)
    given_s = limit(gate, loaded)
    longer = belief.guard("hybrid", AutoGate.LIKELY)
    unasked_s, at_hand_s = max(BASE, spare_s / AutoGate.BANKED), spare_s * AutoGate.MARGIN / longer
    assert given_s <= max(unasked_s, at_hand_s) * 1.001
    if unasked_s * 1.001 < given_s < at_hand_s * 0.999:
        pace = gate.outlook("D", alone=False)._replace(credit_s=given_s - BASE)
        likely_s = pace.work_s(0, tokens) * longer
        assert pace.after_s(likely_s) == pytest.approx(max(left_s, likely_s))


def test_the_less_sure_predictions_are_the_earlier_spare_time_is_spent_on_a_prompt():
    belief, loaded = Belief(slowed(3.0)), load(prompts=[(4000, 0.095)], spares_s=[0.15, 0.15])
    assert limit(AutoGate(LIMITS, MEAN, belief), loaded) == pytest.approx(BASE)
    unsettle(belief, loaded)
    assert limit(AutoGate(LIMITS, MEAN, belief), loaded) > 1.1 * BASE


def test_the_less_sure_predictions_are_the_less_is_taken_of_what_a_request_can_spare():
    """All of it is wanted, and the step that takes it may take as long as nine of ten do at most."""
    belief, loaded = Belief(slowed(3.0)), load(prompts=[(4000, 0.095)], spares_s=[0.07, 0.07])
    unsettle(belief, loaded)
    longer = belief.guard("hybrid", AutoGate.LIKELY)
    assert longer > 1.3
    given_s = limit(AutoGate(LIMITS, MEAN, belief), loaded)
    assert given_s == pytest.approx(0.07 * AutoGate.MARGIN / longer)


def unsettle(belief, loaded):
    """Hybrid steps take 0.6 and 1.4 times what is believed, in turns."""
    work = loaded.decode.and_slice(0, 512)
    for i in range(500):
        belief.observe(Observation("D", 1.0, False, work, (1.4, 0.6)[i % 2] * belief.model.whole.seconds(work)))


def test_one_request_is_given_up_only_for_two_prompts_or_more():
    """The first spares nothing, the others much: taking what those can spare costs the first its SLO."""
    spares = [0.025, 0.4, 0.4]
    one = load(rows=64, context=5000, prompts=[(4000, 0.1)])
    two = load(rows=64, context=5000, prompts=[(4000, 0.1), (4000, 0.18)])
    assert limit(AutoGate(LIMITS, MEAN, Belief(slowed(3.0))), one._replace(spares_s=spares)) == pytest.approx(BASE)
    assert limit(AutoGate(LIMITS, MEAN, Belief(slowed(3.0))), two._replace(spares_s=spares)) > 1.5 * BASE


@pytest.mark.parametrize("start", [0, 3000])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_prompts_are_taken_to_get_on_as_fast_as_the_step_that_is_chosen_does(start, factor):
    """Also where attention is a large part: of many tokens at once it is more for each than of a step's few."""
    belief = Belief(LatencyModel(replace(slowed(3.0).whole, pair_s=2e-8)))
    loaded = load()._replace(prompts=[Pressing(start, 2000, 9.0)])
    for _ in range(200):
        for work in (Work().and_slice(start, 512), loaded.decode.and_slice(start, 512)):
            belief.observe(Observation("D", 1.0, False, work, factor * belief.model.whole.seconds(work)))
    gate = AutoGate(LIMITS, MEAN, belief)
    tokens = chunk(gate, loaded)
    step_s = factor * belief.model.whole.seconds(loaded.decode.and_slice(start, tokens))
    outlook = gate.outlook("D", alone=False)
    assert outlook.after_s(outlook.work_s(start, tokens)) == pytest.approx(step_s, rel=0.02)


# ---- served


@pytest.mark.parametrize("slo", [MEAN, GAP])
def test_a_device_slower_than_believed_keeps_the_slo_all_the_same(slo):
    core = Core(config(mode="auto", order="slack", slo=slo))
    run = conversations(Run(core, slower(MACHINE, 1.3), noise=0.02), rate=20, seconds=8)
    assert attainment(run.latencies.values(), slo) > 0.9


def test_a_decoding_request_with_a_tighter_limit_of_its_own_is_heeded_unless_it_can_not_be_kept():
    def given(*own):
        return limit(AutoGate(LIMITS, GAP, Belief(slowed(3.0))), load(prompts=LONG)._replace(own_tpots_s=own))

    alone = MACHINE.whole.seconds(load().decode)
    assert given(0.4 * GAP.tpot_s + alone / 2) < given() == given(0.5 * alone) == given(2 * GAP.tpot_s)
    assert given(0.5 * alone, 0.015) == given(0.015), "a hopeless one does not hide the next"
