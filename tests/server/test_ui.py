"""The live page's feed and files, and what the server remembers of requests."""

import asyncio
import json
import signal
from contextlib import aclosing, contextmanager

import httpx
import msgspec
import pytest
from conftest import eventually
from test_access import ask
from test_serve import server as server_process
from test_server_metrics import scrape

from tidegate.base.stats import LaneStats, Stats
from tidegate.server import live as module
from tidegate.server.fake import FakeEngine, Script
from tidegate.server.feed import Feed
from tidegate.server.live import Ended, Recorder, verdict
from tidegate.server.readings import rates
from tidegate.slo.goodput import Latency, Metric, Slo, attainment, percentile

SLO = Slo(0.5, 0.05)


# ---- what is remembered of requests


def latencies():
    """Some that attain SLO and some that miss it by TTFT, by TPOT, or by both, of prompts of 1, 2, 3… tokens."""
    ttfts, tpots = (0.1, 0.5, 0.7), (0.01, 0.05, 0.06, 0.02)
    return [Latency(ttfts[i % 3], tpots[i % 4], 3 * tpots[i % 4]) for i in range(24)]


def recorded(ended, slo=SLO):
    recorder = Recorder(slo)
    for i, latency in enumerate(ended):
        recorder.ended(Ended(100.0 + i, i + 1, latency, verdict(latency, slo)))
    return recorder


@pytest.mark.parametrize("slo", [SLO, Slo(0.6, 0.1, Metric.GAP), Slo(0.1, 0.01)])
def test_attainment_and_percentiles_are_those_that_goodput_defines(slo):
    ended = [*latencies(), None, None]
    served = recorded(ended, slo).read(130.0)
    known = [latency for latency in ended if latency is not None]
    assert served.attainment == attainment(ended, slo)
    assert (served.requests, served.judged, served.failed) == (26, 26, 2)
    assert served.ttft_s.p90 == percentile([latency.ttft_s for latency in known], 0.9)
    assert served.tpot_s.p50 == percentile([latency.tpot_s for latency in known], 0.5)
    assert served.gap_p99_s.p99 == percentile([latency.gap_p99_s for latency in known], 0.99)
    assert sum(served.missed.values()) == 26 - round(served.attainment * 26)


def test_a_miss_has_the_reason_that_it_had():
    slo = Slo(0.5, 0.05)
    assert verdict(Latency(0.5, 0.05, 9.0), slo) == "attained"
    assert verdict(Latency(0.6, 0.05, 9.0), slo) == "ttft"
    assert verdict(Latency(0.5, 0.06, 0.0), slo) == "tpot"
    assert verdict(Latency(0.6, 0.06, 0.0), slo) == "both"
    assert verdict(None, slo) == "failed"
    assert verdict(Latency(0.5, 0.06, 0.05), Slo(0.5, 0.05, Metric.GAP)) == "attained"
    assert verdict(Latency(0.1, 0.1, 0.1), None) is None


def test_each_quarter_of_the_prompts_by_length_has_its_own_attainment():
    ended = latencies()
    quarters = recorded(ended).read(124.0).by_prompt
    assert [(q.from_tokens, q.to_tokens, q.requests) for q in quarters] == [
        (1, 6, 6),
        (7, 12, 6),
        (13, 18, 6),
        (19, 24, 6),
    ]
    for i, quarter in enumerate(quarters):
        assert quarter.attainment == attainment(ended[6 * i : 6 * i + 6], SLO)


def test_only_requests_of_the_last_minute_count_and_earlier_minutes_can_be_read_again():
    ended = latencies()
    recorder = recorded(ended)
    assert recorder.read(123.0 + module.WINDOW_S).requests == 0
    assert recorder.reading(115.0).attainment == attainment(ended[:16], SLO)
    assert recorder.reading(110.0 + module.WINDOW_S).requests == 13


