"""How much KV an engine gets, and the longest sequence that follows from it."""

from pathlib import Path
from typing import NamedTuple

import torch

from tidegate.base.errors import ConfigError
from tidegate.base.specs import ModelSpec, PoolSpec
from tidegate.node.config import EngineConfig

DEFAULT_UTILIZATION = 0.9  # of a GPU's memory
GPU_RESERVED_BYTES = 6 << 30  # graphs, activations and workspaces of two lanes, at least
RESERVED_PART = 16  # of a large GPU's memory, one in so many: it runs steps of more rows, on more divisions
MPS_RESERVED_BYTES = 12 << 30  # the same and contexts, of three processes and one that is prepared beside them
DEFAULT_KV_BYTES = 4 << 30  # where there is no GPU
FP8_NAMES = ("fp8", "fp8_e4m3")
MEMORY_FRACTION = 0.4  # of the free memory that KV takes at most, unless the user says how much


def kv_dtype_of(model: ModelSpec, config: EngineConfig, compute_dtype: str) -> str:
    """torch's name of the type of the KV cache. Raises ConfigError for one that it can't have."""
    if config.kv_cache_dtype == "auto":
        return compute_dtype
    if config.kv_cache_dtype not in FP8_NAMES:
        raise ConfigError(f"unknown --kv-cache-dtype {config.kv_cache_dtype!r}; choose auto, {', '.join(FP8_NAMES)}")
    if model.latent is not None:
        raise ConfigError(f"--kv-cache-dtype {config.kv_cache_dtype} is not for latent vectors so far: leave it out")
    return "float8_e4m3fn"


