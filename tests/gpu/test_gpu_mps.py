"""Lanes as processes that share the GPU by MPS: the same tokens while shares rotate, when a process dies, and when the
daemon does; and what is said where one runs already."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from engine_driver import EngineDriver, mixed_prompts
from test_gpu_engine import MAX_TOKENS, check, config

from tidegate.base.errors import ConfigError
from tidegate.device.mps import COMMAND, why_not

pytestmark = pytest.mark.skipif(
    why_not() is not None and "not installed" in why_not(), reason="there is no MPS daemon to start"
)
WAIT_S = 40.0


@pytest.fixture(scope="module")
def serving(tiny_on_gpu):
    path, model = tiny_on_gpu
    prompts = mixed_prompts(24, 1500, 1000, seed=8)
    with EngineDriver(config(path, mode="semi", sharing="mps", prefix_caching=False)) as engine:
        yield engine, model, prompts


def wave(serving, what, meanwhile=None):
    engine, model, prompts = serving
    answers = engine.answers([engine.spec(prompt, MAX_TOKENS) for prompt in prompts], meanwhile)
    check(model, prompts, answers, what)
    return [answer.tokens for answer in answers]


CLIENT = """
import sys, torch
from tidegate.base.specs import Region
from tidegate.device.gpu_memory import GpuMemory
numbers = GpuMemory(1 << 20, shared=int(sys.argv[1])).tensor(Region("numbers", "int32", (1000,), 4096))
assert numbers.sum().item() == 499500
numbers.add_(1)
torch.cuda.synchronize()
"""


def test_memory_of_a_process_that_is_no_client_is_shared_with_clients(tmp_path):
    import torch

    from tidegate.base.specs import Region
    from tidegate.device.gpu_memory import GpuMemory
    from tidegate.device.mps import MpsDaemon

    memory = GpuMemory(1 << 20)
    numbers = memory.tensor(Region("numbers", "int32", (1000,), 4096))
    numbers.copy_(torch.arange(1000, dtype=torch.int32))
    torch.cuda.synchronize()
    daemon = MpsDaemon(f"GPU-{torch.cuda.get_device_properties(0).uuid}", tmp_path)
    daemon.start()
    descriptor = memory.export()
    try:
        command = [sys.executable, "-c", CLIENT, str(descriptor)]
        environment = daemon.client_environment(50)
        subprocess.run(command, pass_fds=(descriptor,), env=environment, check=True, timeout=WAIT_S)
    finally:
        os.close(descriptor)
        daemon.close()
    assert numbers.sum().item() == 500500


def test_shares_that_rotate_under_load_change_no_token(serving):
    import torch

    total = torch.cuda.get_device_properties(0).multi_processor_count
    engine = serving[0]
    lanes = engine.stats().lanes
    assert lanes["D"].sms == total
    assert abs(lanes["P"].sms / total - 0.5) < 0.05, "what the process was started with is what it has"
    before = wave(serving, "before")
    engine.run(engine.engine.set_shares({"P": 0.3, "D": 0.7}))
    end, waves = time.monotonic() + WAIT_S, 0
    while abs(engine.stats().lanes["P"].sms / total - 0.3) > 0.05:
        assert time.monotonic() < end, "the share has not come into force"
        during = wave(serving, "while it rotates")
        waves += 1
    after = wave(serving, "afterwards")
    print(f"{waves} waves while a process was prepared")
    for tokens in (during, after):
        same = sum(a == b for a, b in zip(before, tokens, strict=True))
        assert same >= 0.8 * len(before), "bf16 may break ties differently, seldom"
    stats = engine.stats()
    assert stats.blocks_used == 0 and all(lane.restarts == 0 for lane in stats.lanes.values())


def test_a_killed_lane_comes_back_and_every_request_ends_once_with_its_tokens(serving):
    engine = serving[0]
    wave(serving, "decode killed", engine.kill_lane("D", after_outputs=60))
    lane = engine.stats().lanes["D"]
    assert lane.restarts >= 1 and lane.alive


def test_a_daemon_that_dies_is_started_again_with_all_lanes(serving):
    engine = serving[0]
    before = engine.stats().lanes["D"].restarts

    async def kill_daemon():
        (pid_file,) = Path(tempfile.gettempdir()).glob(f"tidegate-mps-{os.getuid()}-*/pipes/{COMMAND}.pid")
        os.kill(int(pid_file.read_text()), signal.SIGKILL)

    wave(serving, "daemon killed", kill_daemon())
    wave(serving, "after the daemon was killed")
    assert engine.stats().lanes["D"].restarts > before


def test_where_somebody_elses_daemon_runs_the_engine_says_so_and_leaves_it_alone(tiny_on_gpu, tmp_path, monkeypatch):
    theirs = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "p"), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "l")}
    for directory in theirs.values():
        Path(directory).mkdir()
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    subprocess.run([COMMAND, "-d"], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=20)
    try:
        with pytest.raises(ConfigError, match="already runs") as refused:
            EngineDriver(config(tiny_on_gpu[0], mode="semi", sharing="mps"))
        assert theirs["CUDA_MPS_PIPE_DIRECTORY"] in str(refused.value)
        assert why_not() is not None, "it still runs"
    finally:
        subprocess.run([COMMAND], input=b"quit\n", timeout=20)
