"""What a device brings to a node: memory for a pool, lanes over it, and the traits that the core's settings need."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate.base.errors import ConfigError
from tidegate.base.specs import PoolSpec
from tidegate.device import mps
from tidegate.device.gpu import cuda_bindings_installed, nvidia_device_present, why_no_gpu
from tidegate.device.places import MPS
from tidegate.models.sources import ModelSource
from tidegate.node.config import EngineConfig
from tidegate.node.lane_host import LaneHost
from tidegate.policy.modes import LaneSpec
from tidegate.slo.latency import Padding

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Traits:
    """Of a device, for the core."""

    slice_seconds: float
    min_slice_tokens: int
    slice_quantum_tokens: int
    max_slices: int  # prompts in one batch
    max_prefill_tokens: int  # of one batch
    prefill_tokens_per_s: float  # a first guess
    padding: Padding  # of batches
    max_num_seqs: int  # where the user does not say
    max_num_batched_tokens: int  # the same
    settling_seconds: float = 0.0  # of hard work, before batches take as long as they do under load
    shares: tuple[float, ...] = (0.5, 0.7, 0.6, 0.8, 0.4, 0.25)  # of prefill, to choose among; the most useful first


class Backend(Protocol):
    @property
    def traits(self) -> Traits: ...

    @property
    def description(self) -> str:
        """The device, for people."""
        ...

    @property
    def sharing(self) -> str:
        """How its compute is divided, for people."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int: ...

    def size_pool(self, config: EngineConfig) -> PoolSpec:
        """Called first. Raises ConfigError where the KV cache can't hold what was asked for."""
        ...

    def open(self, lanes: Sequence[LaneSpec], progress: Progress) -> LaneHost:
        """Reads the weights and starts the lanes."""
        ...

    def close(self) -> None: ...


def tell_apart(lanes: Sequence[LaneSpec], reason: str | None, progress: Progress) -> None:
    """Where lanes ask for fused attention and can't have it: says so, and why."""
    if reason is not None and any(lane.fused for lane in lanes):
        progress(f"attention of prompts and decodes runs in two kernels: {reason}", 0.0)


def make_backend(config: EngineConfig, source: ModelSource, progress: Progress) -> Backend:
    """The backend of ``--device``; "auto" is a GPU where there is one that torch can use. Says why not, where there is
    one that it can't."""
    if config.tensor_parallel_size < 1:
        raise ConfigError("--tensor-parallel-size must be at least 1")
    if config.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {config.device!r}; choose auto, cpu or cuda")
    # Asked before the first use of the GPU, which would make this process a client of a daemon that is there.
    why_no_mps = mps.why_not() if config.sharing == MPS and config.device != "cpu" else None
    reason = "it was not asked for" if config.device == "cpu" else _why_no_gpu()
    if reason is None and config.sharing == MPS:
        if why_no_mps is not None:
            raise ConfigError(f"--sharing mps: {why_no_mps}")
        from tidegate.node.mps_backend import MpsBackend

        return MpsBackend(config, source)
    if reason is None:
        from tidegate.node.gpu_backend import GpuBackend

        return GpuBackend(config, source)
    if config.device == "cuda":
        raise ConfigError(f"--device cuda: no GPU can be used: {reason}; --device cpu serves without one")
    if config.device == "auto" and nvidia_device_present():
        progress(f"serving without the GPU, which can't be used: {reason}", 0.0)
    from tidegate.node.cpu_backend import CpuBackend

    return CpuBackend(config, source)


def _why_no_gpu() -> str | None:
    reason = why_no_gpu()
    if reason is None and not cuda_bindings_installed():
        return "cuda-bindings is not installed: pip install 'tidegate[cuda]'"
    return reason
