"""A measurement of a server that streams chats: what it is asked, and what its events are counted as."""

import asyncio

from scripted_server import DONE, ScriptedServer, usage
from test_bench_stream import chat

from tidegate.bench.client import Client
from tidegate.bench.load import Limits
from tidegate.bench.payload import Payloads
from tidegate.bench.plan import Amount, Lengths
from tidegate.bench.session import Measurement, Watcher, measure
from tidegate.bench.workloads import WORKLOADS
from tidegate.slo.goodput import Slo


class Noted(Watcher):
    def __init__(self):
        self.rates = []
        self.results = []

    def preparing(self, rate):
        self.rates.append(rate)

    def finished(self, run):
        self.results.append(run)


async def answer(call):
    """The role, then two tokens an event; the last event comes with the farewell."""
    asked = call.body["max_tokens"]
    pieces = [chat("two tokens") for _ in range(asked // 2)]
    await call.stream(chat("", role="assistant"), *pieces, chat(finish="length"), usage(40, asked), DONE, pause_s=0.002)


def measured(rates, slo=Slo(10.0, 10.0), stop_below=0.0):  # noqa: B008
    async def main():
        async with ScriptedServer(answer) as server:
            client = Client(server.url)
            watcher = Noted()
            measurement = Measurement(
                WORKLOADS["chat"], Lengths(30, 8), rates, Amount(num_requests=3), [slo], Limits(20), 1.0, stop_below
            )
            results = await measure(client, Payloads("m", endpoint="chat"), measurement, watcher)
            client.close()
            return results, watcher, server

    return asyncio.run(main())


def test_chats_are_measured_by_events_and_by_the_servers_count_of_tokens():
    (result,), _, server = measured([50.0])
    check, *calls = server.calls
    assert check.body["max_tokens"] == 2
    assert {call.path for call in server.calls} == {"/v1/chat/completions"}
    assert all(call.body["max_tokens"] == 8 for call in calls)
    texts = {call.body["messages"][0]["content"] for call in calls}
    assert len(texts) == len(calls) == 3
    assert (result.token_check.events, result.token_check.tokens, result.token_check.differing) == (15, 24, 3)
    assert [each.prompt_tokens for each in result.each] == [40, 40, 40]
    assert result.failures == {}


def test_runs_go_from_the_lowest_rate_up_and_their_prompts_differ():
    results, watcher, server = measured([float("inf"), 100.0, 50.0])
    assert watcher.rates == [50.0, 100.0, None]
    assert watcher.results == results
    texts = {call.body["messages"][0]["content"] for call in server.calls}
    assert len(texts) == len(server.calls) == 10


def test_higher_rates_are_left_out_once_too_few_requests_attain_any_slo():
    assert len(measured([50.0, 100.0], slo=Slo(0.0, 0.0), stop_below=0.5)[0]) == 1
    assert len(measured([50.0, 100.0], slo=Slo(0.0, 0.0))[0]) == 2
    assert len(measured([50.0, 100.0], stop_below=0.5)[0]) == 2
