"""Dividing a GPU's streaming multiprocessors (SMs) between lanes: green contexts of the CUDA driver.

A part is made by one split of the whole device, so a part and its rest are disjoint. Kernels run where their stream
was made, and a CUDA graph where it was *captured*, whatever stream launches it.
"""

from typing import Any

import torch
from cuda.bindings import driver

from tidegate.base.errors import ConfigError
from tidegate.device.places import Part

LEAST_SMS = 24  # matrix kernels that work in clusters fail on less (seen: cuBLAS on 12 SMs)
QUANTUM_SMS = 8  # Hopper's driver splits in multiples of 8


def check(result: tuple[Any, ...]) -> Any:
    """A driver call's value, or ConfigError with the driver's own name of what went wrong."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ConfigError(f"the CUDA driver answered {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


class SmParts:
    """Parts of one device, made on demand and kept. Implements ``device.places.Divisible``."""

    def __init__(self, device: int = 0) -> None:
        torch.cuda.init()
        torch.empty(1, device=f"cuda:{device}")  # the primary context must be there
        self._device = torch.device("cuda", device)
        self._handle = check(driver.cuDeviceGet(device))
        self.total: int = torch.cuda.get_device_properties(device).multi_processor_count
        self._resource: Any = None
        self._contexts: dict[Part, Any] = {}  # kept alive for their streams

    def pair(self, share: float) -> tuple[Part, Part]:
        """The part nearest to ``share`` of the device, and its rest. Neither is smaller than ``LEAST_SMS``."""
        least = LEAST_SMS // QUANTUM_SMS
        most = (self.total - LEAST_SMS) // QUANTUM_SMS
        steps = max(least, min(round(share * self.total / QUANTUM_SMS), most))
        return Part(steps * QUANTUM_SMS, True), Part(self.total - steps * QUANTUM_SMS, False)

    def require(self) -> None:
        """Raises ConfigError where this driver and device can't be divided."""
        if self._resource is not None:
            return
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        try:
            if self.total < 2 * LEAST_SMS:
                raise ConfigError(f"it has {self.total} SMs, and a part needs {LEAST_SMS}")
            self._resource = check(driver.cuDeviceGetDevResource(self._handle, kind))
            self._context(self.pair(0.5)[0])
        except (ConfigError, RuntimeError, AttributeError) as error:  # cuda-bindings: a symbol that the driver lacks
            self._resource = None
            raise ConfigError(
                f"this driver can't divide the GPU between lanes ({error}): use --mode chunked or --sharing streams"
            ) from error

    def new_stream(self, part: Part | None = None, priority: int = 0) -> torch.cuda.Stream:
        """A stream over a part, or over the whole device; kernels of graphs captured on it run there too. Lower numbers
        of ``priority`` go first, 0 last."""
        if part is None:
            return torch.cuda.Stream(self._device, priority=priority)
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = check(driver.cuGreenCtxStreamCreate(self._context(part), flags, priority))
        return torch.cuda.ExternalStream(int(stream), device=self._device)

    def _context(self, part: Part) -> Any:
        self.require()
        if part not in self._contexts:
            first = part.sms if part.first else self.total - part.sms
            groups, _, rest = check(driver.cuDevSmResourceSplitByCount(1, self._resource, 0, first))
            for taken, resource in ((True, groups[0]), (False, rest)):
                description = check(driver.cuDevResourceGenerateDesc([resource], 1))
                flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
                context = check(driver.cuGreenCtxCreate(description, self._handle, flags))
                self._contexts[Part(first if taken else self.total - first, taken)] = context
        return self._contexts[part]
