"""A simulated engine: repeatable, and right where the answer can be worked out by hand."""

from typing import NamedTuple

import pytest
from small import MODEL, Asked, constant, engine

from tidegate.policy.modes import MODES
from tidegate.sim.engine import Host
from tidegate.sim.fleet import ROUTERS, serve
from tidegate.sim.outcome import outcome
from tidegate.slo.goodput import Metric, Slo
from tidegate.slo.latency import rough

STEP_S = 0.01


class Timed(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int


def load(count=60, gap_s=0.02):
    return [Timed(i * gap_s * (1 + i % 3), 10 + 37 * i % 140, 1 + 29 * i % 90) for i in range(count)]


@pytest.mark.parametrize("mode", sorted(MODES))
def test_the_same_seed_gives_the_same_result_and_another_seed_another(mode):
    def told(seed):
        simulated = engine(mode, host=Host(), noise=0.1, seed=seed)
        serve(load(), [simulated])
        return list(simulated.records)

    assert told(1) == told(1)
    assert told(1) != told(2)


def test_latencies_add_up_from_batches_and_the_hosts_work():
    simulated = engine(truth=constant(STEP_S), host=Host(launch_s=0.002, lead_s=0.004, deliver_s=0.005))
    simulated.submit(Asked(20, 5), 1.0)
    simulated.advance()
    (served,) = simulated.records
    assert (served.arrived_s, served.prompt_tokens, served.output_tokens) == (1.0, 20, 5)
    assert served.latency.ttft_s == pytest.approx(0.002 + STEP_S + 0.005)
    assert served.latency.tpot_s == pytest.approx(STEP_S), "a batch launched ahead starts when the one before ends"
    assert simulated.readings.seconds == pytest.approx(1.0 + 0.002 + 5 * STEP_S)


def test_without_a_warning_of_the_end_each_step_waits_for_its_launch():
    simulated = engine(truth=constant(STEP_S), host=Host(launch_s=0.002, lead_s=0.0, deliver_s=0.0))
    simulated.submit(Asked(20, 5), 0.0)
    simulated.advance()
    (served,) = simulated.records
    assert served.latency.tpot_s == pytest.approx(STEP_S + 0.002)


def test_a_lane_that_only_decodes_does_not_judge_which_prompts_are_late():
    """At a tenth of the device, which decode has, a prompt that waits would be late; at prefill's nine it is not."""
    simulated = engine("semi", shares={"P": 0.9, "D": 0.1}, order="slack", gate="static", prefill_tokens_per_s=4000.0)
    simulated.submit(Asked(20, 300), 0.0)
    for _ in range(3):
        simulated.submit(Asked(180, 1), 0.2)
    steps = simulated.core.stats().lanes["D"].batches
    simulated.advance(0.24)
    stats = simulated.core.stats()
    assert stats.lanes["D"].batches > steps and stats.waiting + stats.prefilling > 1
    assert stats.late == 0


def test_a_request_that_can_never_fit_has_failed_and_counts_against_attainment():
    simulated = engine(truth=constant(STEP_S))
    simulated.submit(Asked(300, 200), 0.0)
    simulated.submit(Asked(20, 5), 0.0)
    simulated.advance()
    found = outcome([simulated], Slo(1.0, 1.0))
    assert (found.requests, found.failed, found.attainment) == (2, 1, 0.5)


def test_two_lanes_that_slow_each_other_down_are_counted_as_beside():
    simulated = engine("semi")
    serve(load(), [simulated])
    readings = simulated.readings
    assert 0 < readings.beside_s < min(readings.busy_s.values()) <= max(readings.busy_s.values()) <= readings.seconds


def test_time_is_told_by_what_ran_and_adds_up_to_the_time_in_which_anything_did():
    apart, fused = engine("semi"), engine("chunked")
    for simulated in (apart, fused):
        serve(load(), [simulated])
        readings = simulated.readings
        assert sum(readings.spent_s.values()) == pytest.approx(sum(readings.busy_s.values()) - readings.beside_s)
        assert sum(outcome([simulated], Slo(1.0, 1.0)).spent.values()) == pytest.approx(1.0)
    assert {"decode", "prefill", "side by side"} == set(apart.readings.spent_s)
    assert {"decode", "prefill", "hybrid"} == set(fused.readings.spent_s)


def test_an_engine_counts_the_time_of_batches_launched_beside_the_other_lanes():
    apart, fused = engine("semi"), engine("chunked")
    for simulated in (apart, fused):
        serve(load(), [simulated])
    lanes = apart.core.stats().lanes
    assert all(0 < lane.beside_seconds <= lane.busy_seconds for lane in lanes.values())
    assert lanes["D"].beside_seconds == pytest.approx(apart.readings.beside_s, rel=0.2)
    assert all(lane.beside_seconds == 0 for lane in fused.core.stats().lanes.values())


def test_belief_is_not_truth():
    """The same device: a gate that knows it keeps the SLO, one that takes it to be fifty times as fast does not."""
    sizes = {"max_num_batched_tokens": 2048, "max_model_len": 4000, "num_blocks": 4000}
    slo = Slo(0.2, 0.03, Metric.GAP)

    def attained(belief):
        simulated = engine("auto", latency=belief, slo=slo, **sizes)
        serve([Timed(0.0, 10, 400), *(Timed(0.1 * i, 1500, 5) for i in range(1, 21))], [simulated])
        return outcome([simulated], slo).attainment

    assert attained(MODEL) == 1.0
    assert attained(rough(1e6)) < 0.5


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_a_fleet_serves_every_request_once(router):
    engines = [engine(seed=i) for i in range(4)]
    serve(load(), engines, router)
    served = sorted((s.arrived_s, s.prompt_tokens, s.output_tokens) for e in engines for s in e.records)
    assert served == sorted((r.at_s, r.prompt_tokens, r.output_tokens) for r in load())
    assert all(len(e.records) > 0 for e in engines)


def test_the_least_loaded_engine_gets_the_next_request():
    engines = [engine(truth=constant(STEP_S)) for _ in range(2)]
    long, short = Timed(0.0, 10, 200), [Timed(i * 0.1, 10, 2) for i in range(1, 9)]
    serve([long, *short], engines, "least-loaded")
    assert sorted(len(e.records) for e in engines) == [1, 8]
