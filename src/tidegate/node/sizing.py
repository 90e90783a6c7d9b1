"""How much KV an engine gets, and the longest sequence that follows from it."""

import os
from pathlib import Path

from tidegate.base.errors import ConfigError
from tidegate.base.specs import ModelSpec, PoolSpec
from tidegate.node.config import EngineConfig

DEFAULT_KV_BYTES = 4 << 30
MEMORY_FRACTION = 0.4  # of the free memory that KV takes at most, unless the user says how much


def size_pool(model: ModelSpec, config: EngineConfig) -> PoolSpec:
    """Raises ConfigError when the KV cache can't hold the longest sequence asked for."""
    block_bytes = model.kv_bytes_per_token * config.block_size
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    else:
        num_bytes = config.kv_cache_memory_bytes
        if num_bytes is None:
            num_bytes = min(DEFAULT_KV_BYTES, int(free_memory_bytes() * MEMORY_FRACTION))
        num_blocks = num_bytes // block_bytes
    capacity = num_blocks * config.block_size
    if config.max_model_len is None:
        max_model_len = min(model.max_len, capacity)
    else:
        max_model_len = config.max_model_len
        if max_model_len > capacity:
            needed = -(-max_model_len // config.block_size) * block_bytes
            raise ConfigError(
                f"one sequence of --max-model-len {max_model_len} needs {needed / 2**20:.0f} MiB of KV cache, and "
                f"there is room for {num_blocks * block_bytes / 2**20:.0f} MiB: lower --max-model-len to {capacity} "
                f"or raise --kv-cache-memory-bytes"
            )
    if max_model_len < 1 or config.max_num_seqs < 1 or config.block_size < 1:
        raise ConfigError("--max-model-len, --max-num-seqs and --block-size must be at least 1")
    wanted = config.max_num_seqs * -(-(max_model_len + 1) // config.block_size)  # more can never be used at once
    if config.num_blocks is None and not config.prefix_caching:
        num_blocks = min(num_blocks, wanted)
    return PoolSpec(num_blocks, config.block_size, config.max_num_seqs, max_model_len)


def free_memory_bytes() -> int:
    """What the kernel says could be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
