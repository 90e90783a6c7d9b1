"""`tidegate bench goodput` against servers whose goodput is known, and with every option that it has."""

import argparse
import asyncio
import importlib.util
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections import deque

import pytest
from scripted_server import DONE, EVENT_STREAM, ScriptedServer, chunk, event, usage, whole

from tidegate.base.errors import ConfigError, TidegateError
from tidegate.bench.command import add_bench, run

WINDOW_S, MOST = 0.25, 30


def known_goodput():
    """Of the server below: the rate at which 90 % of Poisson arrivals find fewer than MOST in the window before."""
    low, high = 1.0, 1000.0
    for _ in range(60):
        rate = (low + high) / 2
        mean = rate * WINDOW_S
        fewer = math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(MOST))
        low, high = (rate, high) if fewer >= 0.9 else (low, rate)
    return low


class LimitedServer:
    """Refuses a request when MOST others came in the WINDOW_S before it, and answers the others at once.

    Its answers to the operator are in ``operator``: path -> (status, body). Requests still running: ``running``.
    """

    def __init__(self):
        self.arrived = deque()
        self.operator = {}
        self.posted = []
        self.silent_above = math.inf  # tokens of a prompt that gets no answer
        self.running = 0
        self.answers_left = math.inf

    async def answer(self, call):
        if call.path == "/v1/models":
            await call.send(whole(200, b'{"data": [{"id": "scripted"}]}'))
        elif call.path.startswith("/admin/"):
            if call.body is not None:
                self.posted.append((call.path, call.body))
            status, body = self.operator.get(call.path, (404, {}))
            await call.send(whole(status, json.dumps(body).encode()))
        else:
            await self._complete(call)

    async def _complete(self, call):
        self.answers_left -= 1
        if self.answers_left < 0:
            await call.send(whole(500, b"broken"))
            return
        now = time.monotonic()
        while self.arrived and self.arrived[0] < now - WINDOW_S:
            self.arrived.popleft()
        self.arrived.append(now)
        if len(self.arrived) > MOST:
            await call.send(whole(503, b"too many"))
            return
        prompt, asked = len(call.body["prompt"]), call.body["max_tokens"]
        if prompt > self.silent_above:
            self.running += 1
            await call.send(EVENT_STREAM)
            try:
                while not call.gone:
                    await asyncio.sleep(0.01)
            finally:
                self.running -= 1
            return
        tokens = b"".join([event()] * (asked - 1) + [event(finish="length"), usage(prompt, asked), DONE])
        await call.send(EVENT_STREAM + chunk(tokens) + b"0\r\n\r\n")


@pytest.fixture
def server():
    """In a thread of its own."""
    limited = LimitedServer()
    stop, started = threading.Event(), threading.Event()

    async def main():
        async with ScriptedServer(limited.answer) as scripted:
            limited.url = scripted.url
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    started.wait(10)
    yield limited
    stop.set()
    thread.join()


SHORT = ["--prompt-tokens", 5, "--output-tokens", 3, "--warmup", 0.3, "--min-seconds", 0.5, "--max-seconds", 1]


def parse(*options):
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers(dest="command", required=True))
    return parser.parse_args(["bench", "goodput", *map(str, options)])


GENEROUS = ["--ttft", "10s", "--tpot", "10s"]


def test_the_goodput_of_a_server_that_refuses_what_is_too_much_is_found(server, tmp_path, capsys):
    saved = tmp_path / "out.json"
    options = ["--url", server.url, *GENEROUS, *SHORT, "--max-seconds", 3, "--precision", 0.1, "--start-rate", 30]
    options += ["--api-key", "secret"]
    assert run(parse(*options, "--save", saved)) == 0
    result = json.loads(saved.read_text())
    (row,) = result["rows"]
    (found,) = row["found"]
    assert found["low"] / 1.2 <= known_goodput() <= found["high"] * 1.2
    assert found["low"] <= found["requests_per_s"] <= found["high"] <= 1.1001 * found["low"]
    assert [probe["rate"] for probe in row["probes"]][:2] == [30, 60]
    for probe in row["probes"]:
        interval, run_ = probe["verdicts"][0]["interval"], probe["run"]
        refused = run_["failures"].get("http 503", 0)
        assert interval["low"] <= interval["attainment"] <= interval["high"]
        assert interval["attainment"] == pytest.approx(1 - refused / run_["requests"])
        assert 0.5 <= probe["counted_s"] <= 3
        assert probe["drained"]
        assert run_["each"] == []
    assert (result["schema"], result["kind"], result["interrupted"]) == (1, "tidegate bench goodput", False)
    assert result["versions"].keys() == {"tidegate", "python"}
    assert result["settings"]["model"] == "scripted"
    assert "secret" not in saved.read_text()
    text = capsys.readouterr().out
    assert "goodput TTFT ≤ 10000 ms, TPOT ≤ 10000 ms" in text
    assert "× http 503: too many" in text


