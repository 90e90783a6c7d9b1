"""`tidegate simulate` from the command line to its answer."""

import json

import msgspec
import pytest

from tidegate.bench.simulate import search_goodput
from tidegate.cli import main
from tidegate.slo.latency import Costs, LatencyModel, Padding, rough

LOAD = ["--rate", "4", "--num-requests", "40", "--slo", "ttft=1s,tpot=50ms"]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.json"
    path.write_bytes(msgspec.json.encode(rough(30_000.0)))
    return str(path)


def simulate(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["simulate", *arguments])
    printed = capsys.readouterr()
    return end.value.code, printed.out, printed.err


def answer(capsys, *arguments):
    code, out, err = simulate(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_it_prints_attainment_latencies_and_what_the_gate_did(model, capsys):
    code, out, _ = simulate(capsys, "--truth", model, *LOAD)
    assert code == 0
    for part in ("40 requests", "TTFT ≤ 1000 ms", "100.0%", "TPOT (mean gap)", "by prompt:", "busy: D", "gate:"):
        assert part in out


def test_json_has_the_settings_and_repeats_with_its_seed(model, capsys):
    first = answer(capsys, "--truth", model, *LOAD, "--noise", "0.1", "--seed", "3")
    assert first["settings"]["seed"] == 3 and first["slo"] == {"ttft_s": 1.0, "tpot_s": 0.05, "metric": "tpot"}
    (result,) = first["results"]
    assert result["outcome"]["requests"] == 40 and result["goodput"] is None
    assert answer(capsys, "--truth", model, *LOAD, "--noise", "0.1", "--seed", "3") == first
    assert answer(capsys, "--truth", model, *LOAD, "--noise", "0.1", "--seed", "4")["results"] != first["results"]


def test_a_sweep_is_every_combination_and_varies_shares_only_where_they_can_be_set(model, capsys):
    lists = ["--mode", "chunked,semi", "--max-num-batched-tokens", "512,1024", "--prefill-share", "0.3,0.6"]
    results = answer(capsys, "--truth", model, *LOAD, *lists, "--sweep")["results"]
    tried = [
        (r["setting"]["mode"], r["setting"]["max_num_batched_tokens"], r["setting"]["prefill_share"]) for r in results
    ]
    assert tried == [
        ("chunked", 512, None), ("chunked", 1024, None),
        ("semi", 512, 0.3), ("semi", 512, 0.6), ("semi", 1024, 0.3), ("semi", 1024, 0.6),
    ]  # fmt: skip
    code, table, _ = simulate(capsys, "--truth", model, *LOAD, *lists, "--sweep")
    assert code == 0 and len(table.splitlines()) == 2 + 6


def test_goodput_is_a_rate_that_attains_the_slo_while_a_higher_one_does_not(model, capsys):
    arguments = ["--truth", model, "--mode", "chunked", "--slo", "ttft=300ms,tpot=30ms", "--num-requests", "600"]
    (result,) = answer(capsys, *arguments, "--rate", "2", "--goodput")["results"]
    rate = result["goodput"]
    assert rate > 0 and result["setting"]["rate"] == rate and result["outcome"]["attainment"] >= 0.9
    (above,) = answer(capsys, *arguments, "--rate", str(rate * 1.02))["results"]
    assert above["outcome"]["attainment"] < 0.9


def test_long_prompts_that_miss_show_in_their_quartile(tmp_path, capsys):
    """One of four prompts takes longer by itself than the limit on TTFT; all others are in time, and far between."""
    trace = tmp_path / "lengths.csv"
    trace.write_text("\n".join(["100,5", "200,5", "300,5", "9000,5"] * 10))
    load = ["--truth", "rough:10000", "--workload", str(trace), "--rate", "0.1", "--num-requests", "40"]
    (result,) = answer(capsys, *load, "--slo", "ttft=500ms,tpot=1s")["results"]
    quarters = result["outcome"]["by_prompt"]
    assert [(q["from_tokens"], q["to_tokens"]) for q in quarters] == [(100, 100), (200, 200), (300, 300), (9000, 9000)]
    assert [q["attainment"] for q in quarters] == [1.0, 1.0, 1.0, 0.0]
    _, said, _ = simulate(capsys, *load, "--slo", "ttft=500ms,tpot=1s")
    assert "by prompt: ≤100 100%" in said and "≤9,000 0%" in said
    _, table, _ = simulate(capsys, *load, "--slo", "ttft=500ms,tpot=1s", "--sweep")
    assert "≤100 100% · ≤200 100% · ≤300 100% · ≤9,000 0%" in table


def test_a_trace_of_steps_is_scaled_as_a_whole_until_too_few_of_all_its_requests_attain(model, capsys):
    """One flag; its own rates without --rate, each step once; goodput is the mean rate, to be compared with its own."""
    shifting = ["--truth", model, "--workload", "chat@20x4,long@20x1", "--slo", "ttft=400ms,tpot=30ms"]
    (own,) = answer(capsys, *shifting)["results"]
    assert own["setting"]["rate"] == 2.5 and own["outcome"]["requests"] == 100
    (result,) = answer(capsys, *shifting, "--goodput")["results"]
    rate = result["goodput"]
    assert result["outcome"]["requests"] == round(40 * rate) and result["outcome"]["attainment"] >= 0.9
    (above,) = answer(capsys, *shifting, "--rate", str(rate * 1.02))["results"]
    assert above["outcome"]["attainment"] < 0.9


def test_kinds_of_steps_take_longer_by_what_a_server_has_learned(tmp_path, capsys):
    path = tmp_path / "constant.json"
    path.write_bytes(msgspec.json.encode(LatencyModel(Costs((1, 2), (0.01, 0.01), 0.0, 0.0, 0.0))))
    load = ["--rate", "2", "--num-requests", "40", "--prompt-tokens", "300", "--output-tokens", "50"]
    setting = ["--mode", "prefill-first", "--launch-ms", "0", "--slice-ms", "1000", "--max-num-seqs", "1"]
    arguments = ["--truth", str(path), *load, *setting]
    as_measured = answer(capsys, *arguments)["results"][0]["outcome"]
    later = answer(capsys, *arguments, "--factors", "decode=1.5,prefill=3")["results"][0]["outcome"]
    assert as_measured["tpot"]["p50"] == pytest.approx(0.01) and later["tpot"]["p50"] == pytest.approx(0.015)
    before, after = (spent["prefill"] / spent["decode"] for spent in (as_measured["spent"], later["spent"]))
    assert after == pytest.approx(2.0 * before)


def test_several_engines_take_a_load_that_one_can_not(capsys):
    arguments = ["--truth", "rough:3000", "--rate", "5", "--num-requests", "60", "--slo", "ttft=3s,tpot=1s"]
    one, four = (answer(capsys, *arguments, "--engines", n)["results"][0]["outcome"] for n in ("1", "4"))
    assert one["attainment"] < 0.7 < 0.9 < four["attainment"]


def test_chunks_leave_room_for_what_the_device_pads(tmp_path, capsys):
    """As a server does: a budget of 256 with decodes in it is padded to 256 tokens, and not to 512."""
    padded = Costs((256, 512), (0.01, 10.0), 0.0, 0.0, 0.0, Padding((256, 512), rows=16))
    path = tmp_path / "padded.json"
    path.write_bytes(msgspec.json.encode(LatencyModel(padded)))
    setting = ["--mode", "chunked", "--max-num-batched-tokens", "256", "--slice-ms", "1000"]
    load = ["--rate", "3", "--num-requests", "40", "--prompt-tokens", "2000", "--output-tokens", "50"]
    (result,) = answer(capsys, "--truth", str(path), *load, *setting)["results"]
    assert result["outcome"]["tpot"]["p99"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--truth", "nowhere.json", "--rate", "1"], "nowhere.json can't be read"),
        (["--truth", "rough:fast", "--rate", "1"], "rough:fast can't be read"),
        (["--truth", "rough:1000"], "give --rate"),
        (["--truth", "rough:1000", "--rate", "1,2"], "--sweep"),
        (["--truth", "rough:1000", "--rate", "1", "--slo", "ttft=1"], "SLO"),
        (["--truth", "rough:1000", "--rate", "1", "--workload", "nothing"], "nothing"),
        (["--truth", "rough:1000", "--rate", "1", "--max-prefill-tokens", "0"], "1 or more"),
        (["--truth", "rough:1000", "--rate", "1", "--mode", "best"], "unknown mode"),
        (["--truth", "rough:1000", "--rate", "1", "--factors", "sleep=2"], "unknown kind of step 'sleep'"),
        (["--truth", "rough:1000", "--rate", "1", "--factors", "decode=-1"], "more than 0"),
    ],
)
def test_what_can_not_be_simulated_is_said_with_what_to_change(arguments, message, capsys):
    code, _, err = simulate(capsys, *arguments)
    assert code == 2 and message in err


