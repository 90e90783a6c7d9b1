"""Which small kernels a device runs."""

import importlib.util
from typing import Protocol

import torch

from tidegate.base.specs import ExpertsSpec
from tidegate.kernels.torch_experts import ExpertScales


class Ops(Protocol):
    """The functions of ``kernels.torch_ops``, where they are described."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def choose_experts(
        self, logits: torch.Tensor, spec: ExpertsSpec, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def experts(
        self,
        x: torch.Tensor,
        shares: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        scales: ExpertScales | None = None,
    ) -> torch.Tensor: ...


def ops_for(weight: torch.Tensor) -> Ops:
    """Those for activations of the type and on the device of ``weight``."""
    # Imported when chosen: the compiled kernels are of no use elsewhere, and compiling them takes a second.
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        from tidegate.kernels import cpu_ops

        return cpu_ops
    if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and importlib.util.find_spec("flashinfer"):
        from tidegate.kernels import cuda_ops

        return cuda_ops
    from tidegate.kernels import torch_ops

    return torch_ops
