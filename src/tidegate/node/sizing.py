"""How much KV an engine gets, and the longest sequence that follows from it."""

from pathlib import Path

from tidegate.base.errors import ConfigError
from tidegate.base.specs import ModelSpec, PoolSpec
from tidegate.node.config import EngineConfig

DEFAULT_KV_BYTES = 4 << 30
MEMORY_FRACTION = 0.4  # of the free memory that KV takes at most, unless the user says how much


def pool_of(
    model: ModelSpec, config: EngineConfig, room_bytes: int, element_bytes: int, dtype: str, max_num_seqs: int
) -> PoolSpec:
    """The pool that fits into ``room_bytes`` of KV cache, of ``element_bytes`` an element.

    Raises ConfigError when it can't hold the longest sequence asked for.
    """
    seqs = config.max_num_seqs if config.max_num_seqs is not None else max_num_seqs
    if seqs < 1 or config.block_size < 1:
        raise ConfigError("--max-num-seqs and --block-size must be at least 1")
    block_bytes = model.kv_elements_per_token * element_bytes * config.block_size
    num_blocks = config.num_blocks if config.num_blocks is not None else room_bytes // block_bytes
    capacity = max(0, num_blocks) * config.block_size
    max_model_len = min(model.max_len, capacity) if config.max_model_len is None else config.max_model_len
    if not 1 <= max_model_len <= capacity:
        needed = -(-max(1, max_model_len) // config.block_size) * block_bytes
        raise ConfigError(
            f"one sequence of {max(1, max_model_len)} tokens needs {needed / 2**20:.1f} MiB of KV cache, and there is "
            f"room for {capacity} tokens: lower --max-model-len or raise --kv-cache-memory-bytes"
        )
    return PoolSpec(num_blocks, config.block_size, seqs, max_model_len, dtype)


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
