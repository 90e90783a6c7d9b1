"""Memory that the node and its lanes share: one memory file holding weights, KV, block table and token store.

The file is anonymous (memfd): it has no name to leak, is not bounded by the size of /dev/shm, and lives for as long
as any process has it open. Pages are made when they are first written.
"""

import mmap
import os
from collections.abc import Iterable, Mapping
from math import prod

import msgspec
import torch

from tidegate.base.specs import ModelSpec, PoolSpec, Region
from tidegate.device.pool import Pool, kv_shape

ALIGNMENT_BYTES = 4096
WEIGHT_PREFIX = "weights/"


def region_bytes(region: Region) -> int:
    return prod(region.shape) * int(getattr(torch, region.dtype).itemsize)


def lay_out(
    model: ModelSpec, pool: PoolSpec, weights: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[list[Region], int]:
    """Where everything goes, and the file's size in bytes. ``weights``: name to (torch's name of the type, shape)."""
    wanted = [(WEIGHT_PREFIX + name, dtype, shape) for name, (dtype, shape) in weights.items()]
    wanted += [
        ("kv", pool.kv_dtype, kv_shape(model, pool)),
        ("table", "int32", (pool.max_num_seqs, pool.max_blocks_per_seq)),
        ("tokens", "int32", (pool.max_num_seqs, pool.max_model_len + 1)),
    ]
    regions: list[Region] = []
    offset = 0
    for name, dtype, shape in wanted:
        region = Region(name, dtype, shape, offset)
        regions.append(region)
        offset += -(-region_bytes(region) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return regions, offset


def table_region(regions: Iterable[Region]) -> Region:
    """The block table's, in a memory file that holds nothing else: where the other arrays lie on a device."""
    (region,) = (region for region in regions if region.name == "table")
    return msgspec.structs.replace(region, offset_bytes=0)


class SharedMemory:
    """A mapping of a memory file. ``fd`` may be handed to a child process, which maps the same pages."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)

    @classmethod
    def create(cls, num_bytes: int) -> "SharedMemory":
        fd = os.memfd_create("tidegate-pool", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return cls(fd, num_bytes)

    def tensor(self, region: Region) -> torch.Tensor:
        """A view; it keeps the mapping alive."""
        dtype = getattr(torch, region.dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=prod(region.shape), offset=region.offset_bytes)
        return flat.view(region.shape)

    def open_pool(self, spec: PoolSpec, regions: list[Region]) -> tuple[dict[str, torch.Tensor], Pool]:
        """The weights by name, and the pool's arrays."""
        tensors = {region.name: self.tensor(region) for region in regions}
        weights = {k.removeprefix(WEIGHT_PREFIX): v for k, v in tensors.items() if k.startswith(WEIGHT_PREFIX)}
        return weights, Pool(spec, tensors["kv"], tensors["table"], tensors["tokens"])
