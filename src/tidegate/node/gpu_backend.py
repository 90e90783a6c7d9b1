"""One GPU: weights and KV in one allocation, lanes as threads, compute divided as ``device.places`` says."""

import sys
from collections.abc import Callable, Sequence
from math import prod

import torch

from tidegate.base.errors import ConfigError
from tidegate.base.specs import PoolSpec
from tidegate.device.gpu_memory import GpuMemory
from tidegate.device.green_contexts import SmParts
from tidegate.device.memory import lay_out, region_bytes
from tidegate.device.places import FORMS, Form, Place, Places
from tidegate.device.pool import Pool
from tidegate.kernels.gpu_support import why_no_graphs
from tidegate.models.linears import load, stored, stored_bytes
from tidegate.models.sources import ModelSource
from tidegate.models.weights import layout
from tidegate.node.backend import Progress, Traits
from tidegate.node.config import EngineConfig
from tidegate.node.gpu_lanes import CountSms, GpuLanes, LanePlan
from tidegate.node.lane_host import LaneHost
from tidegate.node.sizing import DeviceMemory, gpu_pool
from tidegate.policy.modes import LaneSpec
from tidegate.runner.lane_runner import LaneRunner
from tidegate.runner.shapes import DECODE_STEPS, MAX_SLICES, PADDING, PREFILL_STEPS, Scratch, StepShape, ladder

DTYPES = ("bfloat16", "float32")
SWITCH_SECONDS = 2e-4  # a lane that prepares a step must not wait long for the interpreter
SHARES = (0.545, 0.667, 0.424, 0.788)  # 72, 88, 56 and 104 of an H200's 132 SMs
LEAST_FP8_CAPABILITY = (8, 9)
USEFUL_FLOPS = {"bfloat16": 5e14, "float32": 3e13}  # for a first guess of the prefill rate


class GpuBackend:
    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        if config.sharing not in ("auto", *FORMS):
            raise ConfigError(f"unknown sharing {config.sharing!r}; choose auto, {', '.join(FORMS)}")
        self._dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        if self._dtype not in DTYPES:
            raise ConfigError(f"--dtype {config.dtype} is not to be had on a GPU; choose auto, {', '.join(DTYPES)}")
        self._config, self._source = config, source
        self._device = torch.device("cuda", 0)
        self._check_quantization()
        self._stored = stored(source.spec, config.quantization, self._dtype)
        self.weight_bytes = stored_bytes(source.spec, config.quantization, self._dtype)
        elements = sum(prod(shape) for shape in layout(source.spec).values())
        self.kv_bytes = 0
        self._arrays: PoolSpec | None = None
        self._form = FORMS["disjoint"]
        self._why_eager: str | None = None
        self._lanes: GpuLanes | None = None
        self.traits = Traits(
            slice_seconds=0.03,
            min_slice_tokens=128,
            slice_quantum_tokens=16,
            max_slices=MAX_SLICES,
            max_prefill_tokens=PREFILL_STEPS[-1],
            padding=PADDING,
            prefill_tokens_per_s=USEFUL_FLOPS[self._dtype] / (2 * elements),
            max_num_seqs=DECODE_STEPS[-1],
            max_num_batched_tokens=8192,
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
    def description(self) -> str:
        weights = ", weights in FP8" if self._in_fp8 else ""
        name = f"{torch.cuda.get_device_name(self._device)} in {self._dtype}{weights}"
        return f"{name}, without graphs and much slower, since {self._why_eager}" if self._why_eager else name

    @property
    def sharing(self) -> str:
        return self._form.description

    def size_pool(self, config: EngineConfig) -> PoolSpec:
        memory = DeviceMemory(*torch.cuda.mem_get_info(self._device))
        spec = gpu_pool(self._source.spec, config, memory, self.weight_bytes, self._dtype, DECODE_STEPS[-1])
        # One block and one slot more than the core knows of, for padding.
        self._arrays = PoolSpec(
            spec.num_blocks + 1, spec.block_size, spec.max_num_seqs + 1, spec.max_model_len, spec.kv_dtype
        )
        return spec

    def open(self, lanes: Sequence[LaneSpec], progress: Progress) -> LaneHost:
        sys.setswitchinterval(SWITCH_SECONDS)
        torch.set_float32_matmul_precision("highest")  # float32 means float32
        parts = SmParts()
        self._form = _form(self._config.sharing, parts, divide=len(lanes) > 1)
        places = Places(parts, self._form)
        progress("preparing attention kernels", 0.0)
        assert self._arrays is not None
        kv_dtype = getattr(torch, self._arrays.kv_dtype)
        self._why_eager = why_no_graphs(self._source.spec, getattr(torch, self._dtype), kv_dtype, self._device)
        try:
            weights, pool = self._load(progress)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "the GPU's memory did not suffice to read the weights: lower --gpu-memory-utilization, or end what "
                "else uses the GPU"
            ) from error
        make = self._runners(weights, pool)
        alone, phases = len(lanes) == 1, {spec.name: spec.phases for spec in lanes}

        def plan(lane: str) -> LanePlan:
            shapes = [] if self._why_eager else self._ladder(phases.get(lane, lane))
            share = self._config.prefill_share if lane == "P" else 1.0 - self._config.prefill_share
            stage = f"capturing graphs of lane {lane}"

            def told(fraction: float) -> None:
                if lane in phases:  # one that a later mode needs starts while the node's loop talks to the server
                    progress(stage, fraction)

            return LanePlan(
                make=make,
                place=lambda share: places.of(lane, share),
                share=1.0 if alone and lane in phases else share,
                ladder=shapes,
                beside=[shape for shape in shapes if not shape.hybrid and bool(shape.prefill_tokens) is (lane == "P")],
                progress=told,
                count_sms=_count_sms,
                reserved_bytes=lambda: torch.cuda.memory_reserved(self._device),
            )

        self._lanes = host = GpuLanes(pool, plan)
        for spec in lanes:
            host.start(spec.name)
        return host

    def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()

    def _load(self, progress: Progress) -> tuple[dict[str, torch.Tensor], Pool]:
        assert self._arrays is not None
        regions, num_bytes = lay_out(self._source.spec, self._arrays, self._stored)
        self.kv_bytes = next(region_bytes(region) for region in regions if region.name == "kv")
        weights, pool = GpuMemory(num_bytes).open_pool(self._arrays, regions)
        load(self._source, weights, lambda fraction: progress("loading weights", fraction))
        torch.cuda.synchronize(self._device)
        return weights, pool

    def _runners(self, weights: dict[str, torch.Tensor], pool: Pool) -> Callable[[], LaneRunner]:
        """Makes a lane's runner. What only one kind needs is imported when that kind is chosen."""
        spec = self._source.spec
        if self._why_eager is None:
            from tidegate.runner.gpu_runner import GpuRunner

            scratch = Scratch(pool.spec.num_blocks - 1, pool.spec.max_num_seqs - 1)
            return lambda: GpuRunner(spec, weights, pool, scratch)
        from tidegate.runner.eager_runner import EagerRunner, plain_attention

        plain_attention()
        return lambda: EagerRunner.over(spec, weights, pool)

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


def _count_sms(place: Place) -> CountSms:
    try:
        from tidegate.kernels.triton_sm_ids import SmIds
    except ImportError:
        return lambda: 0
    assert place.stream is not None
    ids = SmIds(place.stream)
    return lambda: len(ids.known() or ())
