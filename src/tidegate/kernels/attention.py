"""The attention protocol: plan once a step on the host, run once a layer on the device."""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class AttentionRows(NamedTuple):
    """Who attends in one step. Row r has ``counts[r]`` queries at positions ``starts[r]`` and on, of the request in
    ``slots[r]``; rows lie one after another in the step's flat token axis (T = sum of counts)."""

    slots: list[int]
    starts: list[int]
    counts: list[int]


def blocks_of(rows: AttentionRows, table: torch.Tensor, block_size: int) -> torch.Tensor:
    """The rows' blocks, int32 ``[rows, blocks of the longest]``, from a pool's block table."""
    longest = max(start + count for start, count in zip(rows.starts, rows.counts, strict=True))
    return table[torch.tensor(rows.slots, device=table.device), : -(-longest // block_size)]


def written(rows: AttentionRows, blocks: NDArray[np.int32], block_size: int) -> NDArray[np.int64]:
    """Where in the KV array, counted in its tokens, each token of the step is written: int64 ``[T]``."""
    starts, counts = np.asarray(rows.starts), np.asarray(rows.counts)
    row_of = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(row_of)) + (starts - np.cumsum(counts) + counts)[row_of]
    places: NDArray[np.int64] = blocks[row_of, positions // block_size].astype(np.int64)
    places *= block_size
    places += positions % block_size
    return places


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
