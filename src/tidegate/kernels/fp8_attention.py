"""Attention over keys and values in e4m3, in plain torch: what a query sees is read as float32."""

import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.fp8 import E4M3, KvScales, saturated
from tidegate.kernels.torch_attention import TorchAttention


class Fp8Attention(TorchAttention):
    """``kernels.attention.Attention`` over an e4m3 KV array, that holds keys and values over ``scales``. A token's are
    rounded by themselves, so they are the same whoever is written beside it."""

    def __init__(self, spec: ModelSpec, kv: torch.Tensor, table: torch.Tensor, scales: KvScales) -> None:
        assert kv.dtype == E4M3
        super().__init__(spec, kv.view(torch.uint8), table)  # moved as bytes: torch copies few things in e4m3
        self._dtype = torch.float32
        self._scales = scales

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        k_scale, v_scale = self._scales[layer]
        k, v = saturated(k.float(), k_scale), saturated(v.float(), v_scale)
        super()._write(layer, k.view(torch.uint8), v.view(torch.uint8))

    def _seen(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = self._scales[layer]
        return keys.view(E4M3).float().mul_(k_scale), values.view(E4M3).float().mul_(v_scale)
