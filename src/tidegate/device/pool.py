"""A pool's arrays on a device group: the KV blocks, the block table and the token store."""

from dataclasses import dataclass

import torch

from tidegate.base.specs import ModelSpec, PoolSpec


def kv_shape(model: ModelSpec, pool: PoolSpec) -> tuple[int, ...]:
    return (model.num_layers, model.kv_parts, pool.num_blocks, pool.block_size, model.num_kv_heads, model.head_dim)


@dataclass(frozen=True)
class Pool:
    """Views of memory that somebody else owns. Shapes are those of ``PoolSpec`` and ``base.batch``."""

    spec: PoolSpec
    kv: torch.Tensor  # [num_layers, kv_parts, num_blocks, block_size, num_kv_heads, head_dim]
    table: torch.Tensor  # int32 [max_num_seqs, max_blocks_per_seq]; lanes only read it
    tokens: torch.Tensor  # int32 [max_num_seqs, max_model_len + 1]

    @classmethod
    def allocate(cls, model: ModelSpec, spec: PoolSpec, device: str = "cpu") -> "Pool":
        """A pool in this process's own memory (one lane, tests)."""
        return cls(
            spec,
            torch.zeros(kv_shape(model, spec), dtype=getattr(torch, spec.kv_dtype), device=device),
            torch.zeros((spec.max_num_seqs, spec.max_blocks_per_seq), dtype=torch.int32, device=device),
            torch.zeros((spec.max_num_seqs, spec.max_model_len + 1), dtype=torch.int32, device=device),
        )
