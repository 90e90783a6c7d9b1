"""Lanes whose shares are fixed when their processes start: what a request gets does not depend on how often the shares
change, or on what dies."""

import itertools
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mps_on_cpu import WAIT_S, Lanes, Serving, division
from tiny_lane import MODEL, generate, new_pool, new_runner

from tidegate.base.events import LaneGone
from tidegate.base.request import RequestSpec, SamplingParams
from tidegate.node import shared_fds

TOKENS = 30
ids = itertools.count()


def requests(count):
    """Prompts of 3 to 30 tokens, every second one sampled, with penalties."""
    made = []
    for i in range(count):
        prompt = [(7 * i + 3 * j) % MODEL.vocab_size for j in range(3 + 9 * i % 28)]
        params = SamplingParams(temperature=0.9, seed=i, repetition_penalty=1.2) if i % 2 else SamplingParams()
        made.append(RequestSpec(f"r{next(ids)}", prompt, TOKENS, params))
    return made


@pytest.fixture(scope="module")
def expected():
    """Of ``requests(12)``, each alone."""
    return [generate(new_runner(new_pool()), r.prompt, TOKENS, r.sampling) for r in requests(12)]


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    node = Serving(tmp_path_factory.mktemp("mps"))
    yield node
    node.close()


def until(serving, condition, expected):
    """Serves waves of requests, whose tokens are right, until the condition holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        assert serving.tokens(requests(12)) == expected
        time.sleep(0.2)  # processes that start have to share the cores with this


def restarts(serving):
    return {name: lane.restarts for name, lane in serving.stats().lanes.items()}


def test_shares_that_rotate_under_load_change_no_token_and_lose_no_lane(serving, expected):
    for share in (0.7, 0.3):
        serving.ask(share)
        until(serving, lambda share=share: serving.rotation.active == division(share), expected)
    prepared = len(serving.started)
    serving.ask(0.7)
    until(serving, lambda: serving.rotation.active == division(0.7), expected)
    assert len(serving.started) == prepared, "the last one in force was still there"
    assert restarts(serving) == {"P": 0, "D": 0}
    assert serving.stats().blocks_used == 0


def test_each_process_has_the_share_it_was_started_for_and_a_lane_alone_has_the_device(serving):
    percent = serving.rotation.active.percent("P")
    assert serving.lanes.reading("P", alone=False).sms == percent
    assert serving.lanes.reading("P", alone=True).sms == 100
    assert serving.lanes.reading("D", alone=False).sms == serving.lanes.reading("D", alone=True).sms == 100


@pytest.mark.parametrize("lane", ["P", "D"])
def test_a_killed_process_changes_no_token(serving, expected, lane):
    before, pid = restarts(serving), serving.lanes.pids()[lane]

    def kill(outputs):
        nonlocal pid
        if outputs > 20 and pid:
            os.kill(pid, signal.SIGKILL)
            pid = None

    assert serving.tokens(requests(12), kill) == expected
    until(serving, lambda: set(serving.lanes.pids()) == {"P", "D"} and len(serving.lanes._workers) >= 3, expected)
    lost = restarts(serving)[lane] - before[lane]
    assert lost == 1 if lane == "D" else lost <= 1, "prefill has a second process, and may not have been running"


def test_one_that_dies_while_it_is_prepared_is_not_missed_and_the_share_is_had_all_the_same(serving, expected):
    before = restarts(serving)
    prepared = len(serving.started)
    serving.doomed.add(("P", 80))
    serving.ask(0.8)
    until(serving, lambda: serving.rotation.active == division(0.8), expected)
    assert not serving.doomed and serving.started[prepared:] == [("P", 80)] * 2
    assert restarts(serving) == before


def test_when_the_daemon_dies_it_is_started_again_and_all_lanes_with_it(serving, expected, tmp_path):
    before, workers = restarts(serving), set(serving.lanes._workers.values())
    daemon = serving.daemon._pid()

    def kill(outputs):
        nonlocal daemon
        if outputs > 20 and daemon:
            os.kill(daemon, signal.SIGKILL)
            daemon = None

    assert serving.tokens(requests(12), kill) == expected
    assert serving.daemon.alive
    assert not workers & set(serving.lanes._workers.values())
    assert restarts(serving) == {lane: count + 1 for lane, count in before.items()}


@pytest.mark.parametrize(
    ("fault", "blamed", "words"),
    [("no context", True, ("the server is not ready", "--sharing")), ("no memory", False, ("can't be mapped",))],
)
def test_a_lane_that_fails_at_its_first_start_is_not_tried_again_and_says_why(tmp_path, fault, blamed, words):
    lanes = Lanes(tmp_path)
    lanes.faults.append(fault)
    watched = {}
    lanes.lanes.watch(watched.__setitem__, watched.pop)
    lanes.lanes.start("D")
    events = []
    while not events:
        ready = select.select(list(watched), [], [], WAIT_S)[0]
        assert ready
        for fd in ready:
            events += watched[fd]() if fd in watched else []
    lanes.lanes.close()
    (gone,) = events
    assert isinstance(gone, LaneGone) and gone.config is blamed
    assert all(word in gone.reason for word in words)


def test_no_process_is_left_when_lanes_are_closed(tmp_path):
    lanes = Lanes(tmp_path)
    lanes.lanes.start("P")
    processes = [worker.pid for worker in lanes.lanes._workers.values()]
    assert len(processes) == 2
    lanes.lanes.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes) and not lanes.daemon.alive


def test_file_descriptors_handed_over_a_socket_name_the_same_files():
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with ours, theirs:
        shared_fds.send(ours, [reading, writing])
        ours.send(b"more")
        received = shared_fds.receive(theirs, 2)
        os.write(received[1], b"through both")
        assert os.read(reading, 64) == b"through both"
        assert theirs.recv(64) == b"more", "what is said afterwards is not touched"
        shared_fds.send(ours, [reading])
        with pytest.raises(EOFError):
            shared_fds.receive(theirs, 2)
    for fd in (reading, writing, *received):
        os.close(fd)
