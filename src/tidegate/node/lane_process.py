"""A lane as a process: runs the batches it is told to over the pool, answers with tokens.

It owns nothing that its death would lose: weights, KV, block table and tokens lie in the node's memory, sampling
parameters are sent again. Forked by ``node.lane_stem``.
"""

import select
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch

from tidegate.base.batch import Batch, Slice
from tidegate.base.clock import now_s
from tidegate.base.specs import ModelSpec, PoolSpec
from tidegate.device.core_sets import CoreSets, ProcessPart
from tidegate.device.crowding import Crowding
from tidegate.device.pool import Pool
from tidegate.kernels.choose_attention import attention_over
from tidegate.kernels.collectives import Collectives, PeerLost
from tidegate.kernels.cpu_attention import CpuAttention
from tidegate.kernels.linear import Linear
from tidegate.models.fp8_weights import kv_scales
from tidegate.models.registry import build_model
from tidegate.node import wire
from tidegate.runner.runner import Runner

Products = Mapping[str, Linear]


def build_runner(
    spec: ModelSpec,
    weights: Mapping[str, torch.Tensor],
    pool: Pool,
    products: Products | None = None,
    collectives: Collectives | None = None,
) -> Runner:
    """``products`` are ``models.linears.linears`` of the weights, where they have been made already."""
    attention = attention_over(CpuAttention, spec, pool.kv, pool.table, kv_scales(spec, weights))
    model = build_model(spec, weights, attention, products, collectives)
    return Runner(model, attention, pool, spec, collectives)


def warm_up(
    model_spec: ModelSpec,
    weights: Mapping[str, torch.Tensor],
    kv_dtype: str,
    products: Products | None = None,
    collectives: Collectives | None = None,
) -> None:
    """The first products set up threads and libraries; do them on a small pool of our own."""
    spec = PoolSpec(num_blocks=4, block_size=16, max_num_seqs=1, max_model_len=48, kv_dtype=kv_dtype)
    pool = Pool.allocate(model_spec, spec)
    pool.table[0] = torch.arange(spec.max_blocks_per_seq, dtype=torch.int32)
    runner = build_runner(model_spec, weights, pool, products, collectives)
    runner.run(Batch(0, 1.0, [Slice(0, 0, [1] * 32, True)], [], [], [], []))
    runner.run(Batch(1, 1.0, [], [0], [32], [], []))


class Mailbox:
    """The messages of a channel one at a time, for a process that does nothing else but wait for them."""

    def __init__(self, channel: wire.Channel) -> None:
        self.channel = channel
        self._inbox: deque[wire.ToLane] = deque()

    def next(self) -> wire.ToLane:
        """The next message, in order; StopLane when the node has gone."""
        closed = False
        while not self._inbox and not closed:
            writers = [self.channel] if self.channel.wants_write else []
            select.select([self.channel], writers, [])
            self.channel.flush()
            messages, closed = self.channel.receive()
            self._inbox += messages
        return self._inbox.popleft() if self._inbox else wire.StopLane()


class LaneProcess:
    """What a lane does from its first moment on; ``init`` was the first message in ``mailbox``."""

    def __init__(
        self,
        mailbox: Mailbox,
        init: wire.LaneInit,
        weights: Mapping[str, torch.Tensor],
        pool: Pool,
        products: Products,
    ) -> None:
        self._mailbox, self._init = mailbox, init
        self._weights, self._pool, self._products = weights, pool, products

    def run(self) -> None:
        """Until told to stop, or until the node is gone."""
        try:
            self._run()
        except Exception as error:
            self._mailbox.channel.send(wire.LaneFailure(f"{type(error).__name__}: {error}"))
            if not isinstance(error, PeerLost):
                raise

    def _run(self) -> None:
        init, process = self._init, ProcessPart()
        core_sets = CoreSets(init.cores)
        process.enter(core_sets.part(init.lane, 1.0))
        collectives = None
        if init.model.shard.ranks > 1:
            collectives = Collectives.over_gloo(init.model.shard, str(Path(init.meeting_place) / init.lane))
        warm_up(init.model, self._weights, init.pool.kv_dtype, self._products, collectives)
        runner = build_runner(init.model, self._weights, self._pool, self._products, collectives)
        crowding = Crowding()
        self._mailbox.channel.send(wire.LaneUp(init.lane))
        while isinstance(message := self._mailbox.next(), wire.RunBatch):
            part = core_sets.part(init.lane, message.batch.share)
            process.enter(part)
            torch.set_num_threads(crowding.threads(len(part.cores)))
            result = runner.run(message.batch)
            self._mailbox.channel.send(wire.LaneResult(result))
            crowding.ran(len(part.cores), result.seconds, now_s())
            if part.duty < 1.0:
                time.sleep(result.seconds * (1.0 - part.duty) / part.duty)
