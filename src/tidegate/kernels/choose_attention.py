"""Which form of a backend a model's attention takes."""

import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.kernels.torch_latent_attention import TorchLatentAttention
from tidegate.kernels.windows import LayerWindows


def attention_over(backend: type[TorchAttention], spec: ModelSpec, kv: torch.Tensor, table: torch.Tensor) -> Attention:
    """The backend over a pool's KV array and block table; one of it for each window where the layers differ in that;
    and for latent vectors plain torch's, there being no other so far."""
    if spec.latent is not None:
        return TorchLatentAttention(spec, kv, table)
    return backend(spec, kv, table) if spec.layer_windows is None else LayerWindows(backend, spec, kv, table)
