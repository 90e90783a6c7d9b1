"""One GPU, lanes as processes that share it by MPS, as in Semi-PD (arXiv 2504.19867): this process holds weights and KV
and starts no kernels while it serves; each lane maps them.

Prefill is kept to its share and decode to nothing, which are Semi-PD's defaults too: decode waits for memory more than
for SMs, what prefill leaves free it can use at once, and its graphs, which are most, never have to be captured again.
So that prefill has the whole device too when it is alone, it has a second process for that.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from tidegate.base.errors import ConfigError
from tidegate.device.memory import SharedMemory, region_bytes, table_region
from tidegate.device.mps import MpsDaemon, percent_of
from tidegate.kernels.gpu_support import why_no_graphs
from tidegate.models.sources import ModelSource
from tidegate.node import wire
from tidegate.node.backend import Progress
from tidegate.node.config import EngineConfig
from tidegate.node.gpu_backend import GpuBackend
from tidegate.node.gpu_rank import GpuRank
from tidegate.node.lane_host import LaneHost
from tidegate.node.mps_lanes import MpsLanes
from tidegate.node.mps_worker import Worker
from tidegate.node.rotation import Division, Rotation
from tidegate.node.sizing import MPS_RESERVED_BYTES
from tidegate.policy.modes import LaneSpec

DIVIDED = ("P",)  # lanes that are kept to their share
COMMAND = (sys.executable, "-m", "tidegate.node.gpu_lane_process")


class MpsBackend(GpuBackend):
    reserved_bytes = MPS_RESERVED_BYTES
    sharing = "a set of SMs for prefill, decode on all (MPS, lanes as processes)"

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        if config.tensor_parallel_size > 1:
            raise ConfigError("--sharing mps is for one GPU: leave it out, or --tensor-parallel-size")
        super().__init__(config, source)
        # Only the share that is in force can be measured: another takes seconds to prepare.
        self.traits = replace(self.traits, shares=(config.prefill_share,))
        self._daemon: MpsDaemon | None = None

    def open(self, lanes: Sequence[LaneSpec], progress: Progress) -> LaneHost:
        assert self._arrays is not None
        gpu = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
        self._daemon = daemon = MpsDaemon(gpu)
        spec, arrays, phases = self._source.spec, self._arrays, {lane.name: lane.phases for lane in lanes}
        progress("preparing attention kernels", 0.0)
        self._why_eager = why_no_graphs(spec, self._types, self._device)
        rank = GpuRank(self._source, spec, self._dtype, quantization=self._config.quantization)
        memory = rank.allocate(arrays)
        self.kv_bytes = rank.kv_bytes
        where = table_region(rank.regions)
        table = SharedMemory.create(region_bytes(where))
        _, pool = rank.load(memory, lambda fraction: progress("loading weights", fraction), table.tensor(where))
        torch.cuda.empty_cache()
        descriptors = memory.export(), table.fd

        def spawn(lane: str, percent: int) -> Worker:
            ladder = [] if self._why_eager else self._ladder(phases.get(lane, lane))
            init = wire.GpuLaneInit(
                lane=lane,
                model=spec,
                pool=arrays,
                regions=rank.regions,
                shared_bytes=memory.num_bytes,
                ladder=ladder,
                eager=self._why_eager is not None,
                first=lane not in DIVIDED,
            )
            environment = daemon.client_environment(percent, low_priority=lane in DIVIDED)
            return Worker(COMMAND, environment, descriptors, init, percent)

        share = self._config.prefill_share
        rotation = Rotation(division({"P": share, "D": 1.0 - share}))
        progress("starting lanes", 0.0)
        self._lanes = host = MpsLanes(pool, rotation, division, spawn, daemon)
        for lane in lanes:
            host.start(lane.name)
        return host

    def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
        elif self._daemon is not None:
            self._daemon.close()


def division(shares: dict[str, float]) -> Division:
    return Division(tuple((lane, percent_of(shares[lane])) for lane in DIVIDED))
