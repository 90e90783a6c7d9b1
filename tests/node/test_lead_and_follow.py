"""Ranks as they are on GPUs, over the CPU in place of them: what rank 0's lanes do, other ranks do, in one order."""

import queue
import select
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runner"))
from tiny_lane import MODEL, POOL, batch, generate

from tidegate.base.batch import Slice, SlotSetup, TableUpdate
from tidegate.base.events import BatchDone, BatchEnding, LaneReady
from tidegate.base.request import SamplingParams
from tidegate.base.specs import Shard
from tidegate.device.places import Part, Place
from tidegate.device.pool import Pool
from tidegate.kernels.choose_attention import attention_over
from tidegate.kernels.collectives import Collectives
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.models.dummy_source import DummySource
from tidegate.models.registry import build_model
from tidegate.models.shards import divide
from tidegate.models.weights import layout
from tidegate.node import wire
from tidegate.node.follow import Follower, Turns
from tidegate.node.gpu_lanes import GpuLanes, LanePlan
from tidegate.node.lead import Lead, LeadingRunner
from tidegate.node.rank_processes import RankProcesses
from tidegate.runner.eager_runner import EagerRunner
from tidegate.runner.inputs import apply_tables
from tidegate.runner.runner import Runner
from tidegate.runner.shapes import StepShape

WAIT_S = 30.0
PROMPT = [5, 17, 80, 3, 44, 61, 2, 9]
SOURCE = DummySource(MODEL, 1, None)


def rank_of(shard):
    """A rank's spec, weights and pool."""
    spec = divide(MODEL, shard)
    weights = {name: torch.empty(shape) for name, shape in layout(spec).items()}
    SOURCE.load(weights, lambda fraction: None, shard)
    return spec, weights, Pool.allocate(spec, POOL)


