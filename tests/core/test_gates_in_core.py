"""Whichever gate decides, requests get the same tokens, and every batch runs on a share that the device has."""

import pytest
from test_core_properties import SLO, VOCAB, build, check_invariants, seconds

from tidegate.base.errors import ConfigError
from tidegate.base.events import Arrived, LaneReady, Launch, ModeSet, Resize, Tuned
from tidegate.base.request import RequestSpec
from tidegate.policy.modes import MODES
from tidegate.sim.device import expected_tokens
from tidegate.sim.driver import Simulation
from tidegate.slo.goodput import Slo

GATES = [(mode.name, gate) for mode in MODES.values() for gate in mode.gates]


def requests(count=60):
    return [RequestSpec(f"r{i}", [(i + j * j) % VOCAB for j in range(3 + i * 7 % 40)], 2 + i % 9) for i in range(count)]


@pytest.mark.parametrize("order", ["arrival", "slack"])
@pytest.mark.parametrize(("mode", "gate"), GATES)
def test_requests_get_the_same_tokens_and_batches_shares_that_there_are(mode, gate, order):
    core, device = build(mode, gate=gate, order=order)
    simulation = Simulation(core, device, seconds, ending=0.9)
    for i, spec in enumerate(requests()):
        simulation.at(0.03 * i, Arrived(spec))
    simulation.run(observe=lambda: check_invariants(core))
    for spec in requests():
        assert [t for o in simulation.outputs[spec.id] for t in o.tokens] == expected_tokens(spec, VOCAB)
    actions = [action for _, _, actions in simulation.log for action in actions]
    asked = {1.0, *core.shares.values(), *(s for a in actions if isinstance(a, Resize) for s in a.shares.values())}
    assert {a.batch.share for a in actions if isinstance(a, Launch)} <= asked


def test_lanes_that_take_turns_never_run_at_once_and_every_request_ends():
    core, device = build("semi", gate="drift", slo=Slo(1.0, 0.5))
    core.gate._rate_beside = lambda division, start: 0.0
    simulation = Simulation(core, device, seconds, ending=0.9)
    for i, spec in enumerate(requests()):
        simulation.at(0.03 * i, Arrived(spec))
    turns = []

    def observe():
        check_invariants(core)
        flying = {name for name, lane in core.lanes.items() if lane.flights}
        turns.append(len(flying) <= 1 if core.gate.by_turns else None)

    simulation.run(observe=observe)
    began = turns.index(True)
    assert all(turn is not False for turn in turns[began:]) and turns.count(True) > 100
    for spec in requests():
        assert [t for o in simulation.outputs[spec.id] for t in o.tokens] == expected_tokens(spec, VOCAB)


@pytest.mark.parametrize("gate", ["semi-pd", "drift"])
def test_a_gate_can_be_changed_while_serving_and_begins_at_the_share_asked_for(gate):
    core, _ = build("semi", shares={"P": 0.75, "D": 0.25})
    for lane in ("P", "D"):
        core.on_event(LaneReady(lane), 0.0)
    core.on_event(Tuned(gate=gate), 0.1)
    assert core.stats().gate == gate and core.gate.shares["P"] == 0.75
    with pytest.raises(ConfigError, match="not auto"):
        core.on_event(Tuned(gate="auto"), 0.2)


def test_settings_are_held_to_the_mode_in_force_or_to_come_and_a_gate_is_kept_for_its_mode():
    core, _ = build("auto")
    for lane in ("P", "D"):
        core.on_event(LaneReady(lane), 0.0)
    with pytest.raises(ConfigError, match="mode auto knows --gate auto, not drift"):
        core.on_event(Tuned(gate="drift"), 0.1)
    core.on_event(ModeSet("semi"), 0.2)
    core.on_event(Tuned(gate="drift"), 0.3)
    assert core.stats().gate == "drift"
    core.on_event(ModeSet("auto"), 0.4)
    core.on_event(Tuned(tpot_s=0.03), 0.5)
    assert core.stats().gate == "auto"
    core.on_event(ModeSet("semi"), 0.6)
    assert core.stats().gate == "drift"


def test_settings_given_while_a_mode_waits_for_its_lane_are_for_that_mode():
    core, _ = build("chunked")
    core.on_event(LaneReady("D"), 0.0)
    core.on_event(ModeSet("semi"), 0.1)
    core.on_event(Tuned(gate="drift"), 0.2)
    assert core.stats().mode == "chunked"
    core.on_event(LaneReady("P"), 0.3)
    assert core.stats().mode == "semi" and core.stats().gate == "drift"


@pytest.mark.parametrize("gate", ["semi-pd", "drift"])
@pytest.mark.parametrize("missing", ["slo", "latency"])
def test_a_gate_that_lacks_what_it_decides_by_says_so(gate, missing):
    given = {"slo": SLO} | {missing: None}
    with pytest.raises(ConfigError, match="SLO" if missing == "slo" else "latency model"):
        build("semi", gate=gate, **given)


def test_settings_that_do_not_go_together_leave_everything_as_it_was():
    core, _ = build("semi", slo=None, order="shortest")
    core.on_event(LaneReady("P"), 0.0)
    before = core.config, core.gate
    with pytest.raises(ConfigError, match="needs an SLO"):
        core.on_event(Tuned(gate="drift", order="arrival", max_num_batched_tokens=5), 0.1)
    assert (core.config, core.gate) == before
    core.on_event(Tuned(max_num_batched_tokens=5), 0.2)
    assert core.config.max_num_batched_tokens == 5 and core.config.order == "shortest"