def test_goodput_is_found_to_its_precision():
    for start in (0.3, 13.0, 400.0):
        found = search_goodput(lambda rate: 1.0 if rate <= 13.7 else 0.5, start)
        assert 13.7 / 1.01 <= found <= 13.7


def test_no_goodput_where_no_rate_attains_the_slo():
    assert search_goodput(lambda rate: 0.89, 1.0) == 0.0


def test_goodput_is_what_batches_allow(tmp_path, capsys):
    """Every batch takes 10 ms, and one request at a time has ten of them: ten a second, if they came evenly."""
    model = tmp_path / "constant.json"
    model.write_bytes(msgspec.json.encode(LatencyModel(Costs((1, 2), (0.01, 0.01), 0.0, 0.0, 0.0))))
    lengths = ["--prompt-tokens", "10", "--output-tokens", "10", "--max-num-seqs", "1", "--burstiness", "1e6"]
    host = ["--launch-ms", "0", "--lead-ms", "0", "--deliver-ms", "0"]
    load = ["--rate", "1", "--num-requests", "200", "--slo", "ttft=15ms,tpot=11ms", "--mode", "chunked"]
    (result,) = answer(capsys, "--truth", str(model), *lengths, *host, *load, "--goodput")["results"]
    assert result["goodput"] == pytest.approx(10.0, rel=0.03)
