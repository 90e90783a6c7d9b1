"""A machine without a GPU: weights and KV in a memory file, lanes as processes on sets of cores."""

from collections.abc import Sequence
from dataclasses import replace

from tidegate.base.errors import ConfigError
from tidegate.base.specs import PoolSpec
from tidegate.device.core_sets import CoreSets
from tidegate.device.memory import SharedMemory, lay_out, region_bytes
from tidegate.models.linears import load, stored, stored_bytes
from tidegate.models.sources import ModelSource
from tidegate.node import wire
from tidegate.node.backend import Progress, Traits
from tidegate.node.config import EngineConfig
from tidegate.node.lane_host import LaneHost
from tidegate.node.process_lanes import ProcessLanes
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
        self._source = source
        cores = CoreSets(config.cores)
        self._cores = cores.cores
        self.traits = replace(self.traits, shares=cores.shares())
        self._stored = stored(source.spec, config.quantization)
        self.weight_bytes = stored_bytes(source.spec, config.quantization)
        self.kv_bytes = 0
        self._pool_spec: PoolSpec | None = None
        self._lanes: ProcessLanes | None = None

    @property
    def description(self) -> str:
        return f"cpu, {len(self._cores)} cores" if len(self._cores) > 1 else "cpu, 1 core"

    def size_pool(self, config: EngineConfig) -> PoolSpec:
        room = host_kv_bytes(config, self.weight_bytes)
        spec = self._source.spec
        kv_dtype = kv_dtype_of(spec, config, "float32")
        self._pool_spec = pool_of(spec, config, room, kv_dtype, self.traits.max_num_seqs)
        return self._pool_spec

    def open(self, lanes: Sequence[LaneSpec], progress: Progress) -> LaneHost:
        assert self._pool_spec is not None
        spec, pool_spec, cores = self._source.spec, self._pool_spec, self._cores
        regions, num_bytes = lay_out(spec, pool_spec, self._stored)
        self.kv_bytes = next(region_bytes(region) for region in regions if region.name == "kv")
        memory = SharedMemory.create(num_bytes)
        self._lanes = host = ProcessLanes(memory.fd)
        for lane in lanes:
            host.start(lane.name)  # they import while the weights are read
        weights, pool = memory.open_pool(pool_spec, regions)
        load(self._source, weights, lambda fraction: progress("loading weights", fraction))
        progress("starting lanes", 0.0)
        host.provide(pool, lambda lane: wire.LaneInit(lane, spec, pool_spec, regions, num_bytes, cores))
        return host

    def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