def tables():
    """All blocks, scattered over the slots."""
    width = POOL.max_blocks_per_seq
    blocks = torch.randperm(POOL.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    return [TableUpdate(slot, 0, blocks[slot * width : (slot + 1) * width]) for slot in range(POOL.max_num_seqs)]


def of_one_rank(prompt, count, params):
    """What a single rank generates."""
    spec, weights, pool = rank_of(Shard())
    apply_tables(pool.table, tables())
    attention = attention_over(TorchAttention, spec, pool.kv, pool.table)
    return generate(Runner(build_model(spec, weights, attention), attention, pool, spec), prompt, count, params)


class Noting(EagerRunner):
    """Notes what is done, and has to prepare its steps."""

    def of(self, lane, log):
        self.lane, self.log, self.ready = lane, log, set()
        return self

    def prepared(self, shape, place):
        return (shape, place) in self.ready

    def prepare(self, shape, place):
        self.ready.add((shape, place))
        self.log.append((self.lane, tuple(shape), place.part))

    def enqueue(self, step, place):
        self.log.append((self.lane, step.id, place.part))
        return super().enqueue(step, place)


class TwoRanks:
    """Lanes of rank 0, and rank 1 as threads that follow; ``logs`` are what each rank has done."""

    def __init__(self, folder, ladder=()):
        self.logs = [], []
        self.failures = []
        self.ranks = [rank_of(Shard(rank, 2)) for rank in range(2)]
        self._folder, self._ladder, self._places, self._events = folder, list(ladder), {}, []
        self._follower = Follower(
            self.ranks[1][2],
            lambda lane: self._runner(1, lane),
            lambda lane, part: self._place(1, lane, part),
            self.failures.append,
        )
        decoder = msgspec.msgpack.Decoder(wire.ToRank)
        lock = threading.Lock()

        def tell(order):
            """As over a socket: coded, and in order."""
            with lock:
                self._follower.take(decoder.decode(msgspec.msgpack.encode(order)))

        lead = Lead(tell)
        self._make = lambda lane: LeadingRunner(lane, lambda lane: self._runner(0, lane), lead)
        self.lanes = GpuLanes(self.ranks[0][2], self._plan)
        self.lanes.watch(lambda fd, receive: setattr(self, "bell", (fd, receive)), lambda fd: None)

    def _runner(self, rank, lane):
        spec, weights, pool = self.ranks[rank]
        collectives = Collectives.over_gloo(Shard(rank, 2), str(self._folder / lane))
        return Noting.over(spec, weights, pool, collectives).of(lane, self.logs[rank])

    def _place(self, rank, lane, part):
        return self._places.setdefault((rank, lane, part), Place(part=part))

    def _plan(self, lane):
        def place(share):
            return self._place(0, lane, None if share >= 1 else Part(round(share * 100), lane == "P"))

        return LanePlan(
            make=lambda: self._make(lane), place=place, share=0.5, ladder=self._ladder,
            beside=self._ladder, progress=lambda fraction: None,
            count_sms=lambda place: lambda: 0, reserved_bytes=lambda: 0,
        )  # fmt: skip

    def event(self, kind):
        """The next one of this kind."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
                assert isinstance(event, BatchEnding | LaneReady | BatchDone), event
            fd, receive = self.bell
            assert select.select([fd], [], [], WAIT_S)[0], "no event came"
            self._events = receive()

    def start(self, *lanes):
        for lane in lanes:
            self.lanes.start(lane)
            self.event(LaneReady)

    def run(self, lane, step):
        self.lanes.launch(lane, step)
        return self.event(BatchDone).result.tokens

    def close(self):
        self.lanes.close()
        self._follower.close()
        assert not self.failures


@pytest.fixture
def two_ranks(tmp_path):
    opened = []

    def start(**more):
        opened.append(TwoRanks(tmp_path, **more))
        return opened[-1]

    yield start
    for ranks in opened:
        ranks.close()


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2)])
def test_a_request_handed_from_lane_to_lane_gets_the_tokens_of_one_rank(two_ranks, params):
    ranks = two_ranks()
    ranks.start("P", "D")
    setups = [SlotSetup(0, len(PROMPT), params)]
    first = batch([Slice(0, 0, PROMPT, True)], setups=setups)
    first.tables = tables()
    tokens = ranks.run("P", first)
    for i in range(7):
        step = batch(decodes={0: len(PROMPT) + i}, setups=setups if i == 0 else None, batch_id=i + 1)
        step.share = (0.3, 0.7, 1.0)[i % 3]
        tokens += ranks.run("D", step)
    assert tokens == of_one_rank(PROMPT, 8, params)
    ranks.close()
    (_, _, ours), (_, _, theirs) = ranks.ranks
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.table, theirs.table)


def test_every_rank_does_the_steps_of_both_lanes_in_one_order(two_ranks):
    """Both are kept busy at once; had each rank an order of its own, the notes would differ."""
    ranks = two_ranks()
    ranks.start("P", "D")
    first = batch([Slice(1, 0, PROMPT, True)])
    first.tables = tables()
    ranks.run("P", first)
    for i in range(30):
        ranks.lanes.launch("P", batch([Slice(0, i, [PROMPT[i % 8]], False)], batch_id=100 + i))
        ranks.lanes.launch("D", batch(decodes={1: len(PROMPT) + i}, batch_id=200 + i))
    for _ in range(60):
        ranks.event(BatchDone)
    ranks.close()
    assert ranks.logs[0] == ranks.logs[1] and len(ranks.logs[0]) == 61
    assert torch.equal(*[pool.tokens for _, _, pool in ranks.ranks])


def test_other_ranks_prepare_what_rank_0_prepares_in_the_same_places(two_ranks):
    shape = StepShape(0, 1)
    ranks = two_ranks(ladder=[shape])
    ranks.start("D")
    ranks.lanes.prepare_shares({"D": 0.8, "P": 0.2})
    for _ in range(1000):
        if len(ranks.logs[0]) == 3:
            break
        time.sleep(0.01)
    ranks.close()
    assert ranks.logs[0] == ranks.logs[1]
    assert [part for _, _, part in ranks.logs[0]] == [None, Part(50, False), Part(80, False)]


def test_numbered_things_are_done_in_the_order_of_their_numbers():
    turns, done = Turns(), []

    def work(number):
        with turns.of(number):
            done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in (4, 2, 3, 1)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join(WAIT_S)
    assert done == [1, 2, 3, 4]


FOLLOWS = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.recv(4); s.recv(1 << 16)"
COMPLAINS = """
import socket, sys
from tidegate.node import wire
socket.socket(fileno=int(sys.argv[1])).sendall(wire.pack(wire.RankFailure("no memory: lower it", True)))
"""


def lost_rank(code, do):
    """What is told when one of three ranks ends."""
    told = queue.SimpleQueue()
    ranks = RankProcesses(3, (sys.executable, "-c", code))
    ranks.watch(lambda reason, config: told.put((reason, config)))
    do(ranks._processes)
    answer = told.get(timeout=WAIT_S)
    assert ranks.lost
    ranks.close()
    assert all(process.poll() is not None for process in ranks._processes), "nothing is left behind"
    return answer


def test_a_rank_that_is_killed_is_named():
    reason, config = lost_rank(FOLLOWS, lambda processes: processes[1].kill())
    assert reason == "rank 2 of 3 was lost: its process ended with status -9" and not config


def test_a_rank_that_can_not_start_says_why_and_whether_settings_are_to_blame():
    reason, config = lost_rank(COMPLAINS, lambda processes: None)
    assert reason.startswith("rank ") and reason.endswith("no memory: lower it") and config


def test_ranks_end_when_told_to_and_nobody_is_told_of_a_loss():
    told = []
    ranks = RankProcesses(2, (sys.executable, "-c", FOLLOWS))
    ranks.watch(lambda reason, config: told.append(reason))
    ranks.close()
    assert not told and not ranks.lost
    assert ranks._processes[0].poll() == 0