def pool_of(model: ModelSpec, config: EngineConfig, room_bytes: int, kv_dtype: str, max_num_seqs: int) -> PoolSpec:
    """The pool that fits into ``room_bytes`` of KV cache.

    Raises ConfigError when it can't hold the longest sequence asked for.
    """
    seqs = config.max_num_seqs if config.max_num_seqs is not None else max_num_seqs
    if seqs < 1 or config.block_size < 1:
        raise ConfigError("--max-num-seqs and --block-size must be at least 1")
    block_bytes = _block_bytes(model, config, kv_dtype)
    num_blocks = config.num_blocks if config.num_blocks is not None else room_bytes // block_bytes
    capacity = max(0, num_blocks) * config.block_size
    max_model_len = min(model.max_len, capacity) if config.max_model_len is None else config.max_model_len
    if not 1 <= max_model_len <= capacity:
        needed = -(-max(1, max_model_len) // config.block_size) * block_bytes
        raise ConfigError(
            f"one sequence of {max(1, max_model_len)} tokens needs {needed / 2**20:.1f} MiB of KV cache, and there is "
            f"room for {capacity} tokens: lower --max-model-len or raise --kv-cache-memory-bytes"
        )
    return PoolSpec(num_blocks, config.block_size, seqs, max_model_len, kv_dtype)


def _block_bytes(model: ModelSpec, config: EngineConfig, kv_dtype: str) -> int:
    return model.kv_elements_per_token * int(getattr(torch, kv_dtype).itemsize) * config.block_size


class DeviceMemory(NamedTuple):
    """Of a GPU. What is not free, another process has."""

    free_bytes: int
    total_bytes: int
    reserved_bytes: int  # that lanes take besides weights and KV

    @classmethod
    def of(cls, free_bytes: int, total_bytes: int, least_reserved_bytes: int = GPU_RESERVED_BYTES) -> "DeviceMemory":
        return cls(free_bytes, total_bytes, max(least_reserved_bytes, total_bytes // RESERVED_PART))


def gpu_pool(
    model: ModelSpec, config: EngineConfig, memory: DeviceMemory, weight_bytes: int, dtype: str, most_seqs: int
) -> PoolSpec:
    """The pool of a GPU, for ``weight_bytes`` of weights, and ``dtype`` what is computed in.

    Raises ConfigError where memory does not suffice, saying how much is short and what to change.
    """
    if config.max_num_seqs is not None and config.max_num_seqs > most_seqs:
        raise ConfigError(f"--max-num-seqs {config.max_num_seqs} is too large: on a GPU it can be at most {most_seqs}")
    kv_dtype = kv_dtype_of(model, config, dtype)
    spec = pool_of(model, config, _gpu_kv_bytes(config, memory, weight_bytes, dtype), kv_dtype, most_seqs)
    block_bytes = _block_bytes(model, config, kv_dtype)
    asked, left = spec.num_blocks * block_bytes, memory.free_bytes - weight_bytes - memory.reserved_bytes
    if asked > left:
        flag = "--num-gpu-blocks-override" if config.num_blocks is not None else "--kv-cache-memory-bytes"
        raise ConfigError(
            f"{flag} asks for {_gib(asked)} of KV cache, {_gib(asked - left)} more than there is: "
            f"{_needs(weight_bytes, dtype, memory)}, and {_gib(memory.free_bytes)} of the GPU's memory are free; "
            f"lower it to at most {left // block_bytes} blocks ({_gib(left)})"
        )
    return spec


def _gpu_kv_bytes(config: EngineConfig, memory: DeviceMemory, weight_bytes: int, dtype: str) -> int:
    fraction = DEFAULT_UTILIZATION if config.gpu_memory_utilization is None else config.gpu_memory_utilization
    if not 0 < fraction <= 1:
        raise ConfigError(f"--gpu-memory-utilization {fraction} is not a fraction: give a number over 0 and up to 1")
    free, total, reserved = memory
    needed = weight_bytes + reserved
    needs = _needs(weight_bytes, dtype, memory)
    if needed >= total:
        raise ConfigError(
            f"{needs}: that is {_gib(needed - total)} more than the GPU has ({_gib(total)}); take a smaller model, "
            f"{_lighter(config, dtype)}or more GPUs (--tensor-parallel-size)"
        )
    if needed >= free:
        raise ConfigError(
            f"{needs}: that is {_gib(needed - free)} more than is free on the GPU ({_gib(free)} of {_gib(total)}); "
            f"end what else uses it, or take a smaller model"
        )
    if config.num_blocks is not None:
        return 0  # is not asked for
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    room = int(min(total * fraction, free)) - needed
    if room <= 0:
        raise ConfigError(
            f"{needs}: with --gpu-memory-utilization {fraction:g}, of {_gib(total)}, that leaves no room for KV "
            f"({_gib(-room)} short); raise it to more than {needed / total:.2f}"
        )
    return room


def _needs(weight_bytes: int, dtype: str, memory: DeviceMemory) -> str:
    return f"the weights need {_gib(weight_bytes)} in {dtype} and {_gib(memory.reserved_bytes)} are kept for graphs"


def _lighter(config: EngineConfig, dtype: str) -> str:
    if dtype == "float32":
        return "--dtype bfloat16, "
    return "" if config.quantization == "fp8" else "--quantization fp8, "


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def host_kv_bytes(config: EngineConfig, weight_bytes: int) -> int:
    """Of a machine without a GPU: as the user says, else 4 GiB, but no more than a good part of what is free."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if config.gpu_memory_utilization is not None:
        given = int(memory_bytes("MemTotal") * config.gpu_memory_utilization)
        if given <= weight_bytes:
            raise ConfigError(
                f"--gpu-memory-utilization {config.gpu_memory_utilization} gives {given / 2**30:.2f} GiB, and the "
                f"weights alone need {weight_bytes / 2**30:.2f} GiB: raise it"
            )
        return given - weight_bytes
    return min(DEFAULT_KV_BYTES, int((memory_bytes("MemAvailable") - weight_bytes) * MEMORY_FRACTION))


def memory_bytes(line: str) -> int:
    """One line of the kernel's account: "MemTotal", or "MemAvailable" (what could be had without swapping)."""
    for text in Path("/proc/meminfo").read_text().splitlines():
        name, value = text.split(":")
        if name == line:
            return int(value.split()[0]) * 1024
    raise KeyError(line)
