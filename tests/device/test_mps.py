"""The life of an MPS control daemon, with an executable that stands in for NVIDIA's."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.base.errors import ConfigError
from tidegate.device import mps
from tidegate.device.mps import MpsDaemon, percent_of, why_not

COMMAND = str(Path(__file__).with_name("fake_mps_control.sh"))
GPU = "GPU-0123"


@pytest.fixture
def new_daemon(tmp_path):
    made = []

    def make(home="own"):
        made.append(MpsDaemon(GPU, tmp_path / home, COMMAND))
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()


def pid_of(home):
    return int((home / "pipes" / "nvidia-cuda-mps-control.pid").read_text())


def exists(pid):
    return Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()


def test_a_daemon_has_directories_of_its_own_and_one_gpu_and_is_gone_when_closed(new_daemon, tmp_path):
    daemon = new_daemon()
    daemon.start()
    environment = dict(
        line.split("=", 1) for line in (tmp_path / "own/logs/environment").read_text().splitlines() if "=" in line
    )
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "own/pipes")
    assert environment["CUDA_MPS_LOG_DIRECTORY"] == str(tmp_path / "own/logs")
    assert environment["CUDA_VISIBLE_DEVICES"] == GPU
    assert daemon.alive
    pid = pid_of(tmp_path / "own")
    daemon.close()
    assert not exists(pid) and not daemon.alive


def test_a_client_finds_the_daemon_and_its_share_in_its_environment(new_daemon, tmp_path):
    daemon = new_daemon()
    environment = daemon.client_environment(40, low_priority=True)
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "own/pipes")
    assert environment["CUDA_VISIBLE_DEVICES"] == GPU
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert environment["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    assert daemon.client_environment(100)["CUDA_MPS_CLIENT_PRIORITY"] == "0"


def test_a_share_is_a_percentage_that_leaves_no_lane_with_too_few_sms():
    assert [percent_of(share) for share in (0.05, 0.54, 0.7, 0.99)] == [20, 55, 70, 90]


def test_its_death_is_told_and_it_can_be_started_again(new_daemon, tmp_path):
    daemon = new_daemon()
    daemon.start()
    watch = daemon.watch()
    assert not select.select([watch], [], [], 0)[0]
    os.kill(pid_of(tmp_path / "own"), signal.SIGKILL)
    assert select.select([watch], [], [], 5)[0]
    os.close(watch)
    assert not daemon.alive and daemon.watch() is None
    daemon.start()
    assert daemon.alive


def test_one_that_does_not_quit_is_killed(new_daemon, tmp_path, monkeypatch):
    monkeypatch.setattr(mps, "QUIT_SECONDS", 0.1)
    daemon = new_daemon()
    daemon.start()
    pid = pid_of(tmp_path / "own")
    monkeypatch.setenv("FAKE_MPS_HANGS", "1")
    daemon.close()
    assert not exists(pid)


def test_one_left_over_by_an_engine_that_was_killed_is_ended_before_a_fresh_one_starts(new_daemon, tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from tidegate.device.mps import MpsDaemon\n"
        "MpsDaemon(sys.argv[1], Path(sys.argv[2]), sys.argv[3]).start(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, GPU, str(tmp_path / "own"), COMMAND], timeout=60)
    left = pid_of(tmp_path / "own")
    assert exists(left)
    daemon = new_daemon()
    daemon.start()
    assert not exists(left) and exists(pid_of(tmp_path / "own"))


def test_a_gpu_that_another_engine_shares_by_mps_is_refused_and_its_daemon_left_alone(new_daemon):
    first = new_daemon()
    first.start()
    with pytest.raises(ConfigError, match="another Tidegate"):
        new_daemon()
    assert first.alive


def test_a_daemon_that_does_not_start_says_why(new_daemon, monkeypatch):
    monkeypatch.setenv("FAKE_MPS_REFUSES", "1")
    with pytest.raises(ConfigError, match="too old"):
        new_daemon().start()


def test_without_the_command_or_with_somebody_elses_daemon_mps_is_refused_with_what_to_do(
    new_daemon, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "theirs/pipes"))
    assert "not installed" in why_not("no-such-command")
    assert why_not(COMMAND) is None
    theirs = new_daemon("theirs")
    theirs.start()
    reason = why_not(COMMAND)
    assert "already runs" in reason and f"CUDA_MPS_PIPE_DIRECTORY={tmp_path / 'theirs/pipes'}" in reason
    theirs.close()
    assert why_not(COMMAND) is None