def test_what_is_kept_is_bounded():
    recorder = Recorder(SLO)
    for i in range(3 * module.MOST_KEPT):
        recorder.ended(Ended(i * 1e-3, 1, None, "failed"))
    assert recorder.read(i * 1e-3).requests == module.MOST_KEPT
    for i in range(2000):
        recorder.arrived(100.0 + i)
        recorder.read(100.5 + i)
    assert len(recorder._marks) < 2 * module.KEPT_S + 5


def test_rates_are_what_was_counted_in_the_last_seconds_and_not_the_idleness_before():
    recorder = Recorder(None)
    recorder.arrived(10.0)
    recorder.prompt_tokens += 40
    recorder.output_tokens += 500
    recorder.ended(Ended(12.0, 40, Latency(1, 1, 1), None))
    served = recorder.read(14.0)
    assert (served.requests_per_s, served.prompt_tokens_per_s, served.output_tokens_per_s) == (0.2, 8, 100)
    assert recorder.read(30.0).output_tokens_per_s == 0
    assert recorder.reading(11.0).output_tokens_per_s == pytest.approx(50)  # half of them by then


def test_the_slo_is_the_requests_own_where_it_brings_one_and_else_what_the_engine_says():
    recorder = Recorder(Slo(1.0, 0.1))
    assert recorder.slo_for(None, None) == Slo(1.0, 0.1)
    assert recorder.slo_for(None, 0.2) == Slo(1.0, 0.2)
    recorder.heed(Stats(slo_ttft_s=2.0, slo_tpot_s=0.3, slo_metric="gap"))
    assert recorder.slo_for(0.5, None) == Slo(0.5, 0.3, Metric.GAP)
    recorder.heed(Stats())
    assert recorder.slo_for(None, None) is None
    assert recorder.slo_for(0.5, None).met_by(Latency(0.5, 99.0, 99.0))


# ---- the same through the API


def complete(server, prompt=(1, 2, 3), slo=None, **body):
    headers = {"X-SLO": slo} if slo else {}
    return server.http.post("/v1/completions", json={"prompt": list(prompt), "max_tokens": 4} | body, headers=headers)


def test_requests_are_counted_by_whether_they_attained_their_slo(live):
    ways = iter(["length"] * 5 + ["error", "rejected", "invalid"])
    server = live(lambda request: Script([300], finish=next(ways, "length")), step_s=0.002, slo=Slo(60, 60))
    complete(server)
    complete(server, slo="ttft=1us")
    complete(server, slo="tpot=1us")
    complete(server, slo="ttft=1us,tpot=1us")
    complete(server, slo="ttft=50s")
    for _ in range(3):
        complete(server)  # fails, is refused for now, or is a mistake of the client's
    server.engine.statistics.slo_ttft_s = server.engine.statistics.slo_tpot_s = 60.0
    seen = scrape(server)
    assert seen[("tidegate:slo_requests_total",)] == 7
    assert seen[("tidegate:slo_attained_total",)] == 2
    missed = {reason: seen[("tidegate:slo_missed_total", reason)] for reason in ("ttft", "tpot", "both", "failed")}
    assert missed == {"ttft": 1, "tpot": 1, "both": 1, "failed": 2}
    assert seen[("tidegate:slo_seconds", "ttft")] == 60


def test_the_gate_is_in_the_scrape(live):
    server = live()
    stats = server.engine.statistics
    stats.gate, stats.gate_moves, stats.gate_choices, stats.late = "auto", 3, {"hybrid": 5, "decode": 6}, 2
    seen = scrape(server)
    assert seen[("tidegate:gate", "auto")] == 1
    assert seen[("tidegate:gate_moves_total",)] == 3
    assert seen[("tidegate:gate_choices_total", "hybrid")] == 5
    assert seen[("tidegate:late_requests",)] == 2
    assert ("tidegate:slo_seconds", "ttft") not in seen


