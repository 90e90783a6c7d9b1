"""How a GPU's memory is divided, and what is said where it does not suffice."""

import re

import pytest

from tidegate.base.errors import ConfigError
from tidegate.base.specs import ModelSpec, Shard
from tidegate.models.shards import divide
from tidegate.node.config import EngineConfig
from tidegate.node.sizing import GPU_RESERVED_BYTES, RESERVED_PART, DeviceMemory, gpu_pool

GIB = 1 << 30
MODEL = ModelSpec("LlamaForCausalLM", 32, 4096, 32, 8, 128, 14336, 128256, max_len=8192)
TOKEN_BYTES = 32 * 2 * 8 * 128 * 2  # of KV in bfloat16
RESERVED = 140 * GIB // RESERVED_PART


def pool(free=140, total=140, weights=15, dtype="bfloat16", **asked):
    config = EngineConfig(model="m", **asked)
    return gpu_pool(MODEL, config, DeviceMemory.of(free * GIB, total * GIB), weights * GIB, dtype, 256)


def refusal(**asked):
    with pytest.raises(ConfigError) as caught:
        pool(**asked)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_kv_gets_what_weights_and_graphs_leave_of_the_fraction():
    room = int(140 * GIB * 0.9) - 15 * GIB - RESERVED
    assert pool().num_blocks == room // (16 * TOKEN_BYTES)
    assert pool(gpu_memory_utilization=0.5).num_blocks == (55 * GIB - RESERVED) // (16 * TOKEN_BYTES)


def test_each_of_two_ranks_has_half_of_every_tokens_kv():
    half = divide(MODEL, Shard(1, 2))
    own = gpu_pool(half, EngineConfig(model="m"), DeviceMemory.of(140 * GIB, 140 * GIB), 8 * GIB, "bfloat16", 256)
    room = int(140 * GIB * 0.9) - 8 * GIB - RESERVED
    assert own.num_blocks == room // (16 * TOKEN_BYTES // 2)


def test_a_small_gpu_keeps_as_much_for_graphs_as_two_lanes_take():
    assert DeviceMemory.of(24 * GIB, 24 * GIB).reserved_bytes == GPU_RESERVED_BYTES
    assert DeviceMemory.of(140 * GIB, 140 * GIB).reserved_bytes == RESERVED > GPU_RESERVED_BYTES


def test_memory_that_another_process_holds_is_left_alone():
    assert pool(free=40).num_blocks == (40 * GIB - 15 * GIB - RESERVED) // (16 * TOKEN_BYTES)


def test_float32_takes_twice_as_much():
    assert pool(dtype="float32").num_blocks == pool().num_blocks // 2


def test_blocks_and_bytes_that_fit_are_given_as_asked():
    assert pool(num_blocks=1000).num_blocks == 1000
    assert pool(kv_cache_memory_bytes=2 * GIB).num_blocks == 2 * GIB // (16 * TOKEN_BYTES)


@pytest.mark.parametrize(
    ("asked", "short", "flag"),
    [
        ({"weights": 150}, "18.8 GiB", "smaller model"),
        ({"weights": 150, "dtype": "float32"}, "18.8 GiB", "--dtype bfloat16"),
        ({"free": 20}, "3.8 GiB", "end what else uses it"),
        ({"gpu_memory_utilization": 0.1}, "9.8 GiB", "--gpu-memory-utilization"),
        ({"num_blocks": 100_000}, "79.1 GiB", "--num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 120 * GIB}, "3.8 GiB", "--kv-cache-memory-bytes"),
    ],
)
def test_a_refusal_says_how_much_is_short_and_what_to_change(asked, short, flag):
    said = refusal(**asked)
    assert short in said and flag in said


def test_the_refusal_of_blocks_names_the_most_that_fit():
    most = int(re.search(r"at most (\d+) blocks", refusal(num_blocks=100_000)).group(1))
    assert pool(num_blocks=most).num_blocks == most
    refusal(num_blocks=most + 1)


def test_the_refusal_of_a_fraction_names_one_that_suffices():
    least = float(re.search(r"more than ([\d.]+)", refusal(gpu_memory_utilization=0.1)).group(1))
    assert pool(gpu_memory_utilization=least + 0.05).num_blocks > 0


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5])
def test_a_fraction_is_over_0_and_up_to_1(fraction):
    assert "--gpu-memory-utilization" in refusal(gpu_memory_utilization=fraction)


def test_more_sequences_than_graphs_have_rows_are_refused():
    assert pool(max_num_seqs=256).max_num_seqs == 256
    assert "at most 256" in refusal(max_num_seqs=257)
