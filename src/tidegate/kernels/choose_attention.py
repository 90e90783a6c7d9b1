"""Which form of a backend a model's attention takes."""

import functools
from typing import Any, NamedTuple

import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.kernels.fp8 import E4M3, KvScales, unit_scales
from tidegate.kernels.fp8_attention import Fp8Attention
from tidegate.kernels.step_rows import Types
from tidegate.kernels.torch_latent_attention import TorchLatentAttention
from tidegate.kernels.windows import Backend, LayerWindows


def attention_over(
    backend: Backend,
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
    share_no_memory: bool  # but queries, keys and values: rows of both kinds can run at once


def graph_kernels(spec: ModelSpec, types: Types, scales: KvScales) -> GraphKernels:
    """FlashInfer's, over an array that holds keys and values over ``scales``; or for latent vectors Triton's. Imported
    when chosen: both need a GPU."""
    if spec.latent is not None:
        from tidegate.kernels import triton_latent_attention as latent

        return GraphKernels(latent.PrefillRows, latent.DecodeRows, latent.GraphAttention, share_no_memory=False)
    from tidegate.kernels import flashinfer_attention as flash

    attention = functools.partial(flash.GraphAttention, scales=scales)
    no_partial_results = flash.prefill_backend(types) == "fa3"  # of prompt rows
    return GraphKernels(flash.PrefillRows, flash.DecodeRows, attention, no_partial_results)
