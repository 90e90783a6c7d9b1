"""Dividing a GPU's streaming multiprocessors (SMs) between lanes: green contexts of the CUDA driver.

A part is made by one split of the whole device, so a part and its rest are disjoint. Kernels run where their stream
was made, and a CUDA graph where it was *captured*, whatever stream launches it.
"""

from typing import Any

import torch
from cuda.bindings import driver

from tidegate.base.errors import ConfigError

URGENT = -5  # CUDA's highest stream priority
QUANTUM_SMS = 8  # Hopper's driver splits in multiples of 8


def check(result: tuple[Any, ...]) -> Any:
    """A driver call's value, or ConfigError with the driver's own name of what went wrong."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ConfigError(f"the CUDA driver answered {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


class SmParts:
    """Parts of one device, made on demand and kept. ``stream(n)`` runs on the first n SMs, of ``total``."""

    def __init__(self, device: int = 0) -> None:
        torch.cuda.init()
        torch.empty(1, device=f"cuda:{device}")  # the primary context must be there
        self._device = torch.device("cuda", device)
        self._handle = check(driver.cuDeviceGet(device))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        try:
            self._whole = check(driver.cuDeviceGetDevResource(self._handle, kind))
        except ConfigError as error:
            raise ConfigError(
                f"this driver can't divide the GPU between lanes ({error}): use --mode chunked"
            ) from error
        self.total: int = self._whole.sm.smCount
        self._streams: dict[tuple[int, bool], torch.cuda.Stream] = {}
        self._contexts: list[Any] = []  # kept alive with their streams

    def size_for(self, share: float) -> int:
        """The number of SMs nearest to ``share`` of the device that a part can have."""
        if share >= 1.0:
            return self.total
        steps = round(share * self.total / QUANTUM_SMS)
        return max(1, min(steps, self.total // QUANTUM_SMS)) * QUANTUM_SMS

    def stream(self, sms: int, urgent: bool = False) -> torch.cuda.Stream:
        """A stream on ``sms`` SMs: the whole device, or a multiple of the quantum. Where parts overlap, the programs
        of ``urgent`` streams are given to free SMs first."""
        key = (sms, urgent)
        if key not in self._streams:
            priority = URGENT if urgent else 0
            if sms == self.total:
                self._streams[key] = torch.cuda.Stream(self._device, priority=priority)
            else:
                self._streams[key] = self._part(sms, priority)
        return self._streams[key]

    def _part(self, sms: int, priority: int) -> torch.cuda.Stream:
        groups, _, _ = check(driver.cuDevSmResourceSplitByCount(1, self._whole, 0, sms))
        description = check(driver.cuDevResourceGenerateDesc(groups, 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = check(driver.cuGreenCtxCreate(description, self._handle, flags))
        stream_flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = check(driver.cuGreenCtxStreamCreate(context, stream_flags, priority))
        self._contexts.append(context)
        return torch.cuda.ExternalStream(int(stream), device=self._device)
