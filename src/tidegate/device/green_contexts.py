"""Dividing a GPU's streaming multiprocessors (SMs) between lanes: green contexts of the CUDA driver.

A part is made by one split of the whole device, so a part and its rest are disjoint. Kernels run where their stream
was made, and a CUDA graph where it was *captured*, whatever stream launches it.
"""

from typing import Any, NamedTuple

import torch
from cuda.bindings import driver

from tidegate.base.errors import ConfigError

LEAST_SMS = 24  # matrix kernels that work in clusters fail on less (seen: cuBLAS on 12 SMs)
QUANTUM_SMS = 8  # Hopper's driver splits in multiples of 8


def check(result: tuple[Any, ...]) -> Any:
    """A driver call's value, or ConfigError with the driver's own name of what went wrong."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ConfigError(f"the CUDA driver answered {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


class Part(NamedTuple):
    """``first``: the first ``sms`` SMs; otherwise what a split of the device leaves when they are taken off."""

    sms: int
    first: bool


class SmParts:
    """Parts of one device, made on demand and kept."""

    def __init__(self, device: int = 0) -> None:
        torch.cuda.init()
        torch.empty(1, device=f"cuda:{device}")  # the primary context must be there
        self._device = torch.device("cuda", device)
        self._handle = check(driver.cuDeviceGet(device))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        try:
            self._resource = check(driver.cuDeviceGetDevResource(self._handle, kind))
        except ConfigError as error:
            raise ConfigError(
                f"this driver can't divide the GPU between lanes ({error}): use --mode chunked"
            ) from error
        self.total: int = self._resource.sm.smCount
        self.whole = Part(self.total, True)
        self._streams: dict[Part, torch.cuda.Stream] = {self.whole: torch.cuda.Stream(self._device)}
        self._contexts: list[Any] = []  # kept alive with their streams

    def pair(self, share: float) -> tuple[Part, Part]:
        """The part nearest to ``share`` of the device, and its rest. Neither is smaller than ``LEAST_SMS``."""
        least = LEAST_SMS // QUANTUM_SMS
        most = (self.total - LEAST_SMS) // QUANTUM_SMS
        steps = max(least, min(round(share * self.total / QUANTUM_SMS), most))
        return Part(steps * QUANTUM_SMS, True), Part(self.total - steps * QUANTUM_SMS, False)

    def stream(self, part: Part) -> torch.cuda.Stream:
        """The stream on which a part's kernels are launched and its graphs captured."""
        if part not in self._streams:
            first = part.sms if part.first else self.total - part.sms
            groups, _, rest = check(driver.cuDevSmResourceSplitByCount(1, self._resource, 0, first))
            for taken, resource in ((True, groups[0]), (False, rest)):
                self._streams[Part(first if taken else self.total - first, taken)] = self._make(resource)
        return self._streams[part]

    def _make(self, resource: Any) -> torch.cuda.Stream:
        description = check(driver.cuDevResourceGenerateDesc([resource], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = check(driver.cuGreenCtxCreate(description, self._handle, flags))
        stream = check(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        self._contexts.append(context)
        return torch.cuda.ExternalStream(int(stream), device=self._device)