def test_a_probe_ends_without_waiting_for_requests_that_have_missed_already_and_abandons_them(server, tmp_path):
    server.silent_above = 100
    saved, lengths = tmp_path / "out.json", tmp_path / "lengths.csv"
    lengths.write_text("10,3\n200,3\n20,3\n30,3\n")
    options = [
        "--url",
        server.url,
        "--workload",
        lengths,
        "--ttft",
        "200ms",
        "--tpot",
        "10s",
        "--slo",
        "ttft=300ms,tpot=10s",
    ]
    options += [*SHORT[4:], "--start-rate", 40, "--max-rate", 40, "--save", saved]
    assert run(parse(*options)) == 0
    (row,) = json.loads(saved.read_text())["rows"]
    for probe in row["probes"]:
        for verdict in probe["verdicts"]:
            assert verdict["interval"]["attainment"] == pytest.approx(0.75, abs=0.05)
            shares = [quartile["attainment"] for quartile in verdict["by_prompt"]]
            assert shares[0] == shares[1] == shares[2] == 1.0
            assert shares[3] <= 0.25
        failures = probe["run"]["failures"]
        assert failures == {"abandoned": pytest.approx(probe["run"]["requests"] / 4, abs=2)}
        assert probe["drained"]
    assert [probe["goal"] for probe in row["probes"]] == [0, 0, 0]  # they say all that there is to say on the other
    assert [found["low"] for found in row["found"]] == [0.0, 0.0]
    for _ in range(1000):  # the server sees a closed connection when it next looks
        if server.running:
            time.sleep(0.01)
    assert server.running == 0


