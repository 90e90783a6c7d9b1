"""Attention over the paged KV array in plain torch: the reference on any device, and for what has no kernel of ours.

A row whose blocks ascend without gaps attends over a view of the array; other rows' blocks are gathered first.
Decode rows fold the query heads that share a KV head into the query axis, so that keys and values are read once.
"""

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import AttentionRows, blocks_of, written
from tidegate.kernels.host_copies import to_device

_MAX_QUERIES = 128  # a longer row is cut: the kernel computes every query-key pair of a piece, masked or not


class _Piece(NamedTuple):
    """``num_queries`` queries from ``first`` on, and the keys that any of them sees: ``num_keys`` from ``key_start``
    on, counted in the KV array's tokens or, where ``gathered``, in those of the step's gathered blocks."""

    first: int
    num_queries: int
    gathered: bool
    key_start: int
    num_keys: int
    mask: torch.Tensor | None  # [num_queries, num_keys], added to the scores; None: every query sees every key


class TorchAttention:
    """``kernels.attention.Attention`` over ``kv [L, 2, num_blocks, block_size, Hkv, D]`` and a block table
    ``int32 [max_num_seqs, max_blocks_per_seq]``, neither of which it owns. The table may lie on the host."""

    def __init__(self, spec: ModelSpec, kv: torch.Tensor, table: torch.Tensor) -> None:
        self._window = spec.sliding_window
        self._table = table
        self._block_size, self._dtype, self._device = kv.shape[3], kv.dtype, kv.device
        self._blocks = [self._keys_and_values(layer) for layer in kv]  # [num_blocks, block_size, Hkv, D] each
        self._tokens = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._blocks]  # [tokens, Hkv, D] each
        self._heads = [(_heads_first(k), _heads_first(v)) for k, v in self._tokens]  # [1, Hkv, tokens, D] each
        self._written = torch.empty(0)
        self._scattered: torch.Tensor | None = None
        self._gathered = kv.new_empty(kv.shape[1], 0, *kv.shape[3:])  # grows to the largest step's; of one layer
        self._pieces: list[_Piece] = []

    def plan(self, rows: AttentionRows) -> None:
        size = self._block_size
        table = blocks_of(rows, self._table, size).cpu().numpy()
        self._written = to_device(written(rows, table, size), self._device)
        self._pieces, scattered, num_scattered = [], [], 0
        firsts = itertools.accumulate(rows.counts[:-1], initial=0)
        for blocks, first, start, count in zip(table, firsts, rows.starts, rows.counts, strict=True):
            seen_from = max(0, start - self._window + 1) // size if self._window else 0
            blocks = blocks[seen_from : -(-(start + count) // size)]
            gathered = bool((blocks[1:] - blocks[:-1] != 1).any())
            # Where the row's position 0 lies, or would lie, in the array that its pieces read.
            origin = (num_scattered if gathered else int(blocks[0])) - seen_from
            if gathered:
                scattered.append(blocks)
                num_scattered += len(blocks)
            for done in range(0, count, _MAX_QUERIES):
                part = min(_MAX_QUERIES, count - done)
                self._pieces.append(self._piece(first + done, start + done, part, gathered, origin * size))
        self._scattered = to_device(np.concatenate(scattered), self._device) if scattered else None
        if num_scattered > self._gathered.shape[1]:
            shape = self._gathered.shape
            self._gathered = self._gathered.new_empty(shape[0], num_scattered, *shape[2:])

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._write(layer, k, v)
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
        self._attend_pieces(layer, q, out)
        return out

    def _keys_and_values(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's part of the KV array, or of blocks that have been gathered from it."""
        return layer[0], layer[1]

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        keys, values = self._tokens[layer]
        keys.index_copy_(0, self._written, k.to(keys.dtype))
        values.index_copy_(0, self._written, v.to(values.dtype))

    def _piece(self, first: int, start: int, count: int, gathered: bool, origin: int) -> _Piece:
        lowest = max(0, start - self._window + 1) if self._window else 0
        num_keys = start + count - lowest
        mask = None
        if count > 1:
            device = self._device
            query = torch.arange(start, start + count, device=device)[:, None]
            key = torch.arange(lowest, start + count, device=device)
            hidden = key > query if self._window is None else (key > query) | (key <= query - self._window)
            mask = torch.zeros(count, num_keys, dtype=self._dtype, device=device).masked_fill_(hidden, float("-inf"))
        return _Piece(first, count, gathered, origin + lowest, num_keys, mask)

    def _attend_pieces(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Fills the planned pieces' places in ``out [T, Hq, D]``."""
        in_place = gathered = self._heads[layer]
        if self._scattered is not None:
            chosen = self._gathered[:, : len(self._scattered)]
            self._gather(*self._blocks[layer], self._scattered, chosen)
            k, v = self._keys_and_values(chosen)
            gathered = _heads_first(k.flatten(0, 1)), _heads_first(v.flatten(0, 1))
        queries = q.to(self._dtype).view(q.shape[0], in_place[0].shape[1], -1, q.shape[2])
        for piece in self._pieces:
            k, v = (x.narrow(2, piece.key_start, piece.num_keys) for x in (gathered if piece.gathered else in_place))
            attended = _attend(piece, queries, *self._seen(layer, k, v))
            out.narrow(0, piece.first, piece.num_queries).copy_(attended.flatten(1, 2))

    def _seen(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[1, Hkv, num_keys, D]`` as the KV array holds them, in the type that is computed in."""
        return keys, values

    def _gather(self, k_blocks: torch.Tensor, v_blocks: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        """Copies the chosen blocks of a layer into ``out [2, chosen, block_size, Hkv, D]``."""
        torch.index_select(k_blocks, 0, chosen, out=out[0])
        torch.index_select(v_blocks, 0, chosen, out=out[1])


def _heads_first(tokens: torch.Tensor) -> torch.Tensor:
    """``[1, Hkv, tokens, D]`` of ``[tokens, Hkv, D]``: what torch's attention takes."""
    return tokens.transpose(0, 1).unsqueeze(0)


def _attend(piece: _Piece, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``[num_queries, Hkv, G, D]`` of ``queries [T, Hkv, G, D]`` over a piece's ``[1, Hkv, num_keys, D]``."""
    q = queries.narrow(0, piece.first, piece.num_queries)
    if piece.mask is None:
        return scaled_dot_product_attention(q, keys, values)
    heads_first = q.flatten(1, 2).transpose(0, 1).unsqueeze(0)
    out = scaled_dot_product_attention(heads_first, keys, values, attn_mask=piece.mask, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).view(*q.shape[:3], -1)
