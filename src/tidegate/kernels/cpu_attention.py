"""Attention for the CPU in float32: one compiled kernel for prompts and for decodes, over the KV array as it lies.

A tile is some queries of a row, each with the heads that share a KV head: one query of a decode, up to ``TILE_ROWS``
rows of both of a prompt. It goes over its keys a chunk at a time, as FlashAttention does (arXiv 2205.14135): scores,
their softmax with the largest so far, the values weighed. Chunks begin at multiples of their size, and each score and
each output is a sum of its own in the order of its terms. So what a query gets depends on nothing but its own keys and
values: neither on the batch or the number of threads, nor on the slice of a prompt that it comes in; and a token that
was decoded gets the same when it is read again as part of a prompt. What is rounded to int8 after that rounds alike.

Within a block keys lie as ``[Hkv, D, block_size]`` and values as ``[Hkv, block_size, D]``: so the scores of a block's
keys fill registers, and a head reads what lies together.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import AttentionRows, blocks_of, written
from tidegate.kernels.compiled import (
    Kernel,
    Words,
    as_float,
    exp,
    floats,
    int32s,
    int64s,
    share_of,
    thread_number,
    word,
)
from tidegate.kernels.multiply_add import ROWS_AT_ONCE, multiply_add

TILE_ROWS = 64  # queries times heads that share a KV head
CHUNK_KEYS = 128
AHEAD = 2  # blocks: so far ahead is brought into the cache what will be read
READING = 8  # of a key and its value: as much work as computing so many rows with it

_NO_WINDOW = 1 << 40
_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-1e30)


class _Tiles(NamedTuple):
    """A step's queries, in the order of its token axis."""

    work: int  # of a KV head
    tokens: torch.Tensor  # int64 [N]: the first, an index into the token axis
    positions: torch.Tensor  # int64 [N]: the first's
    queries: torch.Tensor  # int64 [N]
    rows: torch.Tensor  # int64 [N]: of ``tables``


@functools.cache
def write_kernel(head_dim: int, block_size: int) -> Kernel:
    @Kernel
    def write(words: Words) -> None:
        """Copies each token's keys and values ``[Hkv, D]`` to its place in the KV array."""
        tokens, kv_heads, places = words[0], words[1], int64s(words[2])
        block_floats = block_size * kv_heads * head_dim
        first, last = share_of(tokens)
        for token in range(first, last):
            block, offset = places[token] // block_size, places[token] % block_size
            for head in range(kv_heads):
                within = block * block_floats + head * head_dim * block_size
                from_k = floats(words[3] + 4 * (token * words[4] + head * head_dim))
                to_k = floats(words[5] + 4 * (within + offset))
                for i in range(head_dim):
                    to_k[i * block_size] = from_k[i]
                from_v = floats(words[6] + 4 * (token * words[7] + head * head_dim))
                to_v = floats(words[8] + 4 * (within + offset * head_dim))
                for i in range(head_dim):
                    to_v[i] = from_v[i]

    return write


