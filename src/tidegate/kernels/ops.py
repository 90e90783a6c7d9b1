"""The small kernels between a decoder's matrix products, on whatever device the tensors are.

On CUDA they are FlashInfer's, imported when first used; where it is missing, and on a CPU, plain torch.
"""

import functools
import importlib.util
from types import ModuleType

import torch

from tidegate.kernels import torch_ops


@functools.cache
def flashinfer() -> ModuleType | None:
    """FlashInfer, if it is installed and there is a GPU to use it on."""
    if not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer

    return flashinfer  # type: ignore[no-any-return]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis (arXiv 1910.07467)."""
    library = flashinfer() if _half_on_gpu(x) else None
    if library is None:
        return torch_ops.rms_norm(x, weight, eps)
    flat = x.reshape(-1, x.shape[-1])
    return library.rmsnorm(flat, weight, eps).view(x.shape)  # type: ignore[no-any-return]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds ``x`` to ``residual`` in place, and returns the norm of the sum. May overwrite ``x``."""
    library = flashinfer() if _half_on_gpu(x) else None
    if library is None:
        return torch_ops.rms_norm(residual.add_(x), weight, eps)
    library.fused_add_rmsnorm(x, residual, weight, eps)
    return x


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[T, 2 F]``, gate in the first half. Returns ``[T, F]``."""
    if gate_up.is_cuda:
        from tidegate.kernels.triton_silu_mul import silu_mul as triton_silu_mul

        return triton_silu_mul(gate_up)
    return torch_ops.silu_mul(gate_up)


def rope_(qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of heads ``qk[T, H, D]`` by ``[T, 1, D/2]``; may work in place. Returns ``[T, H, D]``."""
    if qk.is_cuda:
        from tidegate.kernels.triton_rope import rope_ as triton_rope

        return triton_rope(qk, cos, sin)
    return torch_ops.rope(qk, cos, sin)


def _half_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
