"""The small element-wise kernels of a decoder, in plain torch. Any device, any float type."""

import torch
from torch.nn.functional import rms_norm as _rms_norm
from torch.nn.functional import silu

from tidegate.kernels.routing import choose_experts as choose_experts
from tidegate.kernels.torch_experts import experts as experts


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis (arXiv 1910.07467)."""
    return _rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds ``added [T, hidden]`` to ``residual`` in place, and returns the sum's ``rms_norm``."""
    return rms_norm(residual.add_(added), weight, eps)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns element i of each head ``x[T, H, D]`` with element i + D/2 by the angle whose cos and sin are
    ``[T, 1, D/2]`` (the "rotate half" pairing of Hugging Face checkpoints). In place; returns ``x``."""
    first, second = x.chunk(2, dim=-1)
    before = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1.0)
    second.mul_(cos).addcmul_(before, sin)
    return x


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[T, 2 F]``, gate in the first half. Returns ``[T, F]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)
