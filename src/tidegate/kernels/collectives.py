"""What the ranks of a tensor-parallel model tell each other within a step.

Every rank must call the same functions in the same order. On a GPU they are enqueued on the current stream, and a graph
can hold them once they have run outside of one with tensors of the same sizes.
"""

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions  # type: ignore[attr-defined]
from torch.nn.functional import pad

from tidegate.base.errors import TidegateError
from tidegate.base.specs import Shard

PEER_TIMEOUT = datetime.timedelta(minutes=10)  # a peer may be reading weights


class PeerLost(TidegateError):
    """A rank can't go on, since another one does not answer."""


class Collectives:
    """One rank's end of a communicator."""

    def __init__(self, shard: Shard, group: Any) -> None:
        """``group``: a process group of ``torch.distributed`` that nobody else uses."""
        self.shard = shard
        self._group = group
        self._sum, self._gather, self._broadcast = AllreduceOptions(), AllgatherOptions(), BroadcastOptions()
        for options in (self._sum, self._gather, self._broadcast):
            options.asyncOp = False  # on the caller's stream

    @classmethod
    def over_gloo(cls, shard: Shard, meeting_place: str) -> "Collectives":
        """Among processes of this machine, for tensors on the CPU; returns once all are there. ``meeting_place``: a
        file that all of them name, and that does not exist before."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = PEER_TIMEOUT
        return cls(shard, gloo(FileStore(meeting_place, shard.ranks), shard.rank, shard.ranks, options))

    @classmethod
    def over_nccl(cls, shard: Shard, meeting_place: str) -> "Collectives":
        """The same for tensors on GPUs, rank r's on device r."""
        # Ranks would meet while they capture, to register buffers; but lanes capture in no order among themselves.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = PEER_TIMEOUT
        made = cls(shard, nccl(FileStore(meeting_place, shard.ranks), shard.rank, shard.ranks, options))
        # The communicator is made at its first use. On a stream of its own: another lane may be capturing meanwhile.
        stream = torch.cuda.Stream(shard.rank)
        with torch.cuda.stream(stream):
            made.first(torch.zeros(1, device=stream.device))
        stream.synchronize()
        return made

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, in place; returns it. The same to the last bit on every rank."""
        _wait(self._group.allreduce([x], self._sum))
        return x

    def columns(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """All ranks' columns beside each other, ``[N, count]``; ``x [N, …]`` has the same number on each rank but the
        last, which may have fewer."""
        each = -(-count // self.shard.ranks)
        own = pad(x, (0, each - x.shape[1])) if x.shape[1] < each else x.contiguous()
        gathered = x.new_empty(self.shard.ranks * len(x), each)
        _wait(self._group._allgather_base(gathered, own, self._gather))
        return gathered.view(self.shard.ranks, len(x), each).transpose(0, 1).reshape(len(x), -1)[:, :count].contiguous()

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``x``, in place; returns it."""
        _wait(self._group.broadcast([x], self._broadcast))
        return x


def _wait(work: Any) -> None:
    if work is None:  # NCCL's, which the stream orders
        return
    try:
        work.wait()
    except RuntimeError as error:
        said = str(error).strip().splitlines()
        raise PeerLost(f"another rank does not answer: {said[0][:200] if said else type(error).__name__}") from error
