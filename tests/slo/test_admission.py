"""A request knows when its first token will come; one that would come far too late can be refused at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import LIMITS, Run, config, request

from tidegate.base.events import Arrived
from tidegate.core.core import Core
from tidegate.policy.order import ORDERS, BySlack
from tidegate.slo.admission import UNREACHABLE, expect
from tidegate.slo.goodput import Slo

SLO = Slo(0.5, 0.025)


def started(**more):
    return Run(Core(config(**{"mode": "chunked", "order": "arrival", "slo": SLO} | more)))


# ---- prediction


@pytest.mark.parametrize("mode", ["prefill-first", "chunked", "semi", "auto"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_first_token_of_a_newcomer_comes_about_when_it_was_predicted(mode, order):
    run = started(mode=mode, order=order)
    for i, length in enumerate([300, 2000, 4000, 900, 3000, 150, 5000, 2500]):
        run.arrive(0.0, request(i, length))
    predicted = {}
    for length in (3000, 200):
        predicted[f"new {length}"] = run.core.predicted_ttft_s(length, run.now)
        run.arrive(0.0, request(f"new {length}", length))
    run.until()
    for name, predicted_s in predicted.items():
        assert predicted_s == pytest.approx(run.latencies[name].ttft_s, abs=0.06, rel=0.25), name


@pytest.mark.parametrize("mode", ["prefill-first", "chunked", "auto"])
def test_decodes_that_share_its_batches_are_reckoned_with(mode):
    """Two thirds of each batch are theirs, where a batch has both."""
    run = started(mode=mode, max_num_batched_tokens=300, min_slice_tokens=16)
    for i in range(200):
        run.arrive(0.0, request(f"decoding {i}", 16, max_tokens=1000))
    run.until(1.0)
    run.arrive(run.now, request("ahead", 1500))
    run.until(run.now + 0.03)
    predicted_s = run.core.predicted_ttft_s(1000, run.now)
    run.arrive(run.now, request("new", 1000))
    run.until(run.now + 2.0)
    assert predicted_s == pytest.approx(run.latencies["new"].ttft_s, rel=0.25)


def test_whoever_is_served_before_it_counts_and_nobody_else_does():
    run = started(order="shortest", slo=None)
    own_s = run.core.predicted_ttft_s(1000, 0.0)
    run.arrive(0.0, request("running", 100))
    run.arrive(0.0, request("long", 8000))
    behind_short = run.core.predicted_ttft_s(1000, 0.0)
    assert behind_short < 1.5 * own_s
    assert run.core.predicted_ttft_s(9000, 0.0) > behind_short + run.core.predicted_ttft_s(8000, 0.0) / 2
    assert run.core.predicted_ttft_s(1000, 0.0, priority=1) > 5 * own_s, "a higher number comes after all others"


def test_work_that_is_done_or_in_flight_already_does_not_count_again():
    run = started()
    run.arrive(0.0, request("a", 6000))
    first = run.core.predicted_ttft_s(100, run.now)
    run.until(0.06)
    assert run.core.predicted_ttft_s(100, run.now) < first


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 4000)), min_size=1, max_size=12), st.sampled_from(ORDERS))
def test_asking_changes_nothing(arrivals, order):
    def story(ask):
        run = started(order=order, reject_unreachable=False)
        for i, (time_s, length) in enumerate(sorted(arrivals)):
            run.arrive(time_s, request(i, length, 3))
            for tokens in (1, 10_000) if ask else ():
                run.core.predicted_ttft_s(tokens, run.now)
                run.core.stats()
        run.until()
        return run.times_s

    assert story(ask=True) == story(ask=False)


def test_statistics_tell_the_ttft_of_a_prompt_of_the_usual_length():
    run = started()
    assert run.core.stats().predicted_ttft_s == 0.0
    for i in range(5):
        run.arrive(0.0, request(i, 3000))
    assert run.core.stats().predicted_ttft_s == pytest.approx(run.core.predicted_ttft_s(3000, 0.0))
    run.until()
    assert run.core.stats().predicted_ttft_s == pytest.approx(3000 / 50_000, rel=0.2)


# ---- refusal


def flood(run, count=40, length=2000):
    for i in range(count):
        run.arrive(0.0, request(i, length))
    return run


def refused(run):
    return {name: o[0] for name, o in run.outputs.items() if o[0].finish == "rejected"}


def test_requests_far_too_late_are_refused_and_told_the_wait_and_when_to_come_back():
    run = flood(started(reject_unreachable=True))
    refusals = refused(run)
    assert 0 < len(refusals) < 40
    for output in refusals.values():
        assert "too late for its SLO" in output.reason and output.retry_after_s > 0
    run.until()
    worst = max(latency.ttft_s for latency in run.latencies.values())
    assert SLO.ttft_s < worst < SLO.ttft_s * UNREACHABLE * 1.2, "the others are served, and soon"
    assert run.core.stats().finished["rejected"] == len(refusals)


def test_after_the_time_it_was_told_a_request_is_taken():
    run = flood(started(reject_unreachable=True))
    name, output = list(refused(run).items())[-1]
    slice_s = 0.05  # what is in flight when it is predicted does not count
    run.arrive(output.retry_after_s + slice_s, request(f"{name} again", 2000))
    run.until()
    assert f"{name} again" in run.latencies


def test_without_the_setting_nobody_is_refused_for_being_late():
    run = flood(started()).until()
    assert not refused(run) and len(run.latencies) == 40


def test_without_any_slo_nobody_is_refused_for_being_late():
    assert not refused(flood(started(reject_unreachable=True, slo=None)))


def test_a_request_with_an_slo_of_its_own_is_judged_by_that():
    run = flood(started(reject_unreachable=True), count=10)
    run.arrive(0.0, request("patient", 2000, ttft_s=100.0))
    run.arrive(0.0, request("impatient", 2000, ttft_s=0.01))
    assert set(refused(run)) == {"impatient"}


def test_a_prompt_too_long_for_its_ttft_is_not_refused_for_its_length():
    run = started(reject_unreachable=True, slo=Slo(0.1, 0.025))
    run.arrive(0.0, request("long", 18_000))
    run.until()
    assert run.latencies["long"].ttft_s > 0.1 * UNREACHABLE


def test_what_the_prefix_cache_holds_is_no_work():
    """A prompt that is almost wholly cached is in time behind the one that runs; the same without a cache is not."""
    run = started(reject_unreachable=True, prefix_caching=True, slo=Slo(0.08, 0.025))
    run.arrive(0.0, request("first", 6000))
    run.until()
    run.arrive(run.now, request("busy", 5000, cache_salt="other"))
    run.arrive(run.now, request("again", 6000))
    run.arrive(run.now, request("elsewhere", 6000, cache_salt="another"))
    assert set(refused(run)) == {"elsewhere"}


def test_an_expectation_refuses_only_for_the_wait():
    outlook = Core(config(slo=SLO)).gate.outlook("P", alone=True)
    alone, behind = expect([], 0, 2000, outlook), expect([(0, 60_000)], 0, 2000, outlook)
    assert alone.ttft_s == alone.alone_s == behind.alone_s
    assert alone.retry_after_s(0.001) is None
    assert behind.retry_after_s(0.5) == pytest.approx(behind.ttft_s - UNREACHABLE * 0.5)


# ---- those who are late and not refused


def test_a_late_request_is_served_within_a_bounded_amount_of_other_work():
    """Prompts that can be in time keep coming, as many as the device can take and more."""
    run = started(order="slack", max_num_batched_tokens=512)
    tokens, count = 4000, 0
    run.arrive(0.0, request("late", tokens, ttft_s=0.001))
    while "late" not in run.latencies and count < 3000:
        count += 1
        run.arrive(run.now + 0.01, request(count, 600))
    done_s = run.arrived_s["late"] + run.latencies["late"].ttft_s
    others = sum(a.batch.num_prefill_tokens for at, a in run.launches if at <= done_s) - tokens
    assert others <= tokens / BySlack.LATE_SHARE + 4 * 512


def test_late_requests_yield_to_those_that_can_be_in_time():
    run = started(order="slack")
    for i in range(10):
        run.arrive(0.0, request(f"late {i}", 4000, ttft_s=0.001))
    run.arrive(0.001, request("reachable", 4000))
    run.until()
    assert run.latencies["reachable"].ttft_s < SLO.ttft_s
    assert LIMITS.max_prefill_tokens < 4000, "it is not simply in the first batch"


def test_a_gate_is_told_how_many_wait_too_late():
    told = []
    core = Core(config(mode="semi", gate="semi-pd", order="slack", slo=SLO))
    allow = core.gate.allow
    core.gate.allow = lambda asked: told.append(asked.late) or allow(asked)
    run = Run(core)
    for i in range(3):
        run.arrive(0.0, request(i, 4000, ttft_s=0.001))
    run.tell(Arrived(request("fine", 4000)))
    run.until()
    assert max(told) >= 2 and told[-1] == 0
