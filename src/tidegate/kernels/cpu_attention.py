"""Attention for the CPU in float32: a compiled kernel for decode rows, torch's for longer ones.

Decode is bound by reading keys and values, so the kernel reads each once, in the order in which they lie, straight from
their blocks, and asks for the next block's while it computes. A query's result depends on nothing but its own row:
neither on the batch nor on the number of threads.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import AttentionRows
from tidegate.kernels.compiled import (
    LINE_BYTES,
    Kernel,
    Words,
    as_float,
    exp,
    floats,
    inlined,
    int32s,
    int64s,
    prefetch,
    share_of,
    thread_number,
    word,
)
from tidegate.kernels.torch_attention import TorchAttention

MOST_QUERIES = 4  # of a row that the compiled kernel takes; with more, sharing what is read between them pays

_NO_WINDOW = 1 << 40
_ZERO = np.float32(0.0)


class _Decodes(NamedTuple):
    """A step's queries that the compiled kernel takes."""

    tokens: torch.Tensor  # int64 [N]: index into the token axis
    positions: torch.Tensor  # int64 [N]
    tables: torch.Tensor  # int32 [N, widest]: the rows of the block table
    scores: torch.Tensor  # [threads, Hq, longest]: scratch, one query at a time for each thread
    num_keys: int  # that all of them see

    @classmethod
    def none(cls) -> "_Decodes":
        empty = torch.empty(0, dtype=torch.int64)
        return cls(empty, empty, empty, empty, 0)


@Kernel
def _write(words: Words) -> None:
    """Copies each token's keys and values ``[Hkv * D]`` to its place in the KV array."""
    tokens, width, places = words[0], words[1], int64s(words[2])
    first, last = share_of(tokens)
    for token in range(first, last):
        from_k, to_k = floats(words[3] + 4 * token * words[4]), floats(words[5] + 4 * places[token] * width)
        from_v, to_v = floats(words[6] + 4 * token * words[7]), floats(words[8] + 4 * places[token] * width)
        for i in range(width):
            to_k[i] = from_k[i]
        for i in range(width):
            to_v[i] = from_v[i]


@inlined
def _block(table: Words, index: Any, num_blocks: Any, block_bytes: Any) -> Any:
    """Where a row's block lies in the KV array, and the row's next."""
    following = min(index + 1, num_blocks - 1)
    return np.int64(table[index]) * block_bytes, np.int64(table[following]) * block_bytes


@inlined
def _prefetch_head(address: int, head_dim: int) -> None:
    for offset in range(0, 4 * head_dim, LINE_BYTES):
        prefetch(address + offset)


@inlined
def _softmax(scores: Words, count: int) -> None:
    best, total = scores[0], _ZERO
    for i in range(1, count):
        best = max(best, scores[i])
    for i in range(count):
        scores[i] = exp(scores[i] - best)
        total += scores[i]
    for i in range(count):
        scores[i] /= total


