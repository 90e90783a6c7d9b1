"""What fits into a device's memory: an equal part of the weights, room for activations and graphs, and the rest KV."""

from typing import NamedTuple

from tidegate.base.specs import ModelSpec
from tidegate.plan.hardware import GIB, Hardware
from tidegate.plan.parameters import stored_elements
from tidegate.plan.roofline import kv_bytes_per_token

UTILIZATION = 0.9  # of a device's memory that an engine takes unless told otherwise
GPU_RESERVE = 6 * GIB  # graphs, activations and workspaces, as this engine keeps them on a GPU
CPU_RESERVE = GIB


class Memory(NamedTuple):
    """Of one of the ``tp`` devices that hold a model together, in bytes; KV in tokens of the whole model."""

    weight_bytes: int
    reserve_bytes: int
    usable_bytes: int
    kv_tokens: int

    def short_bytes(self, longest_tokens: int, kv_bytes_per_token: float) -> int:
        """That are missing to serve a request of so many tokens; 0 if it fits."""
        needed = self.weight_bytes + self.reserve_bytes + longest_tokens * kv_bytes_per_token
        return max(0, int(needed - self.usable_bytes))


def memory(model: ModelSpec, device: Hardware, tp: int) -> Memory:
    weights = stored_elements(model) * device.element_bytes // tp
    reserve = GPU_RESERVE if device.is_gpu else CPU_RESERVE
    usable = int(device.memory_bytes * UTILIZATION)
    room = max(0, usable - weights - reserve)
    return Memory(weights, reserve, usable, int(room / kv_bytes_per_token(model, device, tp)))


def degrees(model: ModelSpec, device: Hardware, gpus: int) -> list[int]:
    """Numbers of devices over which the model's heads can be divided: powers of two within a node."""
    tp, found = 1, []
    while tp <= min(gpus, device.per_node):
        if model.num_heads % tp == 0 and (model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0):
            found.append(tp)
        tp *= 2
    return found
