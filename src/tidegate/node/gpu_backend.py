"""GPUs: weights and KV in one allocation, lanes as threads, compute divided as ``device.places`` says; a process for
each further GPU where several compute a model together.

Where lanes are processes, ``node.mps_backend`` has what differs.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from math import prod

import torch

from tidegate.base.errors import ConfigError
from tidegate.base.specs import PoolSpec, Shard
from tidegate.device.green_contexts import SmParts
from tidegate.device.places import FORMS, MPS, Form, Place, Places
from tidegate.kernels.gpu_support import why_no_graphs, why_no_pod
from tidegate.kernels.step_rows import Types
from tidegate.models.linears import stored_bytes
from tidegate.models.shards import divide
from tidegate.models.sources import ModelSource
from tidegate.models.weights import layout
from tidegate.node import wire
from tidegate.node.backend import Progress, Traits, tell_apart
from tidegate.node.config import EngineConfig
from tidegate.node.gpu_lanes import SWITCH_SECONDS, GpuLanes, LanePlan
from tidegate.node.gpu_rank import GpuRank
from tidegate.node.gpu_runners import count_sms
from tidegate.node.lane_host import LaneHost
from tidegate.node.lead import Lead, LeadingRunner
from tidegate.node.rank_processes import RankProcesses
from tidegate.node.sizing import GPU_RESERVED_BYTES, DeviceMemory, gpu_pool
from tidegate.policy.modes import MODES, LaneSpec
from tidegate.runner.lane_runner import LaneRunner
from tidegate.runner.shapes import DECODE_STEPS, MAX_SLICES, PADDING, PREFILL_STEPS, StepShape, ladder

DTYPES = ("bfloat16", "float32")
# At rest a GPU's clock is at its highest, and work lowers it as the power limit wants: on an H200 a slice of 512 tokens
# takes 10.8 ms at first, and 12.3 ms after 0.1 s.
SETTLING_SECONDS = 0.1
SHARES = (0.545, 0.667, 0.424, 0.788)  # 72, 88, 56 and 104 of an H200's 132 SMs
LEAST_FP8_CAPABILITY = (8, 9)
USEFUL_FLOPS = {"bfloat16": 5e14, "float32": 3e13}  # for a first guess of the prefill rate


class GpuBackend:
    reserved_bytes = GPU_RESERVED_BYTES

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        known = ("auto", *FORMS, MPS)
        if config.sharing not in known:
            raise ConfigError(f"unknown sharing {config.sharing!r}; choose {', '.join(known)}")
        self._dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        if self._dtype not in DTYPES:
            raise ConfigError(f"--dtype {config.dtype} is not to be had on a GPU; choose auto, {', '.join(DTYPES)}")
        self._config, self._source = config, source
        ranks = config.tensor_parallel_size
        if ranks > 1 and ranks > (there := torch.cuda.device_count()):
            raise ConfigError(f"--tensor-parallel-size {ranks} needs as many GPUs, and there are {there}")
        self._models = [divide(source.spec, Shard(rank, ranks)) for rank in range(ranks)]
        elements = [sum(prod(shape) for shape in layout(model).values()) for model in self._models]
        self._device = torch.device("cuda", 0)
        self._check_quantization()
        self.weight_bytes = sum(stored_bytes(model, config.quantization, self._dtype) for model in self._models)
        self.kv_bytes = 0
        self._arrays: PoolSpec | None = None
        self._meeting_place: str | None = None
        self._others: RankProcesses | None = None
        self._form = FORMS["disjoint"]
        self._why_eager: str | None = None
        self._lanes: LaneHost | None = None
        self.traits = Traits(
            slice_seconds=0.03,
            min_slice_tokens=128,
            slice_quantum_tokens=16,
            max_slices=MAX_SLICES,
            max_prefill_tokens=PREFILL_STEPS[-1],
            padding=PADDING,
            prefill_tokens_per_s=USEFUL_FLOPS[self._dtype] / (2 * max(elements)),
            max_num_seqs=DECODE_STEPS[-1],
            max_num_batched_tokens=8192,
            settling_seconds=SETTLING_SECONDS,
            shares=SHARES,
        )

    def _check_quantization(self) -> None:
        """Raises ConfigError for what the device or the type that is computed in does not go with."""
        if self._config.quantization == "int8":
            raise ConfigError("--quantization int8 is for machines without a GPU: use fp8, or --device cpu")
        if not self._in_fp8:
            return
        if self._dtype != "bfloat16":
            raise ConfigError(f"weights in FP8 are multiplied in bfloat16 on a GPU: leave out --dtype {self._dtype}")
        major, minor = torch.cuda.get_device_capability(self._device)
        if (major, minor) < LEAST_FP8_CAPABILITY:
            raise ConfigError(f"weights in FP8 need a GPU of compute capability 8.9, and this one has {major}.{minor}")

    @property
    def _in_fp8(self) -> bool:
        return self._config.quantization == "fp8" or self._source.spec.fp8 is not None

    @property
    def _types(self) -> Types:
        assert self._arrays is not None
        return Types(getattr(torch, self._dtype), getattr(torch, self._arrays.kv_dtype))

    @property
    def description(self) -> str:
        count = f"{len(self._models)} × " if len(self._models) > 1 else ""
        weights = ", weights in FP8" if self._in_fp8 else ""
        name = f"{count}{torch.cuda.get_device_name(self._device)} in {self._dtype}{weights}"
        return f"{name}, without graphs and much slower, since {self._why_eager}" if self._why_eager else name

    @property
    def sharing(self) -> str:
        return self._form.description

    def size_pool(self, config: EngineConfig) -> PoolSpec:
        # Of the other ranks' devices too: they are taken to be alike.
        memory = DeviceMemory.of(*torch.cuda.mem_get_info(self._device), self.reserved_bytes)
        largest = max(self._models, key=lambda model: model.kv_elements_per_token)
        weight_bytes = stored_bytes(largest, config.quantization, self._dtype)
        spec = gpu_pool(largest, config, memory, weight_bytes, self._dtype, DECODE_STEPS[-1])
        # One block and one slot more than the core knows of, for padding.
        self._arrays = PoolSpec(
            spec.num_blocks + 1, spec.block_size, spec.max_num_seqs + 1, spec.max_model_len, spec.kv_dtype
        )
        return spec

    def open(self, lanes: Sequence[LaneSpec], progress: Progress) -> LaneHost:
        assert self._arrays is not None
        sys.setswitchinterval(SWITCH_SECONDS)
        if len(self._models) > 1:
            self._meeting_place = tempfile.mkdtemp(prefix="tidegate-")
            self._others = RankProcesses(len(self._models))
        own = self._models[0]
        parts = SmParts()
        self._form = _form(self._config.sharing, parts, divide=len(lanes) > 1)
        places = Places(parts, self._form)
        progress("preparing attention kernels", 0.0)
        self._why_eager = why_no_graphs(own, self._types, self._device)
        fused = self._fused(lanes, progress)
        if self._others is not None:
            self._others.begin(self._init)
        rank = GpuRank(self._source, own, self._dtype, self._meeting_place, self._config.quantization)
        weights, pool = rank.load(rank.allocate(self._arrays), lambda fraction: progress("loading weights", fraction))
        self.kv_bytes = self._kv_bytes_of_all(rank.kv_bytes)
        make = self._followed(rank.runners(weights, pool, self._why_eager is not None, progress))
        alone, phases = len(lanes) == 1, {spec.name: spec.phases for spec in lanes}
        # Gates other than "static" choose among the shares that are measured.
        gate = self._config.gate or MODES[self._config.mode].gates[0]
        moving = () if alone or gate == "static" else self.traits.shares

        def plan(lane: str) -> LanePlan:
            shapes = [] if self._why_eager else self._ladder(phases.get(lane, lane))
            share = self._config.prefill_share if lane == "P" else 1.0 - self._config.prefill_share
            stage = f"capturing graphs of lane {lane}"

            def told(fraction: float) -> None:
                if lane in phases:  # one that a later mode needs starts while the node's loop talks to the server
                    progress(stage, fraction)

            return LanePlan(
                make=lambda: make(lane, places.of(lane, 1.0) if lane in fused else None),
                place=lambda share: places.of(lane, share),
                share=1.0 if alone and lane in phases else share,
                ladder=shapes,
                beside=[shape for shape in shapes if not shape.hybrid and bool(shape.prefill_tokens) is (lane == "P")],
                progress=told,
                count_sms=count_sms,
                reserved_bytes=lambda: torch.cuda.memory_reserved(self._device),
                moving=[share if lane == "P" else 1.0 - share for share in moving],
            )

        self._lanes = host = GpuLanes(pool, plan)
        for spec in lanes:
            host.start(spec.name)
        if self._others is not None:
            self._others.watch(host.fail)
        return host

    def close(self) -> None:
        """Where a rank has been lost, lanes may wait for it forever: they are left to the end of the process."""
        if self._lanes is not None and not (self._others and self._others.lost):
            self._lanes.close()
        if self._others is not None:
            self._others.close()
        if self._meeting_place is not None:
            shutil.rmtree(self._meeting_place, ignore_errors=True)

    def _init(self, rank: int) -> wire.RankInit:
        """What another rank is told first."""
        assert self._arrays is not None and self._meeting_place is not None
        graphs = self._why_eager is None
        return wire.RankInit(
            self._config, rank, self._dtype, self._arrays, self._form.name, graphs, self._meeting_place
        )

    def _followed(self, make: Callable[[str, Place | None], LaneRunner]) -> Callable[[str, Place | None], LaneRunner]:
        """The same runners, with what they do told to the other ranks."""
        if self._others is None:
            return make
        lead = Lead(self._others.tell)
        return lambda lane, fused_in: LeadingRunner(lane, lambda lane: make(lane, fused_in), lead)

    def _kv_bytes_of_all(self, own_bytes: int) -> int:
        elements = [model.kv_elements_per_token for model in self._models]
        return own_bytes * sum(elements) // elements[0]

    def _fused(self, lanes: Sequence[LaneSpec], progress: Progress) -> set[str]:
        """The lanes that may run attention of prompts and decodes in one kernel. Says so where some ask in vain."""
        asking = {lane.name for lane in lanes if lane.fused}
        if not asking:
            return asking
        why = self._why_eager or why_no_pod(self._source.spec, self._types)
        if len(self._models) > 1:
            why = "every rank would measure, and choose, on its own"
        tell_apart(lanes, why, progress)
        return asking if why is None else set()

    def _ladder(self, phases: str) -> list[StepShape]:
        assert self._arrays is not None
        budget = self._config.max_num_batched_tokens or self.traits.max_num_batched_tokens
        return ladder("P" in phases, "D" in phases, min(budget, PREFILL_STEPS[-1]), self._arrays.max_num_seqs - 1)


def _form(asked: str, parts: SmParts, divide: bool) -> Form:
    """Raises ConfigError where the lanes are to have parts and the device can't be divided."""
    form = FORMS["disjoint" if asked == "auto" else asked]
    if form.divided:
        try:
            parts.require()
        except ConfigError:
            if divide or asked != "auto":
                raise
            return FORMS["streams"]  # with one lane there is nothing to divide, and a later mode will do with this
    return form
