"""One GPU's part of a model: its weights and KV in one allocation, and the runners of its lanes."""

from collections.abc import Callable
from pathlib import Path

import torch

from tidegate.base.errors import ConfigError
from tidegate.base.specs import ModelSpec, PoolSpec, Region
from tidegate.device.gpu_memory import GpuMemory
from tidegate.device.memory import lay_out, region_bytes
from tidegate.device.places import Place
from tidegate.device.pool import Pool
from tidegate.kernels.collectives import Collectives
from tidegate.models.linears import load, stored
from tidegate.models.sources import ModelSource
from tidegate.node.backend import Progress
from tidegate.node.gpu_runners import runner_maker
from tidegate.runner.lane_runner import LaneRunner


class GpuRank:
    """The current device of a thread is that thread's: whoever computes with a rank other than 0 sets it first."""

    def __init__(
        self,
        source: ModelSource,
        spec: ModelSpec,
        dtype: str,
        meeting_place: str | None = None,
        quantization: str | None = None,
    ) -> None:
        """``spec`` is of this rank's part. ``meeting_place``: a directory, where there are several ranks."""
        self._source, self._spec, self._dtype, self._quantization = source, spec, dtype, quantization
        self._meeting_place = meeting_place
        self.device = torch.device("cuda", spec.shard.rank)
        self.kv_bytes = 0
        self.regions: list[Region] = []
        self._arrays: PoolSpec | None = None

    def allocate(self, arrays: PoolSpec) -> GpuMemory:
        """For weights, and the pool's arrays. Raises ConfigError where memory does not suffice."""
        self._arrays = arrays
        self.regions, num_bytes = lay_out(self._spec, arrays, stored(self._spec, self._quantization, self._dtype))
        self.kv_bytes = next(region_bytes(region) for region in self.regions if region.name == "kv")
        return GpuMemory(num_bytes, self._spec.shard.rank)

    def load(
        self, memory: GpuMemory, progress: Callable[[float], None], table: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], Pool]:
        """The weights, and the pool; ``table`` is its block table, where that lies elsewhere."""
        assert self._arrays is not None
        try:
            weights, pool = memory.open_pool(self._arrays, self.regions, table)
            load(self._source, weights, progress, self._spec.shard)
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "the GPU's memory did not suffice to read the weights: lower --gpu-memory-utilization, or end what "
                "else uses the GPU"
            ) from error
        return weights, pool

    def runners(
        self,
        weights: dict[str, torch.Tensor],
        pool: Pool,
        eager: bool,
        progress: Progress = lambda stage, fraction: None,
    ) -> Callable[[str, Place | None], LaneRunner]:
        """Makes a lane's runner, which may fuse attention where a place is given to measure that in."""
        make = runner_maker(self._spec, weights, pool, eager, progress)
        return lambda lane, fused_in: make(fused_in, self._collectives(lane))

    def _collectives(self, lane: str) -> Collectives | None:
        """Each lane's own."""
        if self._meeting_place is None:
            return None
        return Collectives.over_nccl(self._spec.shard, str(Path(self._meeting_place) / lane))
