"""The small kernels of a decoder on an NVIDIA GPU, in bf16 or fp16: FlashInfer's norms, Triton for the rest.

What each does is described in ``kernels.torch_ops``.
"""

import flashinfer
import torch

from tidegate.kernels.triton_experts import experts as experts
from tidegate.kernels.triton_rope import rope as rope
from tidegate.kernels.triton_routing import choose_experts as choose_experts
from tidegate.kernels.triton_silu_mul import silu_mul as silu_mul


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flashinfer.rmsnorm(flat, weight, eps).view(x.shape)  # type: ignore[no-any-return]


def add_rms_norm(residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm takes the place of ``added``."""
    flashinfer.fused_add_rmsnorm(added, residual, weight, eps)
    return added
