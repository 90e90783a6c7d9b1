"""A sweep tries combinations in order, gives up those far below the best, and finds each one's goodput."""

import asyncio
import json
import random

import msgspec
import pytest
from scripted_server import ScriptedServer, whole

from tidegate.base.errors import ConfigError
from tidegate.bench.admin import Admin, Refused
from tidegate.bench.arrivals import POISSON
from tidegate.bench.client import Client
from tidegate.bench.confidence import Decision, Interval, looks
from tidegate.bench.goodput import Hunt, find_goodput, found
from tidegate.bench.load import Limits
from tidegate.bench.plan import Lengths
from tidegate.bench.probe import Judging, Probe, Verdict
from tidegate.bench.sweep import Dimension, Row, State, Watcher, best_row, combinations, sweep
from tidegate.bench.workloads import WORKLOADS
from tidegate.slo.goodput import Slo

TIGHT, LOOSE = Slo(0.5, 0.025), Slo(2.0, 0.1)
LOOKS_S = looks(20, 160)


def hunt(slos=(TIGHT,)):
    judging = Judging(slos, 0.9, 0.95, warmup_s=5.0, looks_s=LOOKS_S)
    return Hunt(WORKLOADS["conv"], Lengths(), POISSON, False, judging, Limits(), 1.0, 1000.0, 0.05, 10.0)


class KnownServer:
    """In place of a prober: a share of requests of (goodput / rate) ^ 2 * 0.9 attains, at most all, each on its own."""

    def __init__(self, goodputs, slos=(TIGHT,), seed=0):
        self.hunt = hunt(slos)
        self.goodputs = goodputs  # for each SLO
        self.rates = []
        self._rng = random.Random(seed)

    async def probe(self, rate, goal):
        self.rates.append(rate)
        judging = self.hunt.judging
        samples = [[] for _ in judging.slos]
        for look_s in judging.looks_s:
            for sample, goodput in zip(samples, self.goodputs, strict=True):
                share = min(1.0, 0.9 * (goodput / rate) ** 2)
                sample += [self._rng.random() < share for _ in range(int(rate * look_s) - len(sample))]
            intervals = [Interval.of(sample, 0.05 / len(judging.looks_s)) for sample in samples]
            verdicts = [
                Verdict(slo, interval, interval.decision(0.9), [])
                for slo, interval in zip(judging.slos, intervals, strict=True)
            ]
            if verdicts[goal].decision is not Decision.OPEN:
                break
        return Probe(len(self.rates), rate, goal, look_s, verdicts, run=None)


@pytest.mark.parametrize("truth", [0.7, 6.0, 41.0])
def test_a_known_goodput_is_found_within_the_precision_and_its_sampling_error(truth):
    near = 0
    for seed in range(20):
        server, probes = KnownServer([truth], seed=seed), []
        asyncio.run(find_goodput(server, probes, 1.0))
        (result,) = found(probes, [TIGHT], 0.9)
        assert result.low <= result.requests_per_s <= result.high <= 1.0501 * result.low
        error = 0.3 / (truth * LOOKS_S[-1]) ** 0.5  # standard, of the share of requests near 90 %
        near += abs(result.requests_per_s / truth - 1) < 0.05 + 2 * error / 1.8  # where 1 % more rate is 1.8 % of share
    assert near >= 19


def test_every_slo_gets_its_goodput_and_earlier_probes_are_used_again():
    server, probes = KnownServer([8.0, 24.0], (TIGHT, LOOSE)), []
    asyncio.run(find_goodput(server, probes, 1.0))
    tight, loose = found(probes, (TIGHT, LOOSE), 0.9)
    assert tight.requests_per_s == pytest.approx(8, rel=0.12)
    assert loose.requests_per_s == pytest.approx(24, rel=0.12)
    assert {probe.goal for probe in probes} == {0, 1}
    assert min(probe.rate for probe in probes if probe.goal == 1) > 8


def test_rates_at_which_nothing_was_decided_are_named():
    server, probes = KnownServer([0.5]), []
    asyncio.run(find_goodput(server, probes, 1.0))
    (result,) = found(probes, [TIGHT], 0.9)
    undecided = {probe.rate for probe in probes if probe.verdicts[0].decision is Decision.OPEN}
    assert result.undecided
    assert set(result.undecided) == undecided & {result.low, result.high}


def test_all_combinations_the_last_setting_changing_fastest():
    assert combinations([Dimension("mode", ["a", "b"]), Dimension("shares.prefill", [0.4, 0.6])]) == [
        {"mode": "a", "shares.prefill": 0.4},
        {"mode": "a", "shares.prefill": 0.6},
        {"mode": "b", "shares.prefill": 0.4},
        {"mode": "b", "shares.prefill": 0.6},
    ]
    with pytest.raises(ConfigError, match="names mode twice"):
        combinations([Dimension("mode", ["a"]), Dimension("mode", ["b"])])


class SettableServer(KnownServer):
    """Also in place of ``Admin``: the goodput is that of the setting in force, a dict for each of which it is said."""

    def __init__(self, by_setting, refused=(), shares_matter=lambda setting: True):
        super().__init__([0.0])
        self.applied = []
        self._by_setting = by_setting
        self._refused = refused
        self._shares_matter = shares_matter

    async def set(self, setting):
        if setting in self._refused:
            raise Refused("not this one")
        self.applied.append(setting)
        self.goodputs = [self._by_setting(setting)]

    async def in_force(self, setting):
        return setting if self._shares_matter(setting) else {"mode": setting["mode"]}


