"""Requests that have missed their SLO yield in batches with prompts that have not, and never starve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_core_properties import VOCAB, build, check_invariants, seconds

from tidegate.base.events import Arrived
from tidegate.base.request import RequestSpec
from tidegate.policy.late_decodes import LONGEST, yielding
from tidegate.sim.device import expected_tokens
from tidegate.sim.driver import Simulation
from tidegate.slo.goodput import Slo
from tidegate.slo.latency import rough

TPOT = 0.1


class Prompt:
    def __init__(self, late=False, priority=0):
        self.late, self.priority = late, priority


class Decode:
    def __init__(self, missed, priority=0, decoded_s=0.0):
        self.missed, self.priority, self.decoded_s = missed, priority, decoded_s
        self.id = str(id(self))


def test_who_has_missed_its_slo_waits_for_prompts_that_can_be_in_time():
    good, missed = Decode(False), Decode(True)
    assert yielding([missed, good], [Prompt()], 0.1, TPOT) == [good]
    assert yielding([missed, good], [Prompt(late=True), Prompt()], 0.1, TPOT) == [good]


def test_nobody_waits_for_prompts_that_are_late_too_or_for_none():
    ready = [Decode(True), Decode(False)]
    assert yielding(ready, [Prompt(late=True)], 0.1, TPOT) == ready
    assert yielding(ready, [], 0.1, TPOT) == ready


def test_where_nobody_else_decodes_it_does():
    ready = [Decode(True), Decode(True)]
    assert yielding(ready, [Prompt()], 0.1, TPOT) == ready


@pytest.mark.parametrize(("priority", "yields"), [(-1, False), (0, True), (1, True)])
def test_it_waits_for_its_own_class_and_more_urgent_ones(priority, yields):
    good, missed = Decode(False), Decode(True, priority)
    assert yielding([missed, good], [Prompt(priority=0)], 0.1, TPOT) == ([good] if yields else [missed, good])


@given(st.lists(st.floats(0.01, 0.3), min_size=50, max_size=200), st.integers(1, 9))
def test_it_gets_a_token_at_least_every_few_tpots(steps, rows):
    ready = [Decode(True) for _ in range(rows)] + [Decode(False)]
    last, now = dict.fromkeys(ready[:-1], 0.0), 0.0
    for step in steps:
        now += step
        chosen = yielding(ready, [Prompt()], now, TPOT)
        assert ready[-1] in chosen
        for request in ready[:-1]:
            if request in chosen:
                last[request] = now
            assert now - last[request] < LONGEST * TPOT


@pytest.mark.parametrize("mode", ["chunked", "auto"])
def test_in_a_core_that_is_asked_too_much_late_ones_yield_and_all_end_with_their_tokens(mode):
    core, device = build(mode, order="slack", slo=Slo(0.2, 0.05), latency=rough(300.0), max_num_seqs=16, num_blocks=300)
    simulation = Simulation(core, device, seconds, ending=0.9)
    specs = [RequestSpec(f"r{i}", [(i + j) % VOCAB for j in range(4 + 25 * (i % 3 == 0))], 30) for i in range(60)]
    for i, spec in enumerate(specs):
        simulation.at(0.03 * i, Arrived(spec))
    batches = {}  # who decodes in each that has prompts, too

    def observe():
        check_invariants(core)
        for lane in core.lanes.values():
            batches.update({f.batch_id: {r.id for r in f.decodes} for f in lane.flights if f.decodes and f.prefills})

    simulation.run(observe=observe)
    rows = list(batches.values())
    left_out = [(a & c) - b for a, b, c in zip(rows, rows[1:], rows[2:], strict=False)]
    assert any(left_out)
    for spec in specs:
        assert [t for o in simulation.outputs[spec.id] for t in o.tokens] == expected_tokens(spec, VOCAB)
