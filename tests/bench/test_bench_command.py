"""`tidegate bench serve` against Tidegate's own server with an engine whose timing is known."""

import argparse
import importlib.util
import json
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import uvicorn
import uvloop

from tidegate.base.errors import ConfigError, TidegateError
from tidegate.bench.command import add_bench, run
from tidegate.server.app import create_app
from tidegate.server.fake import FakeEngine, Script, fake_info
from tidegate.server.run import listen
from tidegate.server.settings import ServerSettings

STEP_S = 0.02
LONG_TOKENS = 500
LONG_WAIT_STEPS = 30


def waits_for_long_prompts(request):
    """One token a step; a long prompt's first after many steps."""
    return Script([7], wait_steps=LONG_WAIT_STEPS if len(request.prompt) >= LONG_TOKENS else 0)


@pytest.fixture(scope="module")
def url():
    """A server in a thread, whose model is called "fake"."""
    listener = listen("127.0.0.1", 0)
    stopped = []

    async def main():
        engine = FakeEngine(waits_for_long_prompts, step_s=STEP_S, info=fake_info(max_model_len=2000))
        app = create_app(engine, None, ServerSettings(model_names=("fake",), api_keys=("secret",)))
        server = uvicorn.Server(uvicorn.Config(app, http="httptools", lifespan="off", log_config=None))
        stopped.append(lambda: setattr(server, "should_exit", True))
        await server.serve([listener])
        await engine.close()

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    stopped[0]()
    thread.join()


def parse(*options):
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers(dest="command", required=True))
    return parser.parse_args(["bench", "serve", *map(str, options)])


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("input,output\n10,8\n600,8\n20,4\n30,8\n")
    return path


def test_a_sweep_says_what_the_engine_did(url, lengths, tmp_path, capsys):
    saved = tmp_path / "out.json"
    slo = f"ttft={STEP_S * LONG_WAIT_STEPS * 0.9}s,tpot=10s"
    options = ["--url", url, "--api-key", "secret", "--workload", lengths, "--rate", "40,20", "--num-requests", 8]
    assert run(parse(*options, "--slo", slo, "--save", saved)) == 0
    result = json.loads(saved.read_text())
    text = capsys.readouterr().out
    assert result["settings"]["model"] == "fake"
    assert result["settings"]["api_key"] is None
    assert "secret" not in saved.read_text()
    assert [run["offered_rate"] for run in result["runs"]] == [20.0, 40.0]
    for run_ in result["runs"]:
        assert run_["failures"] == {}
        assert [request["prompt_tokens"] for request in run_["each"]] == [10, 600, 20, 30] * 2
        assert [request["output_tokens"] for request in run_["each"]] == [8, 8, 4, 8] * 2
        assert run_["token_check"] == {"events": 56, "tokens": 56, "differing": 0, "counted": 8}
        for request in run_["each"]:
            waited = LONG_WAIT_STEPS if request["prompt_tokens"] >= LONG_TOKENS else 0
            latency, steps = request["latency"], request["output_tokens"] - 1
            assert latency["ttft_s"] >= 0.9 * waited * STEP_S
            assert latency["ttft_s"] + steps * latency["tpot_s"] >= 0.9 * (waited + steps) * STEP_S
        assert run_["attainments"][0]["attainment"] <= 0.75
        assert run_["attainments"][0]["by_prompt"][3]["attainment"] == 0.0
    assert [found["slo"]["metric"] for found in result["goodputs"]] == ["tpot", "gap"]
    assert 0 < result["goodputs"][0]["requests_per_s"] < 20
    assert "20 requests/s: 8 requests" in text
    assert "goodput TTFT ≤ 540 ms" in text


def test_no_higher_rate_is_tried_once_no_slo_is_attained(url, lengths, capsys):
    options = ["--url", url, "--api-key", "secret", "--workload", lengths, "--rate", "50,100,inf", "--num-requests", 4]
    assert run(parse(*options, "--slo", "ttft=1ms,tpot=1ms", "--stop-below", 0.5)) == 0
    text = capsys.readouterr().out
    assert "50 requests/s: 4 requests" in text
    assert "100 requests/s" not in text


