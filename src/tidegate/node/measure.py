"""Times of batches on a node's lanes before it serves: nobody's requests, in slots and blocks of the empty pool.

Nothing of them is left that a request could meet: its slices write the tokens and KV that it reads, its admission
writes its block-table entries, and no lane is told how to sample for a slot (what it then does is the plain greedy
choice, as for every slot that it has not been told of).
"""

import itertools
import math
import random
import selectors
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.base.batch import Batch, Slice, TableUpdate
from tidegate.base.errors import ConfigError, TidegateError
from tidegate.base.events import BatchDone, BatchEnding, Event, LaneGone, LaneLost, LaneReady
from tidegate.base.specs import PoolSpec
from tidegate.node.lane_host import LaneHost
from tidegate.node.probes import Alone, Both, Probe, Reach, Trial
from tidegate.slo.latency import Sample

REPEATS = 3  # whose median counts
ENOUGH_SECONDS = 0.15  # of measured time, after which fewer repeats will do
HARD_TOKENS = 128  # of a batch on the whole device, from which on it is bound by arithmetic rather than memory
REST_SECONDS = 0.01  # after so much of it a device is no longer settled


@dataclass
class _Feed:
    """A lane that is kept busy with equal batches."""

    lane: str
    share: float
    probe: Probe
    hard: bool  # whether its batches, with what else runs, make the device work as hard as it can
    in_flight: int = 0
    first: bool = True  # the next one to end is
    measured: list[float] = field(default_factory=list)  # seconds that batches took, in order

    @property
    def enough(self) -> bool:
        return len(self.measured) >= REPEATS or sum(self.measured) >= ENOUGH_SECONDS


class Measure:
    """Used before the node's loop, which watches the lanes from then on."""

    def __init__(
        self, lanes: LaneHost, pool: PoolSpec, reach: Reach, vocab_size: int, settling_seconds: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """``settling_seconds``: of hard work without a rest, before steps take as long as they do under load."""
        self._lanes, self._reach, self._block_size = lanes, reach, pool.block_size
        self._settling_s, self._clock = settling_seconds, clock
        self._hard_since_s, self._hard_until_s = 0.0, -math.inf  # the last hard work without a rest
        self._slice_slot = pool.max_num_seqs - 1
        self._tokens = [(7 * i + 1) % vocab_size for i in range(reach.new)]
        blocks = list(range(pool.num_blocks))
        random.Random(0).shuffle(blocks)  # scattered, as they are when a node has served for a while
        of_prompt = -(-reach.prompt // pool.block_size)
        self._prompt_blocks, self._decode_blocks = blocks[:of_prompt], blocks[of_prompt:] or blocks
        self._ids = itertools.count()
        self._up: set[str] = set()
        self._selector = selectors.DefaultSelector()

        def register(fd: int, receive: Callable[[], list[Event]]) -> None:
            self._selector.register(fd, selectors.EVENT_READ, receive)

        def forget(fd: int) -> None:
            self._selector.unregister(fd)

        lanes.watch(register, forget)

    def wait_for(self, lanes: set[str]) -> None:
        """Until they are up. Raises TidegateError if one can't be brought up, ConfigError if the user can help it."""
        while not lanes <= self._up:
            self._events()

    def trial(self, trial: Trial, late: Callable[[], bool]) -> list[Sample]:
        """None, if there was no time to measure anything: no batch is launched once it is ``late``."""
        match trial:
            case Alone(lane, share, probe):
                hard = share >= 1.0 and probe.new + probe.rows >= HARD_TOKENS
                feeds = [_Feed(lane, share, probe, hard)]
            case Both(share, prefill, decode):
                hard = prefill.new + decode.rows >= HARD_TOKENS
                feeds = [_Feed("P", share, prefill, hard), _Feed("D", 1.0 - share, decode, hard)]
        self._feed({feed.lane: feed for feed in feeds}, late)
        if not all(feed.measured for feed in feeds):
            return []
        beside = len(feeds) > 1
        return [
            Sample(feed.lane, feed.share, beside, feed.probe.work, statistics.median(feed.measured)) for feed in feeds
        ]

    def close(self) -> None:
        """Nobody watches the lanes any more."""
        self._lanes.watch(lambda fd, receive: None, lambda fd: None)
        self._selector.close()

    # ---- batches

    def _feed(self, feeds: dict[str, _Feed], late: Callable[[], bool]) -> None:
        """Runs until each lane has enough, and until nothing is in flight. What ends after that is not counted: the
        other lane may have rested."""
        over = late()
        if not over:
            for feed in feeds.values():
                self._launch(feed, first=True)
        while any(feed.in_flight for feed in feeds.values()):
            for event in self._events():
                feed = feeds[event.lane]
                if isinstance(event, BatchDone):
                    feed.in_flight -= 1
                    if self._counts(feed, event.result.seconds) and not over:
                        feed.measured.append(event.result.seconds)
                over = over or late() or all(other.enough for other in feeds.values())
                ahead = 1 if isinstance(event, BatchEnding) else 0
                if not over and feed.in_flight <= ahead:
                    self._launch(feed)

    def _counts(self, feed: _Feed, seconds: float) -> bool:
        """Whether a batch that has just ended tells how long such batches take. The first one does not: it may have had
        to be compiled, captured or set up."""
        now = self._clock()
        first, feed.first, settled = feed.first, False, True
        if feed.hard:
            began_s = now - seconds
            if first and began_s > self._hard_until_s + REST_SECONDS:
                self._hard_since_s = began_s
            self._hard_until_s = now
            settled = began_s >= self._hard_since_s + self._settling_s
        return settled and not first

    def _launch(self, feed: _Feed, first: bool = False) -> None:
        probe = feed.probe
        slices = []
        if probe.new:
            slices.append(Slice(self._slice_slot, probe.start, self._tokens[: probe.new], True))
        batch = Batch(
            next(self._ids), feed.share, slices, list(range(probe.rows)), [probe.context - 1] * probe.rows,
            self._tables(probe) if first else [], [],
        )  # fmt: skip
        feed.in_flight += 1
        self._lanes.launch(feed.lane, batch)

    def _tables(self, probe: Probe) -> list[TableUpdate]:
        each = -(-probe.context // self._block_size)
        tables = [
            TableUpdate(slot, 0, self._decode_blocks[slot * each : (slot + 1) * each]) for slot in range(probe.rows)
        ]
        if probe.new:
            tables.append(TableUpdate(self._slice_slot, 0, self._prompt_blocks))
        return tables

    def _events(self) -> list[BatchDone | BatchEnding]:
        """Waits for some."""
        events: list[BatchDone | BatchEnding] = []
        for key, _ in self._selector.select():
            for event in key.data():
                match event:
                    case BatchDone() | BatchEnding():
                        events.append(event)
                    case LaneReady(lane):
                        self._up.add(lane)
                    case LaneGone(_, reason, config=True):
                        raise ConfigError(reason)
                    case LaneLost(lane, reason) | LaneGone(lane, reason):
                        raise TidegateError(f"lane {lane} was lost before it served: {reason}")
        return events
