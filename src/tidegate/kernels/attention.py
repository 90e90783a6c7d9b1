"""The attention protocol: plan once a step on the host, run once a layer on the device."""

from typing import NamedTuple, Protocol

import torch


class AttentionRows(NamedTuple):
    """Who attends in one step. Row r has ``counts[r]`` queries at positions ``starts[r]`` and on, of the request in
    ``slots[r]``; rows lie one after another in the step's flat token axis (T = sum of counts)."""

    slots: list[int]
    starts: list[int]
    counts: list[int]


class Attention(Protocol):
    """A backend over one pool's paged KV array ``[L, 2, num_blocks, block_size, Hkv, D]`` and its block table.
    (Where keys and values are latent vectors, ``[L, 1, …]``: see ``kernels.torch_latent_attention``.)"""

    def plan(self, rows: AttentionRows) -> None:
        """Prepares one step. Each row may attend to positions 0 to its own, through its slot's block table."""
        ...

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes k and v ``[T, Hkv, D]`` into the planned rows' blocks, then attends with q ``[T, Hq, D]``.

        Returns ``[T, Hq, D]``. Rotary embedding has already been applied.
        """
        ...
