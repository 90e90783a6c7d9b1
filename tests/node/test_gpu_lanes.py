"""Lanes as threads, over the CPU in place of a GPU: batches in, events out, and what goes on while a share moves."""

import select
import sys
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runner"))
from tiny_lane import MODEL, WEIGHTS, batch, generate, new_pool, new_runner

from tidegate.base.batch import BatchResult, Slice, SlotSetup
from tidegate.base.errors import ConfigError
from tidegate.base.events import BatchDone, BatchEnding, LaneGone, LaneReady
from tidegate.base.request import SamplingParams
from tidegate.device.places import Place
from tidegate.node.gpu_lanes import GpuLanes, LanePlan
from tidegate.runner.eager_runner import EagerRunner
from tidegate.runner.shapes import StepShape

PROMPT = [5, 17, 80, 3, 44, 61, 2, 9]
DECODE = StepShape(0, 1)
WAIT_S = 30.0


class Host:
    """GpuLanes, its plans' places by share, and its events in order."""

    def __init__(self, make, ladder=(), moving=()):
        self.places = {}
        self.pool = new_pool()
        self.lanes = GpuLanes(self.pool, lambda lane: self._plan(make, list(ladder), moving))
        self.lanes.watch(lambda fd, receive: setattr(self, "bell", (fd, receive)), lambda fd: None)
        self._events = []

    def _plan(self, make, ladder, moving):
        return LanePlan(
            make=lambda: make(self.pool), place=self.place, share=0.5, ladder=ladder, beside=ladder,
            progress=lambda fraction: None,
            count_sms=lambda place: lambda: place.sms, reserved_bytes=iter(range(0, 1000, 7)).__next__,
            moving=moving,
        )  # fmt: skip

    def place(self, share):
        return self.places.setdefault(share, Place(sms=round(share * 100)))

    def event(self, kind):
        """The next one of this kind."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
                assert isinstance(event, BatchEnding | LaneReady), event
            fd, receive = self.bell
            assert select.select([fd], [], [], WAIT_S)[0], "no event came"
            self._events = receive()

    def run(self, lane, step):
        self.lanes.launch(lane, step)
        return self.event(BatchDone).result.tokens


@pytest.fixture
def host(request):
    hosts = []

    def start(make, ladder=(), moving=()):
        hosts.append(Host(make, ladder, moving))
        return hosts[-1]

    yield start
    for host in hosts:
        host.lanes.close()


def test_a_request_handed_from_lane_to_lane_with_shares_that_move_gets_its_tokens(host):
    params = SamplingParams(temperature=0.9, seed=4)
    expected = generate(new_runner(new_pool()), PROMPT, 8, params)
    lanes = host(lambda pool: EagerRunner.over(MODEL, WEIGHTS, pool))
    for lane in ("P", "D"):
        lanes.lanes.start(lane)
        assert lanes.event(LaneReady).lane == lane
    setups = [SlotSetup(0, len(PROMPT), params)]
    tokens = lanes.run("P", batch([Slice(0, 0, PROMPT, True)], setups=setups))
    for i in range(7):
        share = (0.3, 0.7, 1.0)[i % 3]
        lanes.lanes.prepare_shares({"P": 1 - share, "D": share})
        step = batch(decodes={0: len(PROMPT) + i}, setups=setups if i == 0 else None)
        step.share = share
        tokens += lanes.run("D", step)
    assert tokens == expected


class Graphs(EagerRunner):
    """An eager runner that has to prepare its steps, and notes where they run. Preparing waits while it is held."""

    def __init__(self, pool):
        self.graphs, self.ran = [], []
        self.free = threading.Event()
        self.free.set()
        runner = new_runner(pool)
        super().__init__(runner)

    def prepared(self, shape, place):
        return (shape, place) in self.graphs

    def prepare(self, shape, place):
        assert self.free.wait(WAIT_S)
        self.graphs.append((shape, place))

    def enqueue(self, step, place):
        self.ran.append(place)
        return super().enqueue(step, place)


def test_a_share_that_moves_is_prepared_beside_the_steps_and_no_step_waits_for_that(host):
    made = []
    lanes = host(lambda pool: made.append(Graphs(pool)) or made[0], ladder=[DECODE])
    lanes.lanes.start("D")
    lanes.event(LaneReady)
    graphs = made[0]
    assert graphs.graphs == [(DECODE, lanes.place(1.0)), (DECODE, lanes.place(0.5))], "both, before it serves"
    assert lanes.lanes.reading("D", alone=False).sms == 50
    assert lanes.lanes.reading("D", alone=True).sms == 100
    assert lanes.lanes.reading("D", alone=True).extra_memory_bytes == 7, "what preparing has added"

    def run(position):
        step = batch(decodes={0: position})
        step.share = 0.8
        lanes.run("D", step)
        return graphs.ran[-1]

    graphs.free.clear()
    lanes.lanes.prepare_shares({"D": 0.8, "P": 0.2})
    assert {run(position) for position in range(20)} == {lanes.place(0.5)}, "steps go on where they have been"
    assert lanes.lanes.reading("D", alone=False).sms == 50
    graphs.free.set()
    assert any(run(position % 60) is lanes.place(0.8) for position in range(2000)), "the lane moves"
    assert lanes.lanes.reading("D", alone=False).sms == 80
    assert graphs.graphs[2:] == [(DECODE, lanes.place(0.8))], "captured once"


def test_shares_that_a_gate_may_choose_at_any_step_are_prepared_before_the_lane_serves(host):
    made = []
    lanes = host(lambda pool: made.append(Graphs(pool)) or made[0], ladder=[DECODE], moving=[0.8, 0.5, 0.3])
    lanes.lanes.start("D")
    lanes.event(LaneReady)
    places = [lanes.place(share) for share in (1.0, 0.5, 0.8, 0.3)]
    assert made[0].graphs == [(DECODE, place) for place in places], "each once"
    for share in (0.3, 0.8):
        step = batch(decodes={0: 1})
        step.share = share
        lanes.run("D", step)
        assert made[0].ran[-1] is lanes.place(share), "the first step that asks for it runs there"


class Choosing(EagerRunner):
    """A runner that may fuse attention and counts what it chose."""

    def __init__(self, pool):
        self.chosen = {"apart": 0, "pod": 0}
        super().__init__(new_runner(pool))

    @property
    def hybrid_attention(self):
        return self.chosen.copy()

    def enqueue(self, step, place):
        self.chosen["pod" if step.fused else "apart"] += 1
        return super().enqueue(step, place)


def test_a_lane_tells_how_attention_of_its_batches_ran(host):
    lanes = host(Choosing)
    lanes.lanes.start("D")
    lanes.event(LaneReady)
    for fused in (True, False, True):
        step = batch(decodes={0: 3})
        step.fused = fused
        lanes.run("D", step)
    assert lanes.lanes.reading("D", alone=True).hybrid_attention == {"apart": 1, "pod": 2}
    assert not lanes.lanes.reading("P", alone=True).hybrid_attention


@pytest.mark.parametrize(
    ("error", "blamed", "words"),
    [
        (ConfigError("use --mode chunked"), True, "use --mode chunked"),
        (torch.OutOfMemoryError("CUDA out of memory"), True, "--gpu-memory-utilization"),
        (RuntimeError("an illegal memory access"), False, "illegal memory access"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lane_that_can_not_start_says_why_and_whether_settings_are_to_blame(host, error, blamed, words):
    def make(pool):
        raise error

    lanes = host(make)
    lanes.lanes.start("D")
    gone = lanes.event(LaneGone)
    assert gone.config is blamed and words in gone.reason


class Timed:
    """A runner whose steps take as long as ``takes`` says, by their batches' ids."""

    hybrid_attention = MappingProxyType({})

    def __init__(self):
        self.takes = {}

    def prepared(self, shape, place):
        return True

    def prepare(self, shape, place):
        pass

    def enqueue(self, step, place):
        return Timer(step.id, time.monotonic(), self.takes[step.id])


class Timer(NamedTuple):
    batch_id: int
    start: float
    seconds: float

    def ended(self):
        return time.monotonic() >= self.start + self.seconds

    def collect(self):
        time.sleep(max(0.0, self.start + self.seconds - time.monotonic()))
        return BatchResult(self.batch_id, [], None, self.seconds)


def test_a_step_is_called_ending_before_its_end_and_one_that_ends_early_is_told_at_once(host):
    """The first one shows that they take three tenths of what is expected; but the last one takes a tenth of that."""
    runners = []

    def make(pool):
        runners.append(Timed())
        return runners[-1]

    lane = host(make)
    lane.lanes.start("D")
    lane.event(LaneReady)
    for i, (takes, expected) in enumerate([(0.3, 1.0), (0.15, 0.5), (0.03, 1.0)]):
        runners[0].takes[i] = takes
        begun = time.monotonic()
        lane.lanes.launch("D", msgspec.structs.replace(batch(decodes={0: 3}, batch_id=i), expected_s=expected))
        lane.event(BatchEnding)
        ending = time.monotonic() - begun
        lane.event(BatchDone)
        done = time.monotonic() - begun
        assert takes <= done < takes + 0.1
        if i == 1:
            assert 0.05 < ending < 0.15
