"""What a user can ask of one engine. The names are those of vLLM's flags where the meaning is the same."""

import msgspec

from tidegate.slo.goodput import Slo


class EngineConfig(msgspec.Struct, frozen=True):
    model: str  # a directory, a .gguf file, a hub id, or a config.json for dummy weights
    load_format: str = "auto"  # or "dummy"
    seed: int = 0  # of dummy weights
    device: str = "auto"  # or "cpu", "cuda"
    dtype: str = "auto"  # of weights and KV: bfloat16 on a GPU, float32 on a CPU; or "bfloat16", "float32"
    kv_cache_dtype: str = "auto"  # that of the weights; or "fp8"
    tensor_parallel_size: int = 1  # devices that compute the model together; on a CPU, groups of lanes
    sharing: str = "auto"  # of a GPU between lanes: a row of device.places.FORMS
    quantization: str | None = None  # or "int8", "fp8": weights in it, activations in it as they are multiplied
    mode: str = "semi"
    prefill_share: float = 0.5  # of the compute, while prefill and decode both run
    order: str | None = None  # None: by slack where there is an SLO, else shortest first
    gate: str | None = None  # who sets the shares and the sizes of slices; None: the mode's own
    slo: Slo | None = None
    max_model_len: int | None = None  # None: the model's own, as far as the KV cache holds it
    max_num_seqs: int | None = None  # None: as suits the device
    max_num_batched_tokens: int | None = None  # the same
    max_waiting: int = 1024
    reject_unreachable: bool = False  # refuse requests that are predicted to miss their TTFT by far
    slice_ms: float | None = None  # the same
    block_size: int = 16
    gpu_memory_utilization: float | None = None  # of the device's memory, for weights and KV together
    kv_cache_memory_bytes: int | None = None  # overrides gpu_memory_utilization
    num_blocks: int | None = None  # overrides kv_cache_memory_bytes
    prefix_caching: bool = True
    latency_model: str | None = None  # a file to take predictions from, in place of a kept one or a measurement
    calibration_seconds: float = 25.0  # for measuring how long steps take, where a gate needs it
    recalibrate: bool = False  # even if there is a kept measurement
    cores: tuple[int, ...] = ()  # empty: all that this process may use
    record: str | None = None  # a file for the event log
