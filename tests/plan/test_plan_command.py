"""``tidegate plan`` as a user runs it."""

import json

import msgspec
import pytest
import toy

from tidegate.cli import main
from tidegate.plan import search
from tidegate.plan.colocated import colocated
from tidegate.plan.command import setting_of
from tidegate.plan.summary import Summary
from tidegate.slo.latency_file import FORMAT

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A model's configuration and a trace of few short requests; simulations are short."""
    monkeypatch.setattr(search.search, "__defaults__", ((30, 40, 60),))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "trace.csv").write_text("\n".join(f"{100 + 10 * i},{10 + i}" for i in range(20)))
    return tmp_path


def plan(files, *more):
    arguments = ["plan", "--model", str(files / "config.json"), "--workload", str(files / "trace.csv"), *more]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


FITTING = ("--gpu", "h100", "--slo", "ttft=200ms,tpot=20ms")


def test_it_prints_a_table_reasons_and_the_command_and_writes_everything(files, capsys):
    out, picture = files / "plan.json", files / "plan.png"
    assert plan(files, *FITTING, "--json", str(out), "--plot", str(picture)) == 0
    said = capsys.readouterr().out
    found = msgspec.json.decode(out.read_bytes(), type=Summary)
    assert found.winner.design in said
    assert found.winner.commands[0] in said
    assert "no design passes" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_is_one_that_serve_understands(files, capsys):
    assert plan(files, *FITTING) == 0
    from tidegate.cli import parser

    command = next(line.split() for line in capsys.readouterr().out.splitlines() if "tidegate serve" in line)
    assert command[:2] == ["tidegate", "serve"]
    assert parser().parse_args(command[1:]).order == "slack"


def test_all_lists_every_candidate(files, capsys):
    plan(files, *FITTING, "--all")
    said = capsys.readouterr().out
    for name in (
        "prefill-first",
        "chunked 128",
        "chunked 2048",
        "semi 30%",
        "semi 79%",
        "semi by semi-pd",
        "semi by drift",
        "auto",
    ):
        assert name in said


def test_the_commands_of_share_rules_are_ones_that_serve_understands(files):
    from tidegate.cli import parser

    arguments = ["plan", "--model", str(files / "config.json"), "--workload", str(files / "trace.csv"), *FITTING]
    setting = setting_of(parser().parse_args(arguments))
    found = {candidate.name: candidate.commands() for candidate in colocated(setting)}
    for gate in ("semi-pd", "drift"):
        (command,) = found[f"semi by {gate}"]
        started = parser().parse_args(command.split()[1:])
        assert (started.mode, started.gate) == ("semi", gate)


def test_a_measured_latency_model_replaces_the_roofline(files, capsys):
    """By itself, or in the file that profile writes; one that is not divided leaves out what divides it."""
    (files / "model.json").write_bytes(msgspec.json.encode(toy.STEADY))
    assert plan(files, *FITTING, "--latency-model", str(files / "model.json")) == 0
    assert "latencies measured" in capsys.readouterr().out
    profiled = {"format": FORMAT, "samples": 9, **msgspec.to_builtins(toy.STEADY)}
    (files / "profile.json").write_bytes(msgspec.json.encode(profiled))
    assert plan(files, *FITTING, "--all", "--latency-model", str(files / "profile.json")) == 0
    said = capsys.readouterr().out
    assert "latencies measured" in said and "semi" not in said


def test_a_cpu_is_a_device_too(files, capsys):
    assert plan(files, "--gpu", "cpu:8", "--slo", "ttft=60s,tpot=2s") == 0
    assert "8 CPU cores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpu", "b300", "--slo", "ttft=1s,tpot=1s"), "known are a100, h100, h200"),
        (("--gpu", "h100", "--slo", "ttft=1s"), "a limit for ttft and one for tpot"),
        (("--gpu", "h100", "--slo", "ttft=1us,tpot=1us"), "nothing on 1 × H100"),
        ((*FITTING, "--gpus", "0"), "--gpus is at least 1"),
        ((*FITTING, "--gpus-per-node", "0"), "--gpus-per-node is at least 1"),
        ((*FITTING, "--latency-model", "/nowhere.json"), "can't be read as a latency model"),
        ((*FITTING, "--json", "/nowhere/plan.json"), "can't be written"),
        ((*FITTING, "--workload", "poems"), "no workload 'poems'"),
        ((*FITTING, "--workload", "conv@30,code@30"), "a plan is for one load"),
        ((*FITTING, "--model", "/nowhere/config.json"), "There is no model"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_and_exit_code_2(files, capsys, arguments, sentence):
    assert plan(files, *arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("tidegate: ") and said.count("\n") == 1