@functools.cache
def attend_kernel(head_dim: int, group: int, block_size: int) -> Kernel:
    """The kernel for heads of ``head_dim`` elements, ``group`` of which share a KV head, and blocks of ``block_size``
    tokens. The first call compiles it, unless numba has it on disk: up to three seconds."""
    head_bytes = 4 * head_dim
    kv_head_bytes = block_size * head_bytes
    chunk = chunk_keys(block_size)
    row_bytes = 4 * chunk
    scratch_bytes = scratch_floats(head_dim, group, block_size) * 4
    most_rows = most_queries(group) * group

    @Kernel
    def attend(words: Words) -> None:
        q, q_stride, out, keys, values, scratch = words[0], words[1], words[2], words[3], words[4], words[5]
        tiles, kv_heads, window, scale = words[6], words[7], words[8], as_float(np.int32(words[9]))
        tokens, positions, queries = int64s(words[10]), int64s(words[11]), int64s(words[12])
        table_rows, tables, table_width = int64s(words[13]), words[14], words[15]
        block_bytes = kv_heads * kv_head_bytes
        asked = scratch + thread_number() * scratch_bytes
        summed = asked + most_rows * head_bytes
        scores = summed + most_rows * head_bytes
        state = floats(scores + most_rows * row_bytes)  # of each row the largest score, and the sum of weights
        # A thread takes the KV heads of tiles that begin within its share of the work.
        first, last = share_of(words[16] * kv_heads)
        before = 0
        for tile in range(tiles):
            position, rows = positions[tile], queries[tile] * group
            end_key = position + queries[tile]
            lowest_key = max(0, position + 1 - window)
            cost = (end_key - lowest_key) * (rows + READING)
            head = min(max((first - before + cost - 1) // cost, 0), kv_heads)
            end_head = min(max((last - before + cost - 1) // cost, 0), kv_heads)
            before += cost * kv_heads
            table = int32s(tables + 4 * table_rows[tile] * table_width)
            end_block = (end_key + block_size - 1) // block_size
            for kv_head in range(head, end_head):
                head_offset = kv_head * kv_head_bytes
                for row in range(rows):
                    token, h = tokens[tile] + row // group, kv_head * group + row % group
                    source, target = floats(q + 4 * token * q_stride + h * head_bytes), floats(asked + row * head_bytes)
                    total = floats(summed + row * head_bytes)
                    for i in range(head_dim):
                        target[i] = source[i] * scale
                        total[i] = _ZERO
                    state[2 * row], state[2 * row + 1] = _LOWEST, _ZERO

                for chunk_start in range(lowest_key // chunk * chunk, end_key, chunk):
                    first_block = max(lowest_key, chunk_start) // block_size
                    last_block = min((chunk_start + chunk) // block_size, end_block)
                    for block in range(first_block, last_block):
                        here = keys + np.int64(table[block]) * block_bytes + head_offset
                        ahead = np.int64(table[min(block + AHEAD, end_block - 1)]) * block_bytes + head_offset
                        column = scores + 4 * (block * block_size - chunk_start)
                        for row in range(0, rows, ROWS_AT_ONCE):
                            multiply_add(
                                min(rows - row, ROWS_AT_ONCE), head_dim, asked + row * head_bytes, head_bytes,
                                here, 4 * block_size, column + row * row_bytes, row_bytes, keys + ahead, block_size, 0,
                            )  # fmt: skip

                    for row in range(rows):
                        end = position + row // group + 1
                        low, high = max(0, end - window) - chunk_start, end - chunk_start
                        weights, largest = floats(scores + row * row_bytes), state[2 * row]
                        before_it, weight_sum = largest, _ZERO
                        for i in range(chunk):
                            score = weights[i] if low <= i < high else _LOWEST
                            weights[i] = score
                            largest = max(largest, score)
                        for i in range(chunk):
                            weight = exp(weights[i] - largest) if low <= i < high else _ZERO
                            weights[i] = weight
                            weight_sum += weight
                        if largest != before_it:
                            kept = exp(before_it - largest)
                            total = floats(summed + row * head_bytes)
                            for i in range(head_dim):
                                total[i] *= kept
                            state[2 * row], state[2 * row + 1] = largest, state[2 * row + 1] * kept
                        state[2 * row + 1] += weight_sum

                    for block in range(first_block, last_block):
                        here = values + np.int64(table[block]) * block_bytes + head_offset
                        ahead = np.int64(table[min(block + AHEAD, end_block - 1)]) * block_bytes + head_offset
                        known = min(block_size, end_key - block * block_size)
                        column = scores + 4 * (block * block_size - chunk_start)
                        for row in range(0, rows, ROWS_AT_ONCE):
                            multiply_add(
                                min(rows - row, ROWS_AT_ONCE), known, column + row * row_bytes, row_bytes,
                                here, head_bytes, summed + row * head_bytes, head_bytes, values + ahead, head_dim, 1,
                            )  # fmt: skip

                for row in range(rows):
                    token, h = tokens[tile] + row // group, kv_head * group + row % group
                    total = floats(summed + row * head_bytes)
                    target = floats(out + (token * kv_heads * group + h) * head_bytes)
                    part = _ONE / state[2 * row + 1]
                    for i in range(head_dim):
                        target[i] = total[i] * part

    return attend


def chunk_keys(block_size: int) -> int:
    """Of whole blocks, one at least."""
    return max(1, CHUNK_KEYS // block_size) * block_size


def most_queries(group: int) -> int:
    """Of a tile."""
    return max(1, TILE_ROWS // group)


def scratch_floats(head_dim: int, group: int, block_size: int) -> int:
    """Of a thread: for each of a tile's rows the query, the output, a chunk's scores, and two numbers more."""
    floats_of_all = most_queries(group) * group * (2 * head_dim + chunk_keys(block_size) + 2)
    return -(-floats_of_all // 16) * 16


def compile_ahead(spec: ModelSpec, block_size: int) -> None:
    """Compiles the kernels that a model will need, if it needs these."""
    if spec.latent is None:
        attend_kernel(spec.head_dim, spec.num_heads // spec.num_kv_heads, block_size)
        write_kernel(spec.head_dim, block_size)


class CpuAttention:
    """``kernels.attention.Attention`` over a float32 KV array ``[L, 2, num_blocks, block_size, Hkv, D]``, whose blocks
    it fills in an order of its own (see above), and a block table ``int32 [max_num_seqs, max_blocks_per_seq]``."""

    def __init__(self, spec: ModelSpec, kv: torch.Tensor, table: torch.Tensor) -> None:
        assert kv.dtype == torch.float32 and kv.is_contiguous()
        self._kv = kv  # kept, since kernels are given addresses in it
        self._table, self._block_size = table, kv.shape[3]
        self._window = spec.sliding_window or _NO_WINDOW
        group = spec.num_heads // spec.num_kv_heads
        self._attend = attend_kernel(spec.head_dim, group, self._block_size)
        self._write = write_kernel(spec.head_dim, self._block_size)
        self._most_queries, self._group, self._num_kv_heads = most_queries(group), group, spec.num_kv_heads
        self._scale = word(spec.head_dim**-0.5)
        self._places = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in kv]
        self._scratch_floats = scratch_floats(spec.head_dim, group, self._block_size)
        self._scratch = torch.empty(0)
        self._written = torch.empty(0, dtype=torch.int64)
        self._tiles = _Tiles(0, *(self._written,) * 4)
        self._tables = torch.empty(0, 0, dtype=torch.int32)

    def plan(self, rows: AttentionRows) -> None:
        self._tables = blocks_of(rows, self._table, self._block_size)
        self._written = torch.from_numpy(written(rows, self._tables.numpy(), self._block_size))
        starts, counts = np.asarray(rows.starts), np.asarray(rows.counts)
        tiles = -(-counts // self._most_queries)
        row_of = np.repeat(np.arange(len(counts)), tiles)
        done = (np.arange(len(row_of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * self._most_queries
        queries = np.minimum(counts[row_of] - done, self._most_queries)
        positions = starts[row_of] + done
        keys = positions + queries - np.maximum(0, positions + 1 - self._window)
        firsts = (np.cumsum(counts) - counts)[row_of] + done
        work = int((keys * (queries * self._group + READING)).sum())
        self._tiles = _Tiles(work, *map(torch.from_numpy, (firsts, positions, queries, row_of)))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self._places[layer]
        to_k, to_v = (k.data_ptr(), k.stride(0), keys), (v.data_ptr(), v.stride(0), values)
        self._write(k.numel(), k.shape[0], self._num_kv_heads, self._written.data_ptr(), *to_k, *to_v)
        threads = torch.get_num_threads()
        if len(self._scratch) < threads * self._scratch_floats:
            self._scratch = torch.empty(threads * self._scratch_floats)
        out = torch.empty(q.shape)
        tiles = self._tiles
        self._attend(
            tiles.work * self._num_kv_heads * q.shape[2],
            *(q.data_ptr(), q.stride(0), out.data_ptr(), keys, values, self._scratch.data_ptr()),
            *(len(tiles.tokens), self._num_kv_heads, self._window, self._scale),
            *(tiles.tokens.data_ptr(), tiles.positions.data_ptr(), tiles.queries.data_ptr(), tiles.rows.data_ptr()),
            *(self._tables.data_ptr(), self._tables.shape[1], tiles.work),
        )
        return out
