"""Copies between the host and a device that the host does not wait for.

They go through page-locked memory, which torch's allocator gives to nobody else before the copy has been done, so
that whoever copies need not keep it. On the CPU nothing is copied.
"""

from typing import Any

import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, for what is enqueued on the current stream from now on."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on the host, to be read once the current stream has got to here."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
