"""Which form of a backend a model's attention takes."""

from typing import Any, NamedTuple

import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.kernels.torch_latent_attention import TorchLatentAttention
from tidegate.kernels.windows import LayerWindows


def attention_over(backend: type[TorchAttention], spec: ModelSpec, kv: torch.Tensor, table: torch.Tensor) -> Attention:
    """The backend over a pool's KV array and block table; one of it for each window where the layers differ in that;
    and for latent vectors plain torch's."""
    if spec.latent is not None:
        return TorchLatentAttention(spec, kv, table)
    return backend(spec, kv, table) if spec.layer_windows is None else LayerWindows(backend, spec, kv, table)


class GraphKernels(NamedTuple):
    """What attention consists of in a step that is a CUDA graph: the classes of these names, as they are described in
    ``kernels.flashinfer_attention``."""

    prefill_rows: Any
    decode_rows: Any
    attention: Any


def graph_kernels(spec: ModelSpec) -> GraphKernels:
    """FlashInfer's, or for latent vectors Triton's. Imported when chosen: both need a GPU."""
    if spec.latent is not None:
        from tidegate.kernels import triton_latent_attention as latent

        return GraphKernels(latent.PrefillRows, latent.DecodeRows, latent.GraphAttention)
    from tidegate.kernels import flashinfer_attention as flash

    return GraphKernels(flash.PrefillRows, flash.DecodeRows, flash.GraphAttention)
