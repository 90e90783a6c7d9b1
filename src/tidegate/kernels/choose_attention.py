"""Which form of a backend a model's attention takes."""

import functools
from typing import Any, NamedTuple

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
    torch's."""
    if spec.latent is not None:
        return TorchLatentAttention(spec, kv, table)
    over: Backend = backend
    if kv.dtype == E4M3:
        over = functools.partial(Fp8Attention, scales=scales or unit_scales(spec.num_layers))
    return over(spec, kv, table) if spec.layer_windows is None else LayerWindows(over, spec, kv, table)


class GraphKernels(NamedTuple):
    """What attention consists of in a step that is a CUDA graph. Called as the classes of these names in
    ``kernels.flashinfer_attention`` are, but that ``attention`` knows the scales."""

    prefill_rows: Any
    decode_rows: Any
    attention: Any


def graph_kernels(spec: ModelSpec, scales: KvScales) -> GraphKernels:
    """FlashInfer's, over an array that holds keys and values over ``scales``; or for latent vectors Triton's. Imported
    when chosen: both need a GPU."""
    if spec.latent is not None:
        from tidegate.kernels import triton_latent_attention as latent

        return GraphKernels(latent.PrefillRows, latent.DecodeRows, latent.GraphAttention)
    from tidegate.kernels import flashinfer_attention as flash

    attention = functools.partial(flash.GraphAttention, scales=scales)
    return GraphKernels(flash.PrefillRows, flash.DecodeRows, attention)
