"""Requests through prefill instances, links and decode instances."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.plan.demand import Arrival
from tidegate.plan.engine import HOST
from tidegate.plan.split_sim import SplitDesign, simulate_split
from tidegate.slo.latency import Costs

NOISE_OF_A_STEP = 0.15  # five standard deviations
DESIGN = SplitDesign(
    prefills=1,
    prefill=Costs((1, 4096), (1e-4, 0.4096), 0.0, 0.0, 0.0),
    decodes=1,
    decode=Costs((1, 4096), (0.01, 0.01), 0.0, 0.0, 0.0),
    kv_tokens=10_000,
    max_seqs=8,
    full_batch=2048,
    slice_s=0.2,
    min_slice=16,
    link_s_per_token=0.0,
)


def alone(design, prompt=1000, output=101):
    [latency] = simulate_split(design, 1.0, [Arrival(5.0, prompt, output)], 0)
    return latency


def test_a_lone_request_waits_for_its_prefill_and_then_for_steps_only():
    latency = alone(DESIGN)
    assert latency.ttft_s == pytest.approx(0.1 + HOST.launch_s + HOST.deliver_s, rel=NOISE_OF_A_STEP)
    assert latency.tpot_s == pytest.approx(0.01, rel=0.05)


def test_the_transfer_is_a_gap_after_the_first_token_and_no_part_of_ttft():
    fast, slow = alone(DESIGN, output=2), alone(DESIGN._replace(link_s_per_token=1e-3), output=2)
    assert slow.ttft_s == fast.ttft_s
    assert slow.tpot_s - fast.tpot_s == pytest.approx(1.0, rel=0.01)


def test_a_link_sends_one_prompt_after_the_other():
    both = [Arrival(0.0, 100, 2), Arrival(0.0, 100, 2)]
    first, second = simulate_split(DESIGN._replace(link_s_per_token=1e-2), 10.0, both, 0)
    assert first.tpot_s == pytest.approx(1.0, rel=0.05)
    assert second.tpot_s == pytest.approx(2.0, rel=0.05)


def test_instances_share_the_prompts():
    many = [Arrival(0.0, 2000, 1) for _ in range(4)]
    one = simulate_split(DESIGN, 10.0, many, 0)
    four = simulate_split(DESIGN._replace(prefills=4), 10.0, many, 0)
    assert max(latency.ttft_s for latency in four) < 0.4 * max(latency.ttft_s for latency in one)


def test_a_request_waits_until_there_is_room_for_its_kv():
    two = [Arrival(0.0, 100, 50), Arrival(0.0, 100, 50)]
    roomy, tight = (simulate_split(DESIGN._replace(kv_tokens=tokens), 10.0, two, 0) for tokens in (300, 299))
    assert max(latency.gap_p99_s for latency in roomy) < 0.1
    assert max(latency.gap_p99_s for latency in tight) > 0.45


def test_a_link_with_no_bandwidth_is_an_error():
    with pytest.raises(ValueError, match="no bandwidth"):
        alone(DESIGN._replace(link_s_per_token=float("inf")))


@given(
    st.lists(st.tuples(st.floats(0.0, 0.2), st.integers(1, 3000), st.integers(1, 30)), min_size=1, max_size=25),
    st.integers(1, 3),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_every_request_gets_an_answer_and_none_before_its_prefill_can_be_done(asked, prefills, decodes):
    at_s, arrivals = 0.0, []
    for pause_s, prompt, output in asked:
        at_s += pause_s
        arrivals.append(Arrival(at_s, prompt, output))
    design = DESIGN._replace(prefills=prefills, decodes=decodes, link_s_per_token=1e-5)
    latencies = simulate_split(design, 0.5, arrivals, 3)
    assert latencies == simulate_split(design, 0.5, arrivals, 3)
    for arrival, latency in zip(arrivals, latencies, strict=True):
        assert latency.ttft_s > arrival.prompt_tokens * 1e-4 * (1 - NOISE_OF_A_STEP)
        assert (latency.tpot_s > 0.01 * (1 - NOISE_OF_A_STEP)) == (arrival.output_tokens > 1)