def test_a_request_whose_client_left_is_held_against_no_slo(live):
    server = live(lambda request: Script([300], wait_steps=10_000), step_s=0.005, slo=Slo(60, 60))
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json={"prompt": [1], "stream": True}, timeout=0.3)
    eventually(lambda: scrape(server)[("vllm:request_success_total", "abort")] == 1)
    assert scrape(server)[("tidegate:slo_requests_total",)] == 0


# ---- readings


def test_totals_become_rates_and_a_new_gate_begins_at_zero():
    before = Stats(gate_choices={"decode": 10, "hybrid": 7}, lanes={"D": LaneStats(busy_seconds=1.0, batches=10)})
    after = Stats(
        gate_choices={"decode": 14, "hybrid": 7, "prefill": 2},
        lanes={"D": LaneStats(busy_seconds=2.0, batches=30), "P": LaneStats(busy_seconds=9.0, prefill_tokens=50)},
    )
    found = rates(after, before, 2.0)
    assert found.choices_per_s == {"decode": 2.0, "prefill": 1.0}
    assert (found.lanes["D"].busy, found.lanes["D"].batches_per_s) == (0.5, 10.0)
    assert (found.lanes["P"].busy, found.lanes["P"].prefill_tokens_per_s) == (1.0, 25.0)
    assert rates(Stats(gate_choices={"decode": 3}), before, 1.0).choices_per_s == {"decode": 3.0}


def test_many_viewers_share_each_reading_and_without_viewers_the_engine_is_left_alone():
    async def story():
        engine = FakeEngine()
        feed = Feed(engine, Recorder(None), period_s=0.02)
        await asyncio.sleep(0.1)
        assert engine.times_asked == 0
        viewers = [feed.watch() for _ in range(20)]
        seen = [await anext(viewer) for viewer in viewers]
        for _ in range(3):
            seen = [await anext(viewer) for viewer in viewers]
        assert all(s[-1] is seen[0][-1] for s in seen)
        assert engine.times_asked <= 5
        for viewer in viewers:
            await viewer.aclose()
        asked = engine.times_asked
        await asyncio.sleep(0.1)
        assert engine.times_asked == asked

    asyncio.run(story())


def test_viewers_who_come_and_go_do_not_make_for_more_readings():
    async def story():
        engine = FakeEngine()
        feed = Feed(engine, Recorder(None), period_s=30.0)
        for _ in range(10):
            async with aclosing(feed.watch()) as viewer:
                await anext(viewer)
                await asyncio.sleep(0.01)
        assert engine.times_asked <= 1

    asyncio.run(story())


