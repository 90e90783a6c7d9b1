"""What this machine offers, what Tidegate will use of it, and why: ``tidegate doctor``."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator

import torch

from tidegate.base.errors import ConfigError
from tidegate.device import mps
from tidegate.device.gpu import cuda_bindings_installed, why_no_gpu
from tidegate.node.sizing import memory_bytes


def report() -> Iterator[tuple[str, str]]:
    """(what, what is so), in the order in which a person would ask."""
    cores = len(os.sched_getaffinity(0))
    yield "python", platform.python_version()
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    yield "cpu", f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    yield "memory", f"{memory_bytes('MemTotal') / 2**30:.1f} GiB, {memory_bytes('MemAvailable') / 2**30:.1f} GiB free"
    reason = why_no_gpu()
    if reason is not None:
        yield "gpu", f"none used: {reason}"
        yield "lanes", "processes over one memory file, each on its own cores"
        yield "sharing", _core_sharing(cores)
        yield "pod", "--mode pod runs with ordinary attention, since one kernel for prompts and decodes needs a GPU"
        return
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    yield (
        "gpu",
        f"{properties.name}, {properties.multi_processor_count} SMs, compute {properties.major}.{properties.minor}",
    )
    yield "gpu memory", f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    yield "flashinfer", _version("flashinfer-python") or "not installed: pip install 'tidegate[cuda]'"
    yield "triton", _version("triton") or "not installed"
    steps = "each step one CUDA graph" if _version("flashinfer-python") else "step by step, kernel by kernel: slow"
    yield "lanes", f"threads of one process, {steps}"
    yield "sharing", _green_contexts()
    reason = mps.why_not()
    yield "mps", "can be had: --sharing mps" if reason is None else f"can't be had: {reason}"
    yield "pod", _pod()


def _core_sharing(cores: int) -> str:
    if cores == 1:
        return "one core: prefill rests between slices, by its share"
    return f"core sets: decode and prefill divide {cores} cores, and each has all of them while the other is idle"


def _green_contexts() -> str:
    if not cuda_bindings_installed():
        return "cuda-bindings is not installed: pip install 'tidegate[cuda]'"
    from tidegate.device.green_contexts import LEAST_SMS, QUANTUM_SMS, SmParts
    from tidegate.kernels.triton_sm_ids import SmIds

    try:
        parts = SmParts()
        first, rest = parts.pair(0.5)
        ours, theirs = (len(SmIds(parts.new_stream(part)).wait()) for part in (first, rest))
    except ConfigError as error:
        return f"by streams only: {error}"
    return (
        f"green contexts, in steps of {QUANTUM_SMS} SMs, at least {LEAST_SMS} each; "
        f"half and half was tried: {ours} and {theirs} SMs"
    )


def _pod() -> str:
    if not _version("flashinfer-python"):
        return "--mode pod runs with ordinary attention, since FlashInfer is not installed"
    return "one kernel for prompts and decodes (FlashInfer's; compiled at the first start of --mode pod, for minutes)"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
