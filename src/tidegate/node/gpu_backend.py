"""One GPU: weights and KV in one allocation, lanes as threads, compute divided by green contexts."""

import bisect
import itertools
import sys
from math import prod

import torch

from tidegate.base.errors import ConfigError
from tidegate.base.specs import PoolSpec
from tidegate.device.gpu_memory import GpuMemory
from tidegate.device.green_contexts import Part, SmParts
from tidegate.device.memory import lay_out, region_bytes
from tidegate.models.sources import ModelSource
from tidegate.models.weights import layout
from tidegate.node.backend import Progress, Traits
from tidegate.node.config import EngineConfig
from tidegate.node.gpu_lanes import GpuLanes
from tidegate.node.lane_host import LaneHost
from tidegate.node.sizing import pool_of
from tidegate.runner.gpu_runner import (
    DECODE_STEPS,
    HYBRID_DECODE_STEPS,
    HYBRID_PREFILL_STEPS,
    PREFILL_STEPS,
    GpuRunner,
)
from tidegate.runner.step_graph import MAX_SLICES, Scratch, StepShape
from tidegate.slo.latency import Padding

DTYPE = "bfloat16"
DTYPE_BYTES = 2
DEFAULT_UTILIZATION = 0.9
RESERVED_BYTES = 6 << 30  # graphs, activations and workspaces of two lanes
SWITCH_SECONDS = 2e-4  # a lane that prepares a step must not wait long for the interpreter
USEFUL_FLOPS = 5e14  # for a first guess of the prefill rate


class GpuBackend:
    sharing = "green contexts"

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        if config.quantization is not None:
            raise ConfigError("--quantization is for machines without a GPU so far: leave it out, or use --device cpu")
        self._config, self._source = config, source
        self._shapes = layout(source.spec)
        elements = sum(prod(shape) for shape in self._shapes.values())
        self.weight_bytes = DTYPE_BYTES * elements
        self.kv_bytes = 0
        self._device = torch.device("cuda", 0)
        self._arrays: PoolSpec | None = None
        self._scratch = Scratch(0, 0)
        self._lanes: GpuLanes | None = None
        self.traits = Traits(
            slice_seconds=0.03,
            min_slice_tokens=128,
            slice_quantum_tokens=64,
            max_slices=MAX_SLICES,
            max_prefill_tokens=PREFILL_STEPS[-1],
            padding=Padding(),
            prefill_tokens_per_s=USEFUL_FLOPS / (2 * elements),
            max_num_seqs=DECODE_STEPS[-1],
            max_num_batched_tokens=8192,
        )

    @property
    def description(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def size_pool(self, config: EngineConfig) -> PoolSpec:
        free, total = torch.cuda.mem_get_info(self._device)
        utilization = config.gpu_memory_utilization or DEFAULT_UTILIZATION
        room = int(min(total * utilization, free) - self.weight_bytes - RESERVED_BYTES)
        if config.kv_cache_memory_bytes is not None:
            room = config.kv_cache_memory_bytes
        if room <= 0:
            raise ConfigError(
                f"the weights need {self.weight_bytes / 2**30:.1f} GiB and {RESERVED_BYTES / 2**30:.0f} GiB are kept "
                f"for graphs; {total * utilization / 2**30:.1f} GiB may be used: raise --gpu-memory-utilization, or "
                f"take a smaller model"
            )
        spec = pool_of(self._source.spec, config, room, DTYPE_BYTES, DTYPE, self.traits.max_num_seqs)
        if spec.max_num_seqs > DECODE_STEPS[-1]:
            raise ConfigError(f"--max-num-seqs can be at most {DECODE_STEPS[-1]} on a GPU")
        # One block and one slot more than the core knows of, for padding.
        self._scratch = Scratch(spec.num_blocks, spec.max_num_seqs)
        self._arrays = PoolSpec(
            spec.num_blocks + 1, spec.block_size, spec.max_num_seqs + 1, spec.max_model_len, spec.kv_dtype
        )
        return spec

    def open(self, lanes: list[str], progress: Progress) -> LaneHost:
        assert self._arrays is not None
        sys.setswitchinterval(SWITCH_SECONDS)
        stored = {name: (DTYPE, shape) for name, shape in self._shapes.items()}
        regions, num_bytes = lay_out(self._source.spec, self._arrays, stored)
        self.kv_bytes = next(region_bytes(region) for region in regions if region.name == "kv")
        weights, pool = GpuMemory(num_bytes).open_pool(self._arrays, regions)
        self._source.load(weights, lambda fraction: progress("loading weights", fraction))
        torch.cuda.synchronize(self._device)
        parts = SmParts()
        alone = len(lanes) == 1

        def prepare(lane: str, runner: GpuRunner) -> None:
            """Captures what the lane will most likely need; other shapes are captured when they first come."""
            wanted = self._shapes_of(lane, alone)
            ours = self._parts_of(lane, alone, parts)
            for i, (shape, part) in enumerate(itertools.product(wanted, ours)):
                runner.prepare(shape, part)
                progress(f"capturing graphs of lane {lane}", (i + 1) / (len(wanted) * len(ours)))

        self._lanes = host = GpuLanes(self._source.spec, weights, pool, self._scratch, parts, prepare)
        for lane in lanes:
            host.start(lane)
        return host

    def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()

    def _shapes_of(self, lane: str, alone: bool) -> list[StepShape]:
        assert self._arrays is not None
        budget = self._config.max_num_batched_tokens or self.traits.max_num_batched_tokens
        prefills = [StepShape(n, 0) for n in _up_to(PREFILL_STEPS, budget)]
        if lane == "P":
            return prefills
        decodes = [StepShape(0, n) for n in DECODE_STEPS if n < self._arrays.max_num_seqs]
        if not alone:
            return decodes
        hybrids = [StepShape(n, d) for n in _up_to(HYBRID_PREFILL_STEPS, budget) for d in HYBRID_DECODE_STEPS]
        return decodes + prefills + hybrids

    def _parts_of(self, lane: str, alone: bool, parts: SmParts) -> list[Part]:
        if alone:
            return [parts.whole]
        first, rest = parts.pair(self._config.prefill_share)
        return [parts.whole, first if lane == "P" else rest]


def _up_to(steps: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The steps that batches of up to ``most`` are padded to."""
    return steps[: bisect.bisect_left(steps, most) + 1]
