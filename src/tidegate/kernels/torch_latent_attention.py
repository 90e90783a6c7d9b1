"""Latent attention over the paged array in plain torch (DeepSeek-V2, arXiv 2405.04434)."""

import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.torch_attention import TorchAttention


class TorchLatentAttention(TorchAttention):
    """``kernels.attention.Attention`` over ``kv [L, 1, num_blocks, block_size, 1, rank + rope_dim]``: a token's vector
    is its key for all heads, and the first ``rank`` elements of it are its value.

    ``run`` takes q ``[T, Hq, rank + rope_dim]``, k ``[T, 1, rank + rope_dim]``, and v, which must be the beginning of
    k. It returns ``[T, Hq, rank]``.
    """

    def __init__(self, spec: ModelSpec, kv: torch.Tensor, table: torch.Tensor) -> None:
        assert spec.latent is not None
        self._rank = spec.latent.rank
        super().__init__(spec, kv, table)

    def _keys_and_values(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer[0], layer[0][..., : self._rank]

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        vectors, _ = self._tokens[layer]
        vectors.index_copy_(0, self._written, k.to(vectors.dtype))

    def _gather(self, blocks: torch.Tensor, _: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(blocks, 0, chosen, out=out[0])
