"""Which form of a backend a model's attention takes."""

import functools

import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.kernels.fp8 import E4M3, KvScales, unit_scales
from tidegate.kernels.fp8_attention import Fp8Attention
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.kernels.torch_latent_attention import TorchLatentAttention
from tidegate.kernels.windows import Backend, LayerWindows


def attention_over(
    backend: type[TorchAttention],
    spec: ModelSpec,
    kv: torch.Tensor,
    table: torch.Tensor,
    scales: KvScales | None = None,
) -> Attention:
    """The backend over a pool's KV array and block table; one of it for each window where the layers differ in that.
    For latent vectors, and for an array in e4m3 (which holds keys and values over ``scales``, or over 1), plain
    torch's: there is no other so far."""
    if spec.latent is not None:
        return TorchLatentAttention(spec, kv, table)
    over: Backend = backend
    if kv.dtype == E4M3:
        over = functools.partial(Fp8Attention, scales=scales or unit_scales(spec.num_layers))
    return over(spec, kv, table) if spec.layer_windows is None else LayerWindows(over, spec, kv, table)
