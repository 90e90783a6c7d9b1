"""One GPU's part of a model: its weights and KV in one allocation, and the runners of its lanes."""

from collections.abc import Callable
from pathlib import Path

import torch

from tidegate.base.errors import ConfigError
from tidegate.base.specs import ModelSpec, PoolSpec
from tidegate.device.gpu_memory import GpuMemory
from tidegate.device.memory import lay_out, region_bytes
from tidegate.device.pool import Pool
from tidegate.kernels.collectives import Collectives
from tidegate.models.sources import ModelSource
from tidegate.models.weights import layout
from tidegate.runner.lane_runner import LaneRunner
from tidegate.runner.shapes import Scratch


class GpuRank:
    """The current device of a thread is that thread's: whoever computes with a rank other than 0 sets it first."""

    def __init__(self, source: ModelSource, spec: ModelSpec, dtype: str, meeting_place: str | None = None) -> None:
        """``spec`` is of this rank's part. ``meeting_place``: a directory, where there are several ranks."""
        self._source, self._spec, self._dtype = source, spec, dtype
        self._meeting_place = meeting_place
        self.device = torch.device("cuda", spec.shard.rank)
        self.kv_bytes = 0

    def load(self, arrays: PoolSpec, progress: Callable[[float], None]) -> tuple[dict[str, torch.Tensor], Pool]:
        """The weights, and the pool's arrays. Raises ConfigError where memory does not suffice."""
        stored = {name: (self._dtype, shape) for name, shape in layout(self._spec).items()}
        regions, num_bytes = lay_out(self._spec, arrays, stored)
        self.kv_bytes = next(region_bytes(region) for region in regions if region.name == "kv")
        try:
            weights, pool = GpuMemory(num_bytes, self._spec.shard.rank).open_pool(arrays, regions)
            self._source.load(weights, progress, self._spec.shard)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "the GPU's memory did not suffice to read the weights: lower --gpu-memory-utilization, or end what "
                "else uses the GPU"
            ) from error
        torch.cuda.synchronize(self.device)
        return weights, pool

    def runners(self, weights: dict[str, torch.Tensor], pool: Pool, graphs: bool) -> Callable[[str], LaneRunner]:
        """Makes a lane's runner. What only one kind needs is imported when that kind is chosen."""
        spec = self._spec
        if graphs:
            from tidegate.runner.gpu_runner import GpuRunner

            scratch = Scratch(pool.spec.num_blocks - 1, pool.spec.max_num_seqs - 1)
            return lambda lane: GpuRunner(spec, weights, pool, scratch, self._collectives(lane))
        from tidegate.runner.eager_runner import EagerRunner, plain_attention

        plain_attention()
        return lambda lane: EagerRunner.over(spec, weights, pool, self._collectives(lane))

    def _collectives(self, lane: str) -> Collectives | None:
        """Each lane's own."""
        if self._meeting_place is None:
            return None
        return Collectives.over_nccl(self._spec.shard, str(Path(self._meeting_place) / lane))
