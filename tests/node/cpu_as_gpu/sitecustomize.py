"""Makes every Python that finds this on its path take the CPU for two GPUs: memory, streams and NCCL are replaced, and
whatever is above them is the real thing, kernel by kernel. With CPU_AS_GPU=undivided they can't be divided."""

import os
import sys
import types
from unittest.mock import MagicMock

import torch

try:
    import cuda.bindings  # noqa: F401
except ImportError:
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = MagicMock()
    sys.modules |= {"cuda": types.ModuleType("cuda"), "cuda.bindings": bindings}
    sys.modules["cuda.bindings.driver"] = bindings.driver

import tidegate.device.gpu as gpu
import tidegate.device.gpu_memory as gpu_memory
import tidegate.device.green_contexts as green_contexts
import tidegate.kernels.gpu_support as gpu_support
from tidegate.device.memory import SharedMemory
from tidegate.device.places import Part
from tidegate.kernels.collectives import Collectives


class Memory(SharedMemory):
    def __init__(self, num_bytes, device=0):
        fd = os.memfd_create("as-gpu")
        os.ftruncate(fd, num_bytes)
        super().__init__(fd, num_bytes)

    def open_pool(self, spec, regions, table=None):
        return super().open_pool(spec, regions)


class SmParts(green_contexts.SmParts):
    def __init__(self, device=0):
        self.total, self._resource, self._handle = 132, None, 0

    def require(self):
        if os.environ.get("CPU_AS_GPU") == "undivided":
            refused = types.SimpleNamespace(name="CUDA_ERROR_NOT_SUPPORTED")
            green_contexts.driver.cuDeviceGetDevResource = lambda *_: (refused, None)
            super().require()

    def pair(self, share):
        first = round(share * 132)
        return Part(first, True), Part(132 - first, False)

    def new_stream(self, part=None, priority=0):
        return None


gpu.why_no_gpu = lambda: None
gpu.cuda_bindings_installed = lambda: True
gpu_memory.GpuMemory = Memory
green_contexts.SmParts = SmParts
gpu_support.why_no_graphs = lambda spec, dtype, device: "this is a CPU"
Collectives.over_nccl = Collectives.over_gloo
torch.cuda.device_count = lambda: 2
torch.cuda.mem_get_info = lambda device: (32 << 30, 32 << 30)
torch.cuda.get_device_name = lambda device: "CPU"
torch.cuda.set_device = torch.cuda.synchronize = lambda device: None
torch.cuda.memory_reserved = lambda device: 0