def test_a_viewer_sees_first_the_seconds_before_even_those_in_which_nobody_watched(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("tidegate.server.feed.now_s", lambda: now)

    async def story():
        nonlocal now
        recorder = Recorder(SLO)
        engine = FakeEngine()
        feed = Feed(engine, recorder, period_s=0.0)
        for i in range(300):
            recorder.ended(Ended(now + i, 5, Latency(0.1, 0.01, 0.01), "attained"))
        now += 300
        async with aclosing(feed.watch()) as viewer:
            history = await anext(viewer)
            while history[-1].stats is None:
                history += await anext(viewer)
        unwatched = [snapshot for snapshot in history if snapshot.stats is None]
        assert len(unwatched) == 120
        assert {snapshot.served.requests for snapshot in unwatched} == {60}
        assert {snapshot.served.requests_per_s for snapshot in unwatched} == {1.0}
        times = [snapshot.time_s for snapshot in history]
        assert times == sorted(times)
        now += 0.5
        async with aclosing(feed.watch()) as viewer:
            again = await anext(viewer)
        assert history[-1] in again
        assert len(again) >= 120

    asyncio.run(story())


def test_viewers_are_told_when_the_engine_dies_and_when_the_server_ends():
    async def story():
        engine = FakeEngine()
        feed = Feed(engine, Recorder(None), period_s=0.01)
        async with aclosing(feed.watch()) as viewer:
            engine.die()
            while (last := await anext(viewer))[-1].alive:
                pass
            assert last[-1].stats is None
            feed.close()
            assert [s async for s in viewer][-1][-1].alive is False
        assert [s async for s in feed.watch()] == []

    asyncio.run(story())


# ---- over HTTP


@contextmanager
def events(server):
    """Pairs of an event's kind and its value."""
    with server.http.stream("GET", "/ui/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()

        def pairs():
            for line in lines:
                if line.startswith("event: "):
                    yield line[7:], json.loads(next(lines).removeprefix("data: "))

        yield pairs()


def test_the_stream_says_what_runs_and_then_how_it_goes(live):
    server = live(slo=Slo(60, 60))
    stats = server.engine.statistics
    stats.gate, stats.gate_choices = "auto", {"hybrid": 1}
    stats.slo_ttft_s, stats.slo_tpot_s, stats.slo_metric = 60.0, 60.0, "tpot"
    complete(server)
    with events(server) as told:
        kind, about = next(told)
        assert (kind, about["model"], about["block_size"], about["window_s"]) == ("about", "smol", 16, 60)
        stats_seen = []
        while not stats_seen or stats_seen[-1]["rates"] is None:
            kind, snapshots = next(told)
            assert kind == "snapshots"
            stats_seen += [snapshot for snapshot in snapshots if snapshot["stats"]]
            stats.gate_choices = {"hybrid": 3}
            stats.waiting = 2
    last = stats_seen[-1]
    assert last["alive"] is True
    assert last["stats"]["waiting"] == 2
    assert last["stats"]["lanes"]["P"]["share"] == 0.5
    assert last["rates"]["choices_per_s"].keys() == {"hybrid"}
    assert (last["served"]["requests"], last["served"]["attainment"]) == (1, 1.0)
    assert msgspec.convert(last["stats"], Stats).slo_ttft_s == 60.0


def test_a_page_that_is_left_ends_the_readings(live):
    server = live()
    with events(server) as told:
        while next(told)[0] != "snapshots":
            pass
    feed = server.app.state.feed
    eventually(lambda: feed._viewers == 0)
    assert feed._reading is None


def test_an_open_page_does_not_keep_the_server_from_ending():
    with server_process(drain_s=60) as (process, client), client.stream("GET", "/ui/events") as response:
        lines = response.iter_lines()
        assert next(lines) == "event: about"
        process.send_signal(signal.SIGTERM)
        assert "event: closing" in list(lines)
        assert process.wait(20) == 0


def test_an_open_page_is_told_that_the_engine_died():
    with server_process(die_after=1.0) as (process, client), client.stream("GET", "/ui/events") as response:
        told = [line for line in response.iter_lines() if line.startswith("data: [")]
        assert json.loads(told[-1][6:])[-1]["alive"] is False
        assert process.wait(20) == 1


def test_the_page_comes_whole_from_this_server_to_whoever_may_read_metrics():
    page = ask("GET", "/ui", peer="203.0.113.9", api_keys=("k",), admin_key="a")
    assert page.status_code == 200
    assert "'self'" in page.headers["content-security-policy"]
    for name, kind in (("ui.css", "text/css"), ("ui.js", "text/javascript"), ("mark.svg", "image/svg+xml")):
        assert f"ui/{name}" in page.text
        part = ask("GET", f"/ui/{name}")
        assert (part.status_code, part.headers["content-type"].partition(";")[0]) == (200, kind)
        assert "http://" not in part.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in part.text
    assert "http" not in page.text
    assert ask("GET", "/ui/").headers["location"] == "../ui"


@pytest.mark.parametrize("name", ["nothing.js", "__init__.py", "..%2Fapp.py", "%2e%2e/app.py"])
def test_nothing_else_is_to_be_had_there(name):
    assert ask("GET", f"/ui/{name}").status_code == 404
