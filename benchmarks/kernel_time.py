"""How long kernels take when nothing of what they read is in the GPU's cache."""

import statistics
from collections.abc import Callable

import torch
from triton.runtime.errors import OutOfResources

RUNS = 5


def us(run: Callable[[], object], evicted: torch.Tensor) -> float:
    """Microseconds, the median over runs; infinite where the device has too little memory on chip. ``evicted`` is more
    than the cache holds."""
    times: list[float] = []
    try:
        for _ in range(RUNS + 1):  # the first one compiles
            evicted.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    except OutOfResources:
        return float("inf")
    return statistics.median(times[1:])