def test_a_traces_own_times_are_kept_and_its_length_is_divided_by_the_speedup(url, tmp_path):
    trace, saved = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [{"timestamp": at, "input_length": 20, "output_length": 2, "hash_ids": [0]} for at in (0, 400, 3000)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    options = ["--url", url, "--api-key", "secret", "--workload", trace, "--speedup", 10, "--save", saved]
    assert run(parse(*options)) == 0
    (result,) = json.loads(saved.read_text())["runs"]
    sent = [request["sent_s"] for request in result["each"]]
    assert result["offered_rate"] == pytest.approx(10.0)
    assert sent[1] >= 0.04 and 0.3 <= sent[2] < 3.0


def test_steps_and_bursts_are_sent_for_as_long_as_the_steps_last(url, tmp_path):
    saved = tmp_path / "out.json"
    options = ["--url", url, "--api-key", "secret", "--workload", "conv@0.5,code@0.5", "--rate", 20, "--save", saved]
    lengths = ["--prompt-tokens", 5, "--output-tokens", 2]
    assert run(parse(*options, *lengths, "--burst", "1000000:0.1:0.4", "--burstiness", 2, "--seed", 3)) == 0
    (result,) = json.loads(saved.read_text())["runs"]
    due = sorted(request["sent_s"] for request in result["each"])
    assert len(due) == result["requests"] == 20
    assert max(later - earlier for earlier, later in pairwise(due)) >= 0.3


def test_fixed_lengths_all_at_once(url, tmp_path):
    saved = tmp_path / "out.json"
    options = ["--url", url, "--api-key", "secret", "--rate", "inf", "--num-requests", 5, "--max-concurrency", 2]
    assert run(parse(*options, "--prompt-tokens", 33, "--output-tokens", 3, "--save", saved)) == 0
    (result,) = json.loads(saved.read_text())["runs"]
    assert result["offered_rate"] is None
    assert {(r["prompt_tokens"], r["output_tokens"]) for r in result["each"]} == {(33, 3)}
    assert result["turn_wait"]["max"] > 0


def test_a_terminal_is_shown_how_the_run_goes_on(url, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    options = ["--url", url, "--api-key", "secret", "--rate", "5", "--num-requests", 4]
    assert run(parse(*options, "--prompt-tokens", 5, "--output-tokens", 2)) == 0
    shown = capsys.readouterr().err
    assert "5 requests/s preparing prompts" in shown
    assert "of 4 done" in shown


def test_requests_that_the_server_refuses_are_failures_with_its_words(url, capsys):
    options = ["--url", url, "--api-key", "secret", "--rate", "inf", "--num-requests", 2]
    assert run(parse(*options, "--prompt-tokens", 5000)) == 1
    assert "2 × http 400" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra")
@pytest.mark.parametrize("metric", ["tpot", "gap"])
def test_a_picture_is_drawn(url, lengths, tmp_path, metric):
    picture = tmp_path / "out.png"
    options = ["--url", url, "--api-key", "secret", "--workload", lengths, "--rate", "50,inf", "--num-requests", 4]
    assert run(parse(*options, "--plot", picture, "--slo-metric", metric)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_refused_before_anything_is_sent(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        run(parse("--url", "http://127.0.0.1:9", "--plot", "out.png"))


@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_results_that_could_not_be_written_are_refused_before_anything_is_sent(option, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"no directory .*nowhere"):
        run(parse("--url", "http://127.0.0.1:9", option, tmp_path / "nowhere" / "out"))


def test_a_server_that_fails_the_first_request_is_not_measured(url):
    with pytest.raises(TidegateError, match=r"first short request: http 401"):
        run(parse("--url", url, "--api-key", "wrong", "--model", "fake"))
    with pytest.raises(TidegateError, match=r"first short request: http 404"):
        run(parse("--url", url, "--api-key", "secret", "--model", "nobody"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--rate", "0"], "more than 0"),
        (["--rate", "2,fast"], "not a list of rates"),
        (["--slo", "ttft=500ms"], "not an SLO"),
        (["--slo", "ttft=500,tpot=25"], "not an SLO"),
        (["--slo", "ttft=5ms,tpot=5ms,more=1s"], "not an SLO"),
        (["--num-requests", "5", "--seconds", "5"], "not allowed with"),
        (["--num-requests", "0"], "1 or more"),
        (["--speedup", "inf"], "more than 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, problem, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*options)
    assert end.value.code == 2
    assert problem in capsys.readouterr().err


def test_slos_are_read_in_seconds_and_milliseconds():
    first, second = parse("--slo", "ttft=500ms,tpot=0.025s", "--slo", "tpot=1s,ttft=2s").slo
    assert (first.ttft_s, first.tpot_s) == (0.5, 0.025)
    assert (second.ttft_s, second.tpot_s) == (2.0, 1.0)


def test_the_load_generator_loads_neither_torch_nor_matplotlib():
    code = "import sys, tidegate.bench.command as c; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
