"""Every statistic of a report equals a plain computation from the records."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.bench.load import Record
from tidegate.bench.own_load import OwnLoad
from tidegate.bench.report import Distribution, goodputs, run_result
from tidegate.bench.stream import Failure, Usage
from tidegate.bench.table import run_text, sweep_text
from tidegate.slo.goodput import Metric, Slo

IDLE = OwnLoad(0.0, 0.0, 0.0, 0.0, 0.01)
SLO = Slo(0.5, 0.05)


def record(sent=0.0, ttft=0.2, gaps=(0.01, 0.02), prompt=100, tokens=None, counted=None, failure=None):
    times = [sent + ttft]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Record(
        prompt, len(times), sent, sent, sent, times, tokens or len(times), counted, failure and Failure(failure, "why")
    )


records = st.lists(
    st.builds(
        record,
        sent=st.floats(0, 100),
        ttft=st.floats(0.001, 2),
        gaps=st.lists(st.floats(0, 0.2), max_size=8),
        prompt=st.integers(1, 5000),
        failure=st.sampled_from([None, None, None, "http 500", "timeout"]),
    ),
    min_size=1,
    max_size=30,
)


def plain(values):
    values = sorted(values)
    if not values:
        return None
    at = lambda share: values[min(len(values) - 1, int(share * len(values)))]  # noqa: E731
    return pytest.approx((sum(values) / len(values), at(0.5), at(0.9), at(0.99), values[-1]))


def numbers(distribution):
    return distribution and (
        distribution.mean, distribution.p50, distribution.p90, distribution.p99, distribution.max
    )  # fmt: skip


@given(records)
def test_statistics_equal_a_plain_computation(records):
    result = run_result(4.0, records, IDLE, [SLO])
    done = [r for r in records if r.failure is None]
    ttfts = [r.times_s[0] - r.sent_s for r in done]
    tpots = [(r.times_s[-1] - r.times_s[0]) / max(1, len(r.times_s) - 1) for r in done]
    gaps = [[b - a for a, b in zip(r.times_s, r.times_s[1:], strict=False)] for r in done]
    worst = [sorted(g)[min(len(g) - 1, int(0.99 * len(g)))] if g else 0.0 for g in gaps]
    assert numbers(result.ttft) == plain(ttfts)
    assert numbers(result.tpot) == plain(tpots)
    assert numbers(result.gap) == plain([gap for g in gaps for gap in g])
    assert numbers(result.gap_p99) == plain(worst)
    assert numbers(result.end_to_end) == plain([r.times_s[-1] - r.sent_s for r in done])
    by_tpot, by_gap = result.attainments
    assert (by_tpot.slo.metric, by_gap.slo.metric) == (Metric.TPOT, Metric.GAP)
    assert by_tpot.attainment == sum(a <= 0.5 and b <= 0.05 for a, b in zip(ttfts, tpots, strict=True)) / len(records)
    assert by_gap.attainment == sum(a <= 0.5 and b <= 0.05 for a, b in zip(ttfts, worst, strict=True)) / len(records)
    assert result.requests == len(records) == len(result.each)
    assert result.failed == len(records) - len(done)
    if done:
        span = max(r.times_s[-1] for r in done) - min(r.sent_s for r in records)
        assert result.duration_s == pytest.approx(span)
        assert result.completed_per_s == pytest.approx(len(done) / span)
        assert result.input_tokens_per_s == pytest.approx(sum(r.prompt_tokens for r in done) / span)
        assert result.output_tokens_per_s == pytest.approx(sum(len(r.times_s) for r in done) / span)


@given(records)
def test_quartiles_of_the_prompt_length_divide_all_requests(records):
    (attained, _) = run_result(4.0, records, IDLE, [SLO]).attainments
    lengths = sorted(r.prompt_tokens for r in records)
    if len(records) < 4 or lengths[0] == lengths[-1]:
        assert attained.by_prompt == []
        return
    assert len(attained.by_prompt) == 4
    assert attained.by_prompt[0].from_tokens == lengths[0]
    assert attained.by_prompt[-1].to_tokens == lengths[-1]
    assert all(a.to_tokens <= b.from_tokens for a, b in zip(attained.by_prompt, attained.by_prompt[1:], strict=False))
    if len(records) % 4 == 0:
        assert sum(q.attainment for q in attained.by_prompt) / 4 == pytest.approx(attained.attainment)


def test_long_prompts_that_miss_show_in_their_quartile():
    rows = [record(ttft=0.001 * length, prompt=length) for length in (100, 200, 300, 400, 450, 490, 600, 700)]
    (attained, _) = run_result(4.0, rows, IDLE, [SLO]).attainments
    assert [(q.from_tokens, q.to_tokens, q.attainment) for q in attained.by_prompt] == [
        (100, 200, 1.0), (300, 400, 1.0), (450, 490, 1.0), (600, 700, 0.0)
    ]  # fmt: skip


def test_the_metric_that_was_asked_for_comes_first():
    result = run_result(4.0, [record()], IDLE, [Slo(0.5, 0.05, Metric.GAP)])
    assert [found.slo.metric for found in result.attainments] == [Metric.GAP, Metric.TPOT]


def test_failures_are_counted_by_kind_with_the_first_message_of_each():
    rows = [record(), record(failure="timeout"), record(failure="http 500"), record(failure="timeout")]
    result = run_result(4.0, rows, IDLE, [SLO])
    assert result.failures == {"timeout": 2, "http 500": 1}
    assert result.failure_messages == {"timeout": "why", "http 500": "why"}
    text = run_text(result)
    assert "3 failed" in text
    assert "2 × timeout: why" in text


def test_events_that_carry_several_tokens_are_reported_and_counted_by_the_server():
    rows = [record(), record(tokens=6, counted=Usage(120, 6))]
    result = run_result(4.0, rows, IDLE, [SLO])
    check = result.token_check
    assert (check.events, check.tokens, check.differing, check.counted) == (6, 9, 1, 1)
    assert result.each[1].latency.tpot_s == pytest.approx(0.03 / 5)
    assert result.output_tokens_per_s == pytest.approx(9 / 0.23)
    assert result.input_tokens_per_s == pytest.approx(220 / 0.23)
    assert "1 of 2 answers had other numbers of events than of tokens (6 and 9 in all)" in run_text(result)
    assert "counted the tokens of 1 of 2 answers only" in run_text(result)


def test_when_everything_failed_there_is_still_a_report():
    result = run_result(None, [record(failure="connection")], IDLE, [SLO])
    assert result.ttft is None and result.completed_per_s == 0.0
    assert result.attained(SLO) == 0.0
    assert "all at once" in run_text(result)
    assert "1 × connection" in run_text(result)
    assert sweep_text([result], goodputs([result]))


def test_goodput_over_several_rates():
    good, bad = record(), record(ttft=0.6)
    runs = [run_result(2.0, [good] * 10, IDLE, [SLO]), run_result(4.0, [good] * 8 + [bad] * 2, IDLE, [SLO])]
    by_tpot, by_gap = goodputs(runs)
    assert by_tpot.requests_per_s == by_gap.requests_per_s == pytest.approx(3.0)
    assert not by_tpot.lower_bound
    assert goodputs(runs[:1])[0].lower_bound
    assert "3.00 requests/s (100.0% 80.0%)" in sweep_text(runs, [by_tpot])


def test_a_run_of_all_at_once_has_no_rate_and_so_no_goodput():
    assert goodputs([run_result(None, [record()], IDLE, [SLO])]) == []


def test_a_warning_of_the_client_is_in_the_report():
    result = run_result(4.0, [record()], OwnLoad(0.0, 0.0, 0.0, 0.0, 0.99), [SLO])
    assert "WARNING: The client used 99% of a core" in run_text(result)


def test_there_is_no_distribution_of_nothing():
    assert Distribution.of([]) is None
