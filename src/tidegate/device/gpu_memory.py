"""A GPU's pool memory: made with cuMemCreate as one allocation with an exportable handle, mapped once in each process.

Legacy CUDA IPC can't share such memory, file descriptors can; so sleeping, sharing between processes and transfers
all start from the same allocation.
"""

from math import prod
from typing import Any

import torch
from cuda.bindings import driver

from tidegate.base.errors import ConfigError
from tidegate.base.specs import PoolSpec, Region
from tidegate.device.green_contexts import check
from tidegate.device.memory import WEIGHT_PREFIX
from tidegate.device.pool import Pool

_BY_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class GpuMemory:
    """``num_bytes`` of one device's memory, at one address for as long as this object lives."""

    def __init__(self, num_bytes: int, device: int = 0, shared: int | None = None) -> None:
        """``shared``: what another process has exported, of as many bytes; it is mapped instead of new memory, and the
        caller closes it."""
        self.device = torch.device("cuda", device)
        torch.empty(1, device=self.device)
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device
        prop.requestedHandleTypes = _BY_DESCRIPTOR
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = check(driver.cuMemGetAllocationGranularity(prop, minimum))
        self.num_bytes = -(-num_bytes // granularity) * granularity
        self._made = shared is None
        if shared is None:
            self._handle = self._create(prop)
        else:
            self._handle = check(driver.cuMemImportFromShareableHandle(shared, _BY_DESCRIPTOR))
        self._address = int(check(driver.cuMemAddressReserve(self.num_bytes, 0, 0, 0)))
        check((*driver.cuMemMap(self._address, self.num_bytes, 0, self._handle, 0), None))
        access = driver.CUmemAccessDesc()
        access.location = prop.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check((*driver.cuMemSetAccess(self._address, self.num_bytes, [access], 1), None))

    def _create(self, prop: Any) -> Any:
        try:
            return check(driver.cuMemCreate(self.num_bytes, prop, 0))
        except ConfigError as error:
            raise ConfigError(
                f"{self.num_bytes / 2**30:.1f} GiB for weights and KV could not be had ({error}): lower "
                f"--gpu-memory-utilization"
            ) from error

    def export(self) -> int:
        """A file descriptor by which other processes may map the same memory; the caller closes it."""
        return int(check(driver.cuMemExportToShareableHandle(self._handle, _BY_DESCRIPTOR, 0)))

    def tensor(self, region: Region) -> torch.Tensor:
        dtype = getattr(torch, region.dtype)
        return _at(self._address + region.offset_bytes, dtype, region.shape)

    def open_pool(
        self, spec: PoolSpec, regions: list[Region], table: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], Pool]:
        """The weights by name, and the pool's arrays, of which the memory's maker sees to it that they are zero. The
        block table is the host's: steps carry what they need. ``table``: where it lies in memory that processes share;
        otherwise it is this process's own."""
        tensors = {region.name: self.tensor(region) for region in regions if region.name != "table"}
        weights = {k.removeprefix(WEIGHT_PREFIX): v for k, v in tensors.items() if k.startswith(WEIGHT_PREFIX)}
        if table is None:
            table = torch.zeros((spec.max_num_seqs, spec.max_blocks_per_seq), dtype=torch.int32)
        if self._made:
            tensors["kv"].view(torch.uint8).zero_()
            tensors["tokens"].zero_()
        return weights, Pool(spec, tensors["kv"], table, tensors["tokens"])


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor that does not keep its memory: for as long as somebody else sees to that."""
    assert tensor.is_contiguous()
    return _at(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))


def _at(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.as_tensor(_Bytes(address, prod(shape) * dtype.itemsize))
    return flat.view(dtype).view(shape)


class _Bytes:
    """Device memory as torch takes it over (the CUDA array interface)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
