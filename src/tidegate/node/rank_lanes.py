"""Tensor parallelism between processes: every lane runs on every rank, and the core sees one lane.

A lane's batches reach its process on each rank in the order of their launches, and each lane has a communicator of its
own, so no lane ever waits for another. What a rank writes is its own copy, block table and token store included, so a
batch is done when it is done on all ranks.
"""

from collections.abc import Callable, Sequence

import msgspec

from tidegate.base.batch import Batch, BatchResult
from tidegate.base.events import BatchDone, Event, LaneGone, LaneLost, LaneReady
from tidegate.kernels.collectives import PeerLost
from tidegate.node.lane_host import LaneHost, LaneReading

Register = Callable[[int, Callable[[], list[Event]]], None]


class RankLanes:
    """Implements ``LaneHost`` over one for each rank. A rank that is lost can't be replaced, since its peers wait for
    it in the middle of a step: its lane is gone, and so the engine ends."""

    def __init__(self, hosts: Sequence[LaneHost]) -> None:
        self._hosts = hosts
        self._up: dict[str, set[int]] = {}  # ranks
        self._results: dict[tuple[str, int], dict[int, BatchResult]] = {}  # by lane and batch, then by rank
        self._waiting: dict[str, set[int]] = {}  # ranks that have given up a lane, since another does not answer

    def start(self, lane: str) -> None:
        for host in self._hosts:
            host.start(lane)

    def launch(self, lane: str, batch: Batch) -> None:
        for host in self._hosts:
            host.launch(lane, batch)

    def prepare_shares(self, shares: dict[str, float]) -> None:
        for host in self._hosts:
            host.prepare_shares(shares)

    def reading(self, lane: str, alone: bool) -> LaneReading:
        return self._hosts[0].reading(lane, alone)

    def watch(self, register: Register, forget: Callable[[int], None]) -> None:
        for rank, host in enumerate(self._hosts):
            host.watch(self._register_of(rank, register), forget)

    def pids(self) -> dict[str, int]:
        """Those of rank 0 by lane, those of rank 1 by "D@1" and so on."""
        found: dict[str, int] = {}
        for rank, host in enumerate(self._hosts):
            found |= {f"{lane}@{rank}" if rank else lane: pid for lane, pid in host.pids().items()}
        return found

    def close(self) -> None:
        for host in self._hosts:
            host.close()

    def _register_of(self, rank: int, register: Register) -> Register:
        def register_rank(fd: int, receive: Callable[[], list[Event]]) -> None:
            register(fd, lambda: [told for event in receive() for told in self._hear(rank, event)])

        return register_rank

    def _hear(self, rank: int, event: Event) -> list[Event]:
        """What one rank's event means for the lane."""
        match event:
            case LaneReady(lane):
                up = self._up.setdefault(lane, set())
                up.add(rank)
                return [event] if len(up) == len(self._hosts) else []
            case BatchDone(lane, result):
                results = self._results.setdefault((lane, result.id), {})
                results[rank] = result
                return [BatchDone(lane, self._joined(lane, result.id))] if len(results) == len(self._hosts) else []
            case LaneLost(lane, reason):
                return self._lost(rank, lane, reason)
        return [event] if rank == 0 else []

    def _joined(self, lane: str, batch_id: int) -> BatchResult:
        results = self._results.pop((lane, batch_id))
        assert all(result.tokens == results[0].tokens for result in results.values()), "ranks have different tokens"
        return msgspec.structs.replace(results[0], seconds=max(result.seconds for result in results.values()))

    def _lost(self, rank: int, lane: str, reason: str) -> list[Event]:
        """Those that wait for a lost rank end too; which one it was is told by its own end."""
        if reason.startswith(PeerLost.__name__):
            waiting = self._waiting.setdefault(lane, set())
            waiting.add(rank)
            if len(waiting) < len(self._hosts):
                return []
        return [LaneGone(lane, f"rank {rank} of {len(self._hosts)} was lost: {reason}")]