def swept(server, settings, cut_off=0.8):
    rows = []
    asyncio.run(sweep(server, server, settings, cut_off, rows, Watcher()))
    return rows


def chunks(*sizes):
    return combinations([Dimension("settings.max_num_batched_tokens", sizes)])


def test_a_combination_far_below_the_best_costs_one_probe_and_the_best_is_left_in_force():
    by_size = {512: 10.0, 1024: 5.0, 2048: 12.0, 4096: 6.0}
    server = SettableServer(lambda setting: by_size[setting["settings.max_num_batched_tokens"]])
    rows = swept(server, chunks(*by_size))
    assert [row.setting["settings.max_num_batched_tokens"] for row in rows] == [512, 1024, 2048, 4096]
    assert [row.state for row in rows] == [State.MEASURED, State.CUT_OFF, State.MEASURED, State.CUT_OFF]
    assert [len(rows[1].probes), len(rows[3].probes)] == [1, 1]
    assert rows[1].probes[0].rate == pytest.approx(0.8 * rows[0].found[0].requests_per_s)
    assert rows[0].found[0].requests_per_s == pytest.approx(10, rel=0.12)
    assert rows[2].found[0].requests_per_s == pytest.approx(12, rel=0.12)
    assert best_row(rows) is rows[2]
    assert server.applied[-1] == rows[2].setting


def test_nothing_is_cut_off_where_that_is_not_wanted():
    server = SettableServer(lambda setting: setting["settings.max_num_batched_tokens"] / 100)
    rows = swept(server, chunks(1000, 200), cut_off=0.0)
    assert [row.state for row in rows] == [State.MEASURED] * 2
    assert rows[1].found[0].requests_per_s == pytest.approx(2, rel=0.15)


def test_a_near_combination_begins_near_the_best_so_far():
    server = SettableServer(lambda setting: setting["settings.max_num_batched_tokens"] / 10)
    rows = swept(server, chunks(100, 110))
    rates = [probe.rate for probe in rows[1].probes]
    best = rows[0].found[0].requests_per_s
    assert rates[:2] == pytest.approx([0.8 * best, best])
    assert len(rates) < len(rows[0].probes)


def test_a_refused_combination_is_a_row_with_the_servers_words():
    server = SettableServer(lambda setting: 10.0, refused=chunks(7))
    rows = swept(server, chunks(7, 512))
    assert (rows[0].state, rows[0].note) == (State.REFUSED, "not this one")
    assert rows[1].state is State.MEASURED


def test_a_sweep_of_which_the_server_takes_nothing_is_refused_before_any_probe():
    server = SettableServer(lambda setting: 10.0, refused=chunks(7, 8))
    with pytest.raises(ConfigError, match="none of the settings to sweep: not this one"):
        swept(server, chunks(7, 8))
    assert server.rates == []


def test_combinations_that_differ_in_what_is_not_in_force_are_measured_once():
    settings = combinations([Dimension("mode", ["chunked", "semi"]), Dimension("shares.prefill", [0.4, 0.6])])
    server = SettableServer(lambda setting: 10.0, shares_matter=lambda setting: setting["mode"] != "chunked")
    rows = swept(server, settings, cut_off=0.0)
    assert [row.state for row in rows] == [State.MEASURED, State.SAME, State.MEASURED, State.MEASURED]
    assert rows[1].note == "mode=chunked shares.prefill=0.4"
    assert rows[1].found == rows[0].found


def asked(answer, conversation):
    async def main():
        async with ScriptedServer(answer) as server:
            client = Client(server.url, "key")
            try:
                return await conversation(Admin(client), server)
            finally:
                client.close()

    return asyncio.run(main())


def test_a_setting_is_posted_to_its_endpoint_and_fields_of_one_endpoint_go_together():
    async def answer(call):
        await call.send(whole(200, b"{}"))

    async def conversation(admin, server):
        await admin.set({"mode": "semi", "shares.prefill": 0.4, "settings.slice_ms": 30, "shares.decode": 0.6})
        return [(call.path, call.body) for call in server.calls]

    assert asked(answer, conversation) == [
        ("/admin/mode", {"mode": "semi"}),
        ("/admin/shares", {"prefill": 0.4, "decode": 0.6}),
        ("/admin/settings", {"slice_ms": 30}),
    ]


def test_shares_are_not_in_force_while_one_lane_has_the_device():
    lanes = {"D": {"phases": "PD"}, "P": {"phases": ""}}

    async def answer(call):
        await call.send(whole(200, json.dumps({"lanes": lanes}).encode()))

    async def conversation(admin, server):
        one = await admin.in_force({"mode": "chunked", "shares.prefill": 0.4})
        lanes["P"]["phases"] = "P"
        return one, await admin.in_force({"mode": "semi", "shares.prefill": 0.4})

    assert asked(answer, conversation) == ({"mode": "chunked"}, {"mode": "semi", "shares.prefill": 0.4})


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (400, Refused, "too large"),
        (404, ConfigError, "has no /admin/mode"),
        (401, ConfigError, "--admin-key.*too large"),
        (403, ConfigError, "--admin-key"),
    ],
)
def test_what_the_server_says_no_to_is_told_in_its_words(status, error, words):
    async def answer(call):
        await call.send(whole(status, msgspec.json.encode({"error": {"message": "too large"}})))

    with pytest.raises(error, match=words):
        asked(answer, lambda admin, server: admin.set({"mode": "semi"}))


def test_a_row_is_named_by_its_setting():
    assert Row({"mode": "semi", "shares.prefill": 0.4}).name == "mode=semi shares.prefill=0.4"
