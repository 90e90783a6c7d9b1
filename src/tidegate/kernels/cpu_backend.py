"""Which attention a model gets on the CPU."""

import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.kernels.cpu_attention import CpuAttention, decode_kernel
from tidegate.kernels.torch_latent_attention import TorchLatentAttention
from tidegate.kernels.windows import by_layer


def cpu_attention(spec: ModelSpec, kv: torch.Tensor, table: torch.Tensor) -> Attention:
    """Arguments as for ``TorchAttention``."""
    if spec.latent is not None:
        return TorchLatentAttention(spec, kv, table)
    return by_layer(CpuAttention, spec, kv, table)


def compile_ahead(spec: ModelSpec, block_size: int) -> None:
    """Compiles what ``cpu_attention`` would on its first use."""
    if spec.latent is None:
        decode_kernel(spec.head_dim, spec.num_heads // spec.num_kv_heads, block_size)
