"""The rows of a step, whichever kernels they take."""

from typing import Any, NamedTuple, Protocol

import torch


class Types(NamedTuple):
    """Of a step: what queries and results are in, and what the KV array is in."""

    compute: torch.dtype
    kv: torch.dtype


class Rows(Protocol):
    """Rows that one kernel takes: all prompt rows of a step, all its decode rows, or both."""

    def run(self, q: torch.Tensor, cache: Any, out: torch.Tensor) -> None:
        """``q [T, Hq, D]`` over a layer's ``cache``, into ``out``, prompt tokens first. The cache of FlashInfer's rows
        is a ``LayerCache``, that of latent rows their vectors, [blocks, block_size, 1, D]."""
        ...


class ApartRows:
    """``num_prefill`` prompt tokens, then decode rows, by a kernel each, one after the other."""

    def __init__(self, num_prefill: int, prefill: Rows | None, decode: Rows | None) -> None:
        self._num_prefill, self._prefill, self._decode = num_prefill, prefill, decode

    def run(self, q: torch.Tensor, cache: Any, out: torch.Tensor) -> None:
        split = self._num_prefill
        if self._prefill is not None:
            self._prefill.run(q[:split], cache, out[:split])
        if self._decode is not None:
            self._decode.run(q[split:], cache, out[split:])
