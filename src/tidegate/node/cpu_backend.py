"""A machine without a GPU: weights and KV in a memory file, lanes as processes on sets of cores; a file, lanes and
cores for each rank where several compute the model together."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tidegate.base.errors import ConfigError
from tidegate.base.specs import ModelSpec, PoolSpec, Region, Shard
from tidegate.device.core_sets import CoreSets
from tidegate.device.memory import SharedMemory, lay_out, region_bytes
from tidegate.models.linears import load, stored, stored_bytes
from tidegate.models.shards import divide
from tidegate.models.sources import ModelSource
from tidegate.node import wire
from tidegate.node.backend import Progress, Traits, tell_apart
from tidegate.node.config import EngineConfig
from tidegate.node.lane_host import LaneHost
from tidegate.node.process_lanes import ProcessLanes
from tidegate.node.rank_lanes import RankLanes
from tidegate.node.sizing import host_kv_bytes, kv_dtype_of, pool_of
from tidegate.policy.modes import LaneSpec
from tidegate.slo.latency import Padding


class CpuBackend:
    traits = Traits(
        slice_seconds=0.2,
        min_slice_tokens=32,
        slice_quantum_tokens=16,
        max_slices=1 << 20,
        max_prefill_tokens=1 << 20,
        padding=Padding(),
        prefill_tokens_per_s=500.0,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
    )
    sharing = "core sets"

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        if config.dtype not in ("auto", "float32"):
            raise ConfigError(f"--dtype {config.dtype} needs a GPU: without one, models compute in float32")
        if config.sharing != "auto":
            raise ConfigError(f"--sharing {config.sharing} needs a GPU: without one, lanes divide the cores (auto)")
        self._source, self._quantization = source, config.quantization
        ranks = config.tensor_parallel_size
        self._models = [divide(source.spec, Shard(rank, ranks)) for rank in range(ranks)]
        self._cores = CoreSets(config.cores).cores
        self.traits = replace(self.traits, shares=CoreSets(self._cores_of(self._models[0])).shares())
        self.weight_bytes = sum(stored_bytes(model, config.quantization) for model in self._models)
        self.kv_bytes = 0
        self._pool_spec: PoolSpec | None = None
        self._meeting_place: str | None = None
        self._lanes: LaneHost | None = None

    @property
    def description(self) -> str:
        cores = f"cpu, {len(self._cores)} cores" if len(self._cores) > 1 else "cpu, 1 core"
        return cores if len(self._models) == 1 else f"{cores}, {len(self._models)} ranks"

    def size_pool(self, config: EngineConfig) -> PoolSpec:
        room = host_kv_bytes(config, self.weight_bytes)
        # Of all ranks together: each has as many blocks as the others, of the KV heads that are its own.
        elements = [model.kv_elements_per_token for model in self._models]
        own, first = room * elements[0] // sum(elements), self._models[0]
        kv_dtype = kv_dtype_of(first, config, "float32")
        self._pool_spec = pool_of(first, config, own, kv_dtype, self.traits.max_num_seqs)
        return self._pool_spec

    def open(self, lanes: Sequence[LaneSpec], progress: Progress) -> LaneHost:
        if len(self._models) > 1:
            self._meeting_place = tempfile.mkdtemp(prefix="tidegate-")
        ranks = [self._rank(model) for model in self._models]
        self.kv_bytes = sum(region_bytes(region) for rank in ranks for region in rank.regions if region.name == "kv")
        hosts = [rank.lanes for rank in ranks]
        self._lanes = host = hosts[0] if len(hosts) == 1 else RankLanes(hosts)
        for lane in lanes:
            host.start(lane.name)  # they import while the weights are read
        for rank in ranks:
            self._provide(rank, progress)
        tell_apart(lanes, "one kernel for both needs a GPU", progress)
        progress("starting lanes", 0.0)
        return host

    def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
        if self._meeting_place is not None:
            shutil.rmtree(self._meeting_place, ignore_errors=True)

    def _rank(self, model: ModelSpec) -> "_Rank":
        assert self._pool_spec is not None
        regions, num_bytes = lay_out(model, self._pool_spec, stored(model, self._quantization))
        memory = SharedMemory.create(num_bytes)
        return _Rank(model, regions, num_bytes, memory, ProcessLanes(memory.fd))

    def _provide(self, rank: "_Rank", progress: Progress) -> None:
        """Reads the rank's weights, and tells its lanes that they are there."""
        assert self._pool_spec is not None
        model, pool_spec, shard = rank.model, self._pool_spec, rank.model.shard
        weights, pool = rank.memory.open_pool(pool_spec, rank.regions)

        def told(fraction: float) -> None:
            progress("loading weights", (shard.rank + fraction) / shard.ranks)

        load(self._source, weights, told, shard)
        cores, place = self._cores_of(model), self._meeting_place or ""
        rank.lanes.provide(
            pool, lambda lane: wire.LaneInit(lane, model, pool_spec, rank.regions, rank.num_bytes, cores, place)
        )

    def _cores_of(self, model: ModelSpec) -> tuple[int, ...]:
        """A rank's own cores, where there are enough."""
        span = model.shard.span(len(self._cores))
        return self._cores[span.start : span.stop] if len(self._cores) >= model.shard.ranks else self._cores


class _Rank(NamedTuple):
    """A part of the model, and the memory and lanes that compute it."""

    model: ModelSpec
    regions: list[Region]
    num_bytes: int
    memory: SharedMemory
    lanes: ProcessLanes
