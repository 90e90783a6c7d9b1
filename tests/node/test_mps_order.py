"""What is given to which of a lane's processes, and when: with processes that only note what they are told."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runner"))
from tiny_lane import batch, new_pool

from tidegate.base.batch import BatchResult, SlotSetup, TableUpdate
from tidegate.base.events import BatchDone, LaneLost, LaneReady
from tidegate.base.request import SamplingParams
from tidegate.node import wire
from tidegate.node.mps_lanes import WHOLE, MpsLanes
from tidegate.node.mps_worker import Worker
from tidegate.node.rotation import Division, Rotation


def division(percent):
    return Division((("P", percent),))


class Noting(Worker):
    """A worker without a process: answers when the test says so."""

    def __init__(self, lane, percent):
        self.lane, self.percent = lane, percent
        self.life, self._socket = os.eventfd(0), os.eventfd(0)
        self.up = self.leaving = self.closed = self.ended = False
        self.failure, self.missed, self.batches, self.says = None, {}, [], []
        self._running = []

    def fileno(self):
        return self._socket

    @property
    def busy(self):
        return bool(self._running)

    def run(self, step):
        self.batches.append((step, [*self.missed.values(), *step.setups]))
        self.missed.clear()
        self._running.append(step.id)

    def receive(self):
        said, self.says = self.says, []
        for message in said:
            if isinstance(message, wire.LaneUp):
                self.up = True
            elif isinstance(message, wire.LaneResult):
                self._running.remove(message.result.id)
        return said

    def leave(self):
        self.leaving = True

    def end(self, by=0.0):
        self.ended = True
        return -9


class Quiet:
    """A service that is there."""

    def __init__(self):
        self.starts = 0

    def start(self):
        self.starts += 1

    def watch(self):
        return None

    def close(self):
        pass


class Host:
    def __init__(self, lanes=("D", "P")):
        self.pool, self.service, self._watched, self.made = new_pool(), Quiet(), {}, []
        self.rotation = Rotation(division(50))
        self.lanes = MpsLanes(
            self.pool, self.rotation, lambda shares: division(round(shares["P"] * 100)), self._spawn, self.service
        )
        self.lanes.watch(self._watched.__setitem__, self._watched.pop)
        for lane in lanes:
            self.lanes.start(lane)
        for worker in list(self.made):
            self.say(worker, wire.LaneUp(worker.lane))

    def _spawn(self, lane, percent):
        self.made.append(Noting(lane, percent))
        return self.made[-1]

    def worker(self, lane, percent):
        """The latest."""
        return next(w for w in reversed(self.made) if (w.lane, w.percent) == (lane, percent))

    def say(self, worker, message):
        worker.says.append(message)
        return self._watched[worker.fileno()]()

    def answer(self, worker, batch_id):
        return self.say(worker, wire.LaneResult(BatchResult(batch_id, [], None, 0.0)))

    def bell(self):
        """What the host has told by itself."""
        return self._watched[self.lanes._bell]()

    def die(self, worker):
        return self._watched[worker.life]()


def step(batch_id, share, slot=0, setups=()):
    made = batch(decodes={slot: 3}, setups=list(setups), batch_id=batch_id)
    made.share = share
    return made


def ids(worker):
    return [given.id for given, _ in worker.batches]


def setup(slot, seed):
    return SlotSetup(slot, 3, SamplingParams(seed=seed))


def test_a_lane_is_ready_once_each_of_its_processes_is():
    host = Host(lanes=())
    host.lanes.start("P")
    assert host.say(host.worker("P", WHOLE), wire.LaneUp("P")) == []
    assert host.say(host.worker("P", 50), wire.LaneUp("P")) == [LaneReady("P")]


def test_a_lane_alone_runs_on_the_whole_device_and_beside_another_on_its_part():
    host = Host()
    part, whole, decode = host.worker("P", 50), host.worker("P", WHOLE), host.worker("D", WHOLE)
    assert len(host.made) == 3
    host.lanes.launch("P", step(1, 1.0))
    host.answer(whole, 1)
    host.lanes.launch("P", step(2, 0.5))
    host.lanes.launch("D", step(3, 0.5))
    assert (ids(whole), ids(part), ids(decode)) == ([1], [2], [3])


def test_a_batch_for_another_process_waits_until_what_is_in_flight_has_been_answered():
    host = Host()
    part, whole = host.worker("P", 50), host.worker("P", WHOLE)
    host.lanes.launch("P", step(1, 0.5))
    host.lanes.launch("P", step(2, 0.5))
    host.lanes.launch("P", step(3, 1.0))
    host.lanes.launch("P", step(4, 1.0))
    assert ids(part) == [1, 2] and ids(whole) == []
    host.answer(part, 1)
    assert ids(whole) == []
    assert [type(event) for event in host.answer(part, 2)] == [BatchDone]
    assert ids(whole) == [3, 4]


def test_the_block_table_is_written_at_launch_even_if_the_batch_has_to_wait():
    host = Host()
    host.lanes.launch("P", step(1, 0.5))
    waiting = step(2, 1.0)
    waiting.tables = [TableUpdate(1, 2, [7, 9])]
    host.lanes.launch("P", waiting)
    assert ids(host.worker("P", WHOLE)) == []
    assert host.pool.table[1, 2:4].tolist() == [7, 9]


def test_every_process_of_a_lane_is_told_how_to_sample_before_it_has_to():
    host = Host()
    part, whole = host.worker("P", 50), host.worker("P", WHOLE)
    host.lanes.launch("P", step(1, 0.5, setups=[setup(0, 1), setup(1, 1)]))
    host.answer(part, 1)
    host.lanes.launch("P", step(2, 0.5, setups=[setup(1, 2)]))
    host.answer(part, 2)
    host.lanes.launch("P", step(3, 1.0, setups=[setup(2, 3)]))
    assert whole.batches[0][1] == [setup(0, 1), setup(1, 2), setup(2, 3)]
    host.answer(whole, 3)
    host.lanes.launch("P", step(4, 1.0))
    assert whole.batches[1][1] == [], "once is enough"
    host.lanes.prepare_shares({"P": 0.7})
    new = host.worker("P", 70)
    host.say(new, wire.LaneUp("P"))
    host.answer(whole, 4)
    host.lanes.launch("P", step(5, 0.7))
    assert new.batches[0][1] == [setup(0, 1), setup(1, 2), setup(2, 3)]


def test_a_swap_comes_at_a_step_boundary_and_the_old_process_stays_ready():
    host = Host()
    old = host.worker("P", 50)
    host.lanes.launch("P", step(1, 0.5))
    host.lanes.prepare_shares({"P": 0.7})
    new = host.worker("P", 70)
    host.lanes.launch("P", step(2, 0.7))
    assert ids(old) == [1, 2], "nobody waits for a process that is being prepared"
    host.say(new, wire.LaneUp("P"))
    host.lanes.launch("P", step(3, 0.7))
    assert ids(new) == []
    host.answer(old, 1)
    host.answer(old, 2)
    assert ids(new) == [3]
    assert not old.leaving
    host.lanes.prepare_shares({"P": 0.3})
    assert old.leaving and len(host.made) == 4, "a third one waits until the spare one has ended"
    host.die(old)
    assert host.made[-1].percent == 30


@pytest.mark.parametrize("percent", [50, WHOLE])
def test_a_process_that_nothing_runs_in_is_replaced_and_nobody_hears_of_it(percent):
    host = Host()
    other = host.worker("P", WHOLE if percent == 50 else 50)
    died = host.worker("P", percent)
    assert host.die(died) == []
    replaced = host.worker("P", percent)
    assert replaced is not died and died.ended
    host.lanes.launch("P", step(1, percent / 100))
    assert ids(other) == [1], "meanwhile the other one does"
    assert host.say(replaced, wire.LaneUp("P")) == []
    host.answer(other, 1)
    host.lanes.launch("P", step(2, percent / 100))
    assert ids(replaced) == [2]


def test_one_that_dies_with_work_in_flight_loses_the_lane_which_goes_on_at_once_where_it_has_another():
    host = Host()
    part, whole = host.worker("P", 50), host.worker("P", WHOLE)
    host.lanes.launch("P", step(1, 0.5))
    host.lanes.launch("P", step(2, 1.0))
    (lost,) = host.die(part)
    assert isinstance(lost, LaneLost) and lost.lane == "P"
    assert ids(whole) == [], "what was in flight did not happen, nor what waited behind it"
    host.lanes.start("P")
    assert host.bell() == [LaneReady("P")]
    host.lanes.launch("P", step(3, 0.5))
    assert ids(whole) == [3]


def test_one_that_dies_while_it_is_told_to_leave_and_still_runs_something_loses_the_lane():
    host = Host()
    old = host.worker("P", 50)
    host.lanes.launch("P", step(1, 0.5))
    host.lanes.prepare_shares({"P": 0.7})
    host.say(host.worker("P", 70), wire.LaneUp("P"))
    host.lanes.prepare_shares({"P": 0.3})
    assert old.leaving
    (lost,) = host.die(old)
    assert isinstance(lost, LaneLost)
    assert host.made[-1].percent == 30, "and the rotation goes on"


def test_a_fresh_service_is_started_for_all_where_a_new_process_finds_no_device():
    host = Host()
    died = host.worker("D", WHOLE)
    (lost,) = host.die(died)
    assert isinstance(lost, LaneLost)
    host.lanes.start("D")
    hopeless = host.worker("D", WHOLE)
    hopeless.failure = wire.LaneFailure("not ready", no_context=True)
    assert {event.lane for event in host.die(hopeless)} == {"D", "P"}
    assert all(worker.ended for worker in host.made) and host.service.starts == 1
    host.lanes.start("D")
    host.lanes.start("P")
    assert host.service.starts == 2
    assert {(w.lane, w.percent) for w in host.made if not w.ended} == {("D", WHOLE), ("P", WHOLE), ("P", 50)}