@functools.cache
def decode_kernel(head_dim: int, group: int, block_size: int) -> Kernel:
    """The kernel for heads of ``head_dim`` elements, ``group`` of which share a KV head, and blocks of ``block_size``
    tokens. The first call compiles it, unless numba has it on disk: up to two seconds."""
    head_bytes = 4 * head_dim

    @Kernel
    def attend(words: Words) -> None:
        q, q_stride, out, keys, values, scratch, scratch_width = (
            words[0], words[1], words[2], words[3], words[4], words[5], words[6],
        )  # fmt: skip
        queries, kv_heads, window, scale = words[7], words[8], words[9], as_float(np.int32(words[10]))
        tokens, positions, tables, table_width = int64s(words[11]), int64s(words[12]), words[13], words[14]
        token_bytes = kv_heads * head_bytes
        block_bytes = block_size * token_bytes
        scores = scratch + 4 * thread_number() * kv_heads * group * scratch_width
        work = 0
        for query in range(queries):
            work += min(positions[query] + 1, window)
        # Work is counted in keys of KV heads. A thread takes the KV heads that begin within its share.
        first, last = share_of(work * kv_heads)
        before = 0
        for query in range(queries):
            end_key = positions[query] + 1
            count = min(end_key, window)
            start = end_key - count
            head = min(max((first - before + count - 1) // count, 0), kv_heads)
            end_head = min(max((last - before + count - 1) // count, 0), kv_heads)
            before += count * kv_heads
            if head >= end_head:
                continue
            table, blocks = int32s(tables + 4 * query * table_width), (end_key + block_size - 1) // block_size
            q_heads = q + 4 * tokens[query] * q_stride
            out_heads = out + tokens[query] * token_bytes * group

            for block in range(start // block_size, blocks):
                here, ahead = _block(table, block, blocks, block_bytes)
                for key in range(max(start, block * block_size), min(end_key, (block + 1) * block_size)):
                    offset = (key - block * block_size) * token_bytes
                    for kv_head in range(head, end_head):
                        k = floats(keys + here + offset + kv_head * head_bytes)
                        _prefetch_head(keys + ahead + offset + kv_head * head_bytes, head_dim)
                        for h in range(kv_head * group, kv_head * group + group):
                            a = floats(q_heads + h * head_bytes)
                            score = _ZERO
                            for i in range(head_dim):
                                score += a[i] * k[i]
                            floats(scores + 4 * h * scratch_width)[key - start] = score * scale

            for h in range(head * group, end_head * group):
                _softmax(floats(scores + 4 * h * scratch_width), count)
                o = floats(out_heads + h * head_bytes)
                for i in range(head_dim):
                    o[i] = _ZERO

            for block in range(start // block_size, blocks):
                here, ahead = _block(table, block, blocks, block_bytes)
                for key in range(max(start, block * block_size), min(end_key, (block + 1) * block_size)):
                    offset = (key - block * block_size) * token_bytes
                    for kv_head in range(head, end_head):
                        v = floats(values + here + offset + kv_head * head_bytes)
                        _prefetch_head(values + ahead + offset + kv_head * head_bytes, head_dim)
                        for h in range(kv_head * group, kv_head * group + group):
                            weight = floats(scores + 4 * h * scratch_width)[key - start]
                            o = floats(out_heads + h * head_bytes)
                            for i in range(head_dim):
                                o[i] += weight * v[i]

    return attend


def compile_ahead(spec: ModelSpec, block_size: int) -> None:
    """Compiles the kernel that a model's decode rows will need, if they need one."""
    if spec.latent is None:
        decode_kernel(spec.head_dim, spec.num_heads // spec.num_kv_heads, block_size)


class CpuAttention(TorchAttention):
    """``kernels.attention.Attention`` over a float32 KV array on the CPU; arguments as for ``TorchAttention``."""

    def __init__(self, spec: ModelSpec, kv: torch.Tensor, table: torch.Tensor) -> None:
        super().__init__(spec, kv, table)
        assert kv.dtype == torch.float32 and kv.is_contiguous()
        self._kernel = decode_kernel(spec.head_dim, spec.num_heads // spec.num_kv_heads, kv.shape[3])
        self._num_heads, self._num_kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._scale = word(spec.head_dim**-0.5)
        self._places = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in kv]
        self._decodes = _Decodes.none()

    def plan(self, rows: AttentionRows) -> None:
        self._plan(rows, longer_than=MOST_QUERIES)
        counts = np.asarray(rows.counts)
        short = np.flatnonzero(counts <= MOST_QUERIES)
        if not short.size:
            self._decodes = _Decodes.none()
            return
        row_of = np.repeat(short, counts[short])
        within = np.arange(len(row_of)) - np.repeat(np.cumsum(counts[short]) - counts[short], counts[short])
        positions = np.asarray(rows.starts)[row_of] + within
        longest = int(positions.max()) + 1
        self._decodes = _Decodes(
            tokens=torch.from_numpy((np.cumsum(counts) - counts)[row_of] + within),
            positions=torch.from_numpy(positions),
            tables=self._table[torch.from_numpy(np.asarray(rows.slots)[row_of]), : -(-longest // self._block_size)],
            scores=torch.empty(torch.get_num_threads(), self._num_heads, longest),
            num_keys=int(positions.sum()) + len(positions),
        )

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self._places[layer]
        width = self._num_kv_heads * self._head_dim
        to_k, to_v = (k.data_ptr(), k.stride(0), keys), (v.data_ptr(), v.stride(0), values)
        _write(k.numel(), k.shape[0], width, self._written.data_ptr(), *to_k, *to_v)
        out = torch.empty(q.shape)
        planned = self._decodes
        if planned.num_keys:
            self._kernel(
                planned.num_keys * width,
                *(q.data_ptr(), q.stride(0), out.data_ptr(), keys, values),
                *(planned.scores.data_ptr(), planned.scores.shape[2]),
                *(len(planned.tokens), self._num_kv_heads, self._window or _NO_WINDOW, self._scale),
                *(planned.tokens.data_ptr(), planned.positions.data_ptr()),
                *(planned.tables.data_ptr(), planned.tables.shape[1]),
            )
        if self._pieces:
            self._attend_pieces(layer, q, out)
        return out
