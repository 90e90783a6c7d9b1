"""Requests are sent at their times and recorded as they went; one that fails disturbs no other."""

import asyncio
import time

import pytest
from scripted_server import DONE, EVENT_STREAM, ScriptedServer, chunk, event, usage, whole

from tidegate.bench.client import Client
from tidegate.bench.load import Limits, Planned, run_load
from tidegate.bench.own_load import OwnLoad, OwnLoadMeter


def load(answer, due, limits=Limits(timeout_s=20), asked=3, progress=lambda counts: None):  # noqa: B008
    """The records, own load and server of a run whose requests are due at these seconds. Bodies carry their index."""

    async def main():
        async with ScriptedServer(answer) as server:
            client = Client(server.url)
            plan = [Planned(due_s, 10, asked, b'{"index": %d}' % i) for i, due_s in enumerate(due)]
            records, own = await asyncio.wait_for(run_load(client, "/v1/completions", plan, limits, progress), 30)
            client.close()
            return records, own, server

    return asyncio.run(main())


async def three_tokens(call):
    await call.stream(event(), event(), event(finish="length"), usage(10, 3), DONE, pause_s=0.005)


def test_every_request_is_sent_at_or_after_its_time_in_order_and_its_tokens_after_that():
    due = [0.0, 0.0, 0.03, 0.1]
    records, _, server = load(three_tokens, due)
    assert [call.body["index"] for call in sorted(server.calls, key=lambda call: call.body["index"])] == [0, 1, 2, 3]
    for record, due_s in zip(records, due, strict=True):
        assert record.failure is None
        assert due_s == record.due_s <= record.ready_s <= record.sent_s < record.times_s[0]
        assert len(record.times_s) == record.tokens == 3
        assert record.times_s[0] < record.times_s[1] < record.times_s[2]
        assert record.latency.ttft_s == record.times_s[0] - record.sent_s


def test_arrivals_do_not_wait_for_answers():
    answering = []

    async def answer(call):
        answering.append(call)
        while len(answering) < 5:
            await asyncio.sleep(0.001)
        await three_tokens(call)

    records, _, _ = load(answer, [0.01 * i for i in range(5)])
    assert all(record.failure is None for record in records)


def test_no_more_requests_are_under_way_than_the_maximum():
    running, most = 0, 0

    async def answer(call):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await call.send(EVENT_STREAM, chunk(event()), pause_s=0.005)
        running -= 1
        await call.send(chunk(event()), chunk(event(finish="length")), b"0\r\n\r\n")

    records, _, _ = load(answer, [0.0] * 7, Limits(timeout_s=20, max_concurrency=2))
    assert most == 2
    assert all(record.failure is None for record in records)
    assert max(record.sent_s - record.ready_s for record in records) > 0.005
    assert all(record.latency.ttft_s == record.times_s[0] - record.sent_s for record in records)


def test_each_kind_of_failure_is_told_apart_and_disturbs_no_other_request():
    async def answer(call):
        match call.body["index"]:
            case 1:
                await call.send(whole(503, b"too busy"))
            case 2:
                await call.send(EVENT_STREAM, chunk(event()), pause_s=0.02)
                call.hang_up()
            case 3:
                await call.send(EVENT_STREAM, chunk(event()))
                await asyncio.sleep(3600)
            case 4:
                await call.stream(event(), event(finish="stop"), usage(10, 2), DONE)
            case _:
                await three_tokens(call)

    records, _, _ = load(answer, [0.0] * 6, Limits(timeout_s=2.0))
    kinds = [record.failure.kind if record.failure else None for record in records]
    assert kinds == [None, "http 503", "connection", "timeout", "too few tokens", None]
    assert [record.latency is None for record in records] == [kind is not None for kind in kinds]
    assert records[1].failure.message == "too busy"


def test_progress_counts_every_request_once():
    seen = []

    async def answer(call):
        await (call.send(whole(500, b"")) if call.body["index"] == 0 else three_tokens(call))

    load(
        answer, [0.0] * 3, progress=lambda counts: seen.append((counts.total, counts.sent, counts.done, counts.failed))
    )
    assert seen[-1] == (3, 3, 3, 1)
    assert seen == sorted(seen)
    assert len(seen) == 6


def test_a_busy_loop_is_noticed_as_lag():
    async def main():
        async with OwnLoadMeter() as meter:
            for _ in range(5):
                await asyncio.sleep(0.02)
                time.sleep(0.1)
        return meter.reading([0.0, 0.2])

    own = asyncio.run(main())
    assert own.lag_max_s > 0.05
    assert own.late_max_s == own.late_p99_s == 0.2
    assert own.cpu_share >= 0


def test_a_spinning_client_is_seen_by_its_cpu_time():
    async def main():
        async with OwnLoadMeter() as meter:
            sum(range(3_000_000))
        return meter.reading([])

    assert asyncio.run(main()).cpu_share > 0.01


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (OwnLoad(0.0, 0.0, 0.0, 0.0, 0.3), []),
        (OwnLoad(0.0, 0.0, 0.0, 0.0, 0.97), ["97% of a core"]),
        (OwnLoad(0.0, 0.0, 0.004, 0.3, 0.3), ["p99 gap"]),
        (OwnLoad(0.0, 0.0, 0.02, 0.3, 0.3), ["TTFT", "p99 gap"]),
        (OwnLoad(0.05, 0.3, 0.0, 0.0, 0.3), ["after their time"]),
    ],
)
def test_warnings_are_given_when_the_client_may_have_moved_the_results(own, words):
    warnings = own.warnings(ttft_p50_s=0.1, gap_p99_p50_s=0.03)
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))
