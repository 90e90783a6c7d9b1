"""``tidegate serve`` from start to stop, as a user runs it."""

import json
import re
import subprocess
import sys
import threading
import time

import httpx
import pytest
from conftest import ServerProcess  # of this folder
from refusal import refusal

from tidegate.cli.engine_options import mode_for


def serve(*arguments):
    command = [sys.executable, "-m", "tidegate.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_dummy_weights_need_no_tokenizer_and_sigterm_lets_running_requests_finish(tiny_config, tmp_path):
    server = ServerProcess(
        tmp_path / "log", tiny_config, "--load-format", "dummy", "--served-model-name", "m", "--mode", "chunked"
    ).wait_ready()
    assert "no tokenizer" in server.log.read_text()
    answers = []

    def ask():
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1500, "ignore_eos": True}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    while httpx.get(f"{server.url}/admin/stats").json()["decoding"] == 0:
        time.sleep(0.01)
    assert server.stop() == 0
    thread.join()
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 1500


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/nowhere/at/all",), "no file or directory"),
        (
            ("CONFIG", "--load-format", "dummy", "--max-model-len", "4000", "--num-gpu-blocks-override", "10"),
            "--max-model-len",
        ),
        (("CONFIG",), "safetensors"),
    ],
)
def test_what_cannot_be_served_ends_with_one_sentence_and_exit_code_2(tiny_config, arguments, words):
    assert words in refusal(*(tiny_config if a == "CONFIG" else a for a in arguments))


def test_profile_tells_the_error_by_kind_of_step_and_writes_what_serve_takes(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dummy = (tiny_config, "--load-format", "dummy", "--kv-cache-memory-bytes", "16MiB")
    out, samples = tmp_path / "model.json", tmp_path / "samples"
    command = [sys.executable, "-m", "tidegate.cli", "profile", *dummy, "--seconds", "4"]
    files = ["--out", str(out), "--samples", str(samples)]
    ended = subprocess.run([*command, *files], capture_output=True, text=True, timeout=120, check=True)
    kinds = re.findall(r"^(\w+(?: beside)?) +\d+ +[\d.]+% +[\d.]+%$", ended.stdout, re.MULTILINE)
    assert kinds == ["decode", "prefill", "hybrid", "decode beside", "prefill beside"]
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert {row["use"] for row in rows} == {"fitted", "other"}
    assert all(row["seconds"] > 0 and row["predicted"] > 0 for row in rows)
    server = ServerProcess(
        tmp_path / "log", *dummy, "--mode", "auto", "--slo", "ttft=1s,tpot=50ms", "--latency-model", str(out)
    ).wait_ready()
    assert "predictions: as given: " in server.log.read_text()
    assert server.stop() == 0


def test_a_port_in_use_is_said_at_once(server):
    assert "in use" in refusal("--port", server.url.rsplit(":", 1)[1])


def test_help_names_the_modes_and_the_flags_that_vllm_users_know():
    text = serve("--help").stdout
    for word in ("prefill-first", "chunked", "semi", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens",
                 "--served-model-name", "--api-key", "--enable-prefix-caching", "--gpu-memory-utilization",
                 "--chat-template", "--load-format"):  # fmt: skip
        assert word in text


@pytest.mark.parametrize(
    ("gate", "holds_slo", "mode"),
    [
        (None, False, "semi"),
        (None, True, "auto"),
        ("static", True, "semi"),
        ("drift", True, "semi"),
        ("auto", True, "auto"),
        ("auto", False, "auto"),  # which then asks for an SLO
    ],
)
def test_the_mode_follows_from_the_gate_and_the_slo_where_none_is_named(gate, holds_slo, mode):
    assert mode_for(gate, holds_slo) == mode