def test_a_sweep_sets_each_combination_and_leaves_the_best(server, tmp_path, capsys):
    saved, picture = tmp_path / "out.json", tmp_path / "out.png"
    server.operator = {
        "/admin/info": (200, {"mode": "semi"}),
        "/admin/stats": (200, {"lanes": {"D": {"phases": "D"}, "P": {"phases": "P"}}}),
        "/admin/settings": (200, {}),
    }
    options = ["--url", server.url, *GENEROUS, *SHORT, "--start-rate", 20, "--max-rate", 20, "--save", saved]
    if importlib.util.find_spec("matplotlib"):
        options += ["--plot", picture]
    assert run(parse(*options, "--sweep", "settings.slice_ms=10,20.5", "--sweep", "settings.order=fcfs")) == 0
    bodies = [{"slice_ms": 10, "order": "fcfs"}, {"slice_ms": 20.5, "order": "fcfs"}]
    assert [body for _, body in server.posted] == [*bodies, *bodies, bodies[0]]
    result = json.loads(saved.read_text())
    assert result["server"] == {"mode": "semi"}
    assert [row["setting"]["settings.slice_ms"] for row in result["rows"]] == [10, 20.5]
    assert [row["found"][0]["high"] for row in result["rows"]] == [None, None]
    text = capsys.readouterr().out
    assert "settings.slice_ms=20.5 settings.order=fcfs" in text
    assert "The server now has the best setting: settings.slice_ms=10 settings.order=fcfs." in text
    if picture.exists():
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_writes_what_there_is(server, tmp_path):
    saved = tmp_path / "out.json"
    options = ["--url", server.url, *GENEROUS, *SHORT, "--max-seconds", 60, "--start-rate", 40, "--save", saved]
    command = [sys.executable, "-m", "tidegate.cli", "bench", "goodput", *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.split()[:1] == ["40"]:  # the row of the first probe
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 130
    result = json.loads(saved.read_text())
    assert result["interrupted"]
    (row,) = result["rows"]
    assert row["state"] == "unfinished"
    assert [probe["rate"] for probe in row["probes"]] == [40]
    assert row["found"][0]["low"] == 40
    assert "broken off" in rest


def test_a_server_that_does_not_recover_ends_the_search_and_leaves_what_there_is(server, tmp_path):
    saved = tmp_path / "out.json"
    server.answers_left = 100
    options = ["--url", server.url, *GENEROUS, *SHORT, "--start-rate", 20, "--drain", 0.3, "--save", saved]
    with pytest.raises(TidegateError, match="not recovered from its last load: http 500: broken"):
        run(parse(*options))
    result = json.loads(saved.read_text())
    assert "http 500" in result["error"]
    assert not result["interrupted"]
    assert [row["state"] for row in result["rows"]] == ["unfinished"]
    assert result["rows"][0]["probes"][0]["rate"] == 20


def test_loads_that_change_in_time_are_sent(server, tmp_path):
    trace, saved = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [{"timestamp": at, "input_length": 20, "output_length": 2} for at in (0, 400, 3000)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    options = ["--url", server.url, *GENEROUS, *SHORT[4:], "--start-rate", 20, "--max-rate", 20, "--save", saved]
    for load in (
        ["--workload", trace, "--own-times"],
        ["--workload", "chat@0.5,conv@0.5"],
        ["--burst", "3:0.2:0.3", "--burstiness", "0.5"],
    ):
        assert run(parse(*options, *load)) == 0
        (row,) = json.loads(saved.read_text())["rows"]
        assert row["found"][0]["low"] == 20


def test_the_search_over_steps_with_rates_begins_at_their_mean(server, tmp_path):
    saved, steps = tmp_path / "out.json", "chat@0.5x30,conv@0.5x10"
    options = ["--url", server.url, *GENEROUS, *SHORT[4:], "--workload", steps, "--max-rate", 20, "--save", saved]
    assert run(parse(*options)) == 0
    (row,) = json.loads(saved.read_text())["rows"]
    assert [probe["rate"] for probe in row["probes"]] == [20.0]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--ttft", "500ms"], "--ttft and --tpot"),
        (["--min-seconds", "9", "--max-seconds", "8"], "--min-seconds must not"),
        (["--own-times"], "--own-times needs"),
        (["--workload", "conv@100,code@100"], "repeats itself every 200 s.*raise --max-seconds"),
        (["--workload", "conv@7,code@5", "--burst", "2:3:5", "--max-seconds", "20"], "every 24 s"),
        (["--workload", "conv@10,code"], "give the last step"),
        (["--workload", "talk"], "no workload 'talk'"),
        (["--sweep", "mode=a", "--sweep", "mode=b"], "names mode twice"),
        (["--sweep", "mode=a"], "has no /admin/info"),
    ],
)
def test_options_that_do_not_fit_together_are_told_in_a_sentence(server, options, problem):
    with pytest.raises(ConfigError, match=problem):
        run(parse("--url", server.url, *options))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--ttft", "500"], "not a time such as 25ms"),
        (["--attainment", "90"], "between 0 and 1"),
        (["--confidence", "1"], "between 0 and 1"),
        (["--precision", "0"], "between 0 and 1"),
        (["--start-rate", "0"], "more than 0"),
        (["--sweep", "mode"], "not a setting with values"),
        (["--sweep", "mode=a,,b"], "not a setting with values"),
        (["--sweep", "a.b.c=1"], "not a setting with values"),
        (["--cut-off", "2"], "between 0 and 1"),
        (["--burst", "4:5"], "not FACTOR:ON:OFF"),
        (["--burst", "4:0:5"], "more than 0"),
        (["--burstiness", "0"], "more than 0"),
        (["--slo-metric", "ttft"], "invalid choice"),
    ],
)
def test_options_that_make_no_sense_end_with_exit_code_2(options, problem, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*options)
    assert end.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_server_that_can_not_be_measured_is_told(server):
    server.silent_above = 0
    with pytest.raises(TidegateError, match="first short request: timeout"):
        run(parse("--url", server.url, "--timeout", 0.2))
