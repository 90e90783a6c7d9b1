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
    """``num_prefill`` prompt tokens, then decode rows, by a kernel each."""

    def __init__(
        self, num_prefill: int, prefill: Rows | None, decode: Rows | None, side: torch.cuda.Stream | None = None
    ) -> None:
        """``side``: where both kinds are there, decode rows run on this stream while prompt rows run on the current
        one (arithmetic binds these, memory those); without it, behind them. It must be of the same place, and the
        kernels must share no memory."""
        self._num_prefill, self._prefill, self._decode = num_prefill, prefill, decode
        self._side = side if prefill is not None and decode is not None else None

    def run(self, q: torch.Tensor, cache: Any, out: torch.Tensor) -> None:
        split = self._num_prefill
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        if self._prefill is not None:
            self._prefill.run(q[:split], cache, out[:split])
        if self._decode is not None:
            with torch.cuda.stream(self._side):  # none: the current one
                self._decode.run(q[split:], cache, out[split:])
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
