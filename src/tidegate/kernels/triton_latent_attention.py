"""Latent attention over the paged array on a GPU, in a form that a CUDA graph can hold (DeepSeek-V2, arXiv 2405.04434).

All query heads attend over the same vectors, so the heads of several tokens are the rows of one matrix product, and a
vector is read once for all of them. Where that makes too few programs to fill the device, each one's keys are divided
and the parts merged (flash decoding). How far a step's rows reach is read on the device: there is nothing to plan.

No program here waits for another of its grid. FlashInfer's kernel for this has as many as the whole device has SMs wait
for each other (a cooperative launch): on a part they do not fit at once, and two lanes' could block each other.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from tidegate.base.specs import ModelSpec
from tidegate.kernels.step_rows import Rows, Types
from tidegate.kernels.triton_write_kv import write_vectors

if TYPE_CHECKING:
    from tidegate.kernels.flashinfer_attention import PagedRows, Workspace

_LEAST_KEYS = 256  # of a part: with fewer, merging would take longer than is won
_MOST_PARTS = 32


class Tile(NamedTuple):
    """What one program computes at a time, and with what."""

    rows: int  # pairs of a token and a head
    keys: int
    warps: int
    stages: int


# By benchmarks/gpu_latent.py on an H200. With 64 rows Triton takes Hopper's own matrix instruction: up to twice as fast
# as with 32, although registers are spilled.
PREFILL = Tile(64, 64, 8, 2)
DECODE = Tile(16, 32, 4, 5)  # two programs fit on an SM
DECODE_MANY_HEADS = PREFILL
PREFILL_PROGRAMS, DECODE_PROGRAMS = 256, 512  # that fill a device


@triton.jit
def _locate(qo_indptr, tile, heads, num_slices, ROWS: tl.constexpr, SLICES: tl.constexpr):
    """The slice whose tile this is (``num_slices``: nobody's), the slice's first token, how many it has, and the first
    row in it. Last tiles come first: they see the most keys."""
    slices = tl.arange(0, SLICES)
    starts = tl.load(qo_indptr + slices, mask=slices < num_slices, other=0)
    counts = tl.load(qo_indptr + slices + 1, mask=slices < num_slices, other=0) - starts
    tiles = (counts * heads + ROWS - 1) // ROWS
    reverse = tl.sum(tiles, 0) - 1 - tile
    ends = tl.cumsum(tiles, 0)
    found = tl.where(reverse < 0, num_slices, tl.sum((ends <= reverse).to(tl.int32), 0))
    ours = slices == found
    first = (reverse - tl.sum(tl.where(ours, ends - tiles, 0), 0)) * ROWS
    return found, tl.sum(tl.where(ours, starts, 0), 0), tl.sum(tl.where(ours, counts, 0), 0), first


@triton.jit(do_not_specialize=("num_slices", "num_tokens", "num_parts"))  # each would be compiled anew
def _attend_kernel(
    q, cache, out, lse, qo_indptr, indptr, indices, last_block_len, scale, heads, num_slices, num_tokens,
    num_parts, BLOCK: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIVIDED: tl.constexpr, LEAST_KEYS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one tile: ``ROWS`` pairs of a token and a head. SLICES 0: each token is a slice."""
    if SLICES == 0:
        tiles = (heads + ROWS - 1) // ROWS
        found, count = tl.program_id(0) // tiles, 1
        token, first_row = found, (tl.program_id(0) % tiles) * ROWS
    else:
        found, token, count, first_row = _locate(qo_indptr, tl.program_id(0), heads, num_slices, ROWS, SLICES)
    if found < num_slices:
        row = first_row + tl.arange(0, ROWS)
        inside = row < count * heads
        blocks = tl.load(indptr + found)
        length = (tl.load(indptr + found + 1) - blocks - 1) * BLOCK + tl.load(last_block_len + found)
        last_visible = length - count + row // heads
        reach = length - count + tl.minimum((first_row + ROWS - 1) // heads, count - 1) + 1  # keys that any row sees
        first, stop = 0, reach
        if DIVIDED:
            of_part = tl.maximum((reach + num_parts - 1) // num_parts, LEAST_KEYS)
            of_part = (of_part + KEYS - 1) // KEYS * KEYS
            first = tl.program_id(1) * of_part
            stop = tl.minimum(first + of_part, reach)
        place = (token + row // heads).to(tl.int64) * heads + row % heads
        dim, turned, key = tl.arange(0, RANK), tl.arange(0, ROPE), tl.arange(0, KEYS)
        queries = q + place[:, None] * (RANK + ROPE)
        q_latent = tl.load(queries + dim[None, :], mask=inside[:, None], other=0.0)
        q_turned = tl.load(queries + RANK + turned[None, :], mask=inside[:, None], other=0.0)
        most = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        sums = tl.zeros([ROWS, RANK], dtype=tl.float32)
        for done in range(first, stop, KEYS):
            position = done + key
            there = position < stop
            block = tl.load(indices + blocks + position // BLOCK, mask=there, other=0).to(tl.int64)
            vectors = cache + (block * BLOCK + position % BLOCK)[:, None] * (RANK + ROPE)
            k_latent = tl.load(vectors + dim[None, :], mask=there[:, None], other=0.0)
            k_turned = tl.load(vectors + RANK + turned[None, :], mask=there[:, None], other=0.0)
            scores = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
            scores = tl.dot(q_turned, tl.trans(k_turned), scores, input_precision="ieee") * scale
            seen = there[None, :] & (position[None, :] <= last_visible[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see none of a part's keys
            weights = tl.exp2(scores - base[:, None])
            kept = tl.exp2(most - base)
            total = total * kept + tl.sum(weights, 1)
            sums = tl.dot(weights.to(k_latent.dtype), k_latent, sums * kept[:, None], input_precision="ieee")
            most = higher
        sums /= tl.where(total > 0.0, total, 1.0)[:, None]
        if DIVIDED:
            place += tl.program_id(1).to(tl.int64) * num_tokens * heads
            tl.store(lse + place, tl.where(total > 0.0, most + tl.log2(total), float("-inf")), mask=inside)
        written = inside & (total > 0.0) if DIVIDED else inside
        tl.store(out + place[:, None] * RANK + dim[None, :], sums.to(out.dtype.element_ty), mask=written[:, None])


@triton.jit(do_not_specialize=("num_rows", "num_parts"))
def _merge_kernel(parts, lse, out, num_rows, num_parts, RANK: tl.constexpr, POWER: tl.constexpr):
    """``out[row]`` of the row's results over parts of its keys, weighted by what each part's scores add up to."""
    row = tl.program_id(0).to(tl.int64)
    part, dim = tl.arange(0, POWER), tl.arange(0, RANK)
    weights = tl.load(lse + part * num_rows + row, mask=part < num_parts, other=float("-inf"))
    some = weights > float("-inf")
    weights = tl.where(some, tl.exp2(weights - tl.max(weights, 0)), 0.0)
    places = parts + (part[:, None] * num_rows + row) * RANK + dim[None, :]
    values = tl.load(places, mask=some[:, None], other=0.0)
    merged = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * RANK + dim, merged.to(out.dtype.element_ty))


class LatentRows:
    """Rows of one kind, ``num_tokens`` queries in all, as many tokens one after another as ``qo_indptr`` says, or one
    each without it. Keys are divided until there are so many ``programs``; results over parts go to ``scratch``."""

    def __init__(
        self, spec: ModelSpec, block_size: int, num_tokens: int, rows: "PagedRows", scratch: torch.Tensor, tile: Tile,
        programs: int, qo_indptr: torch.Tensor | None,
    ) -> None:  # fmt: skip
        assert spec.latent is not None
        self._heads, self._rank, self._rope = spec.num_heads, spec.latent.rank, spec.latent.rope_dim
        self._scale = spec.head_dim**-0.5 * math.log2(math.e)
        self._block_size, self._num_tokens, self._rows = block_size, num_tokens, rows
        self._tile, self._qo_indptr = tile, qo_indptr
        self._num_slices = len(rows.last_block_len)
        decode = qo_indptr is None
        tiles = num_tokens * -(-self._heads // tile.rows) if decode else -(-num_tokens * self._heads // tile.rows)
        self._parts = max(1, min(_MOST_PARTS, programs // tiles))
        self._tiles = tiles if decode else tiles + self._num_slices  # a slice's last one may be filled in part
        results = self._parts * num_tokens * spec.num_heads
        floats = scratch.view(torch.float32)
        assert self._parts == 1 or results * (self._rank + 1) <= len(floats)
        self._results, self._lse = floats[: results * self._rank], floats[results * self._rank :]

    def run(self, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        """q ``[T, Hq, rank + rope_dim]`` over a layer's ``cache [num_blocks, block_size, 1, rank + rope_dim]``, into
        ``out [T, Hq, rank]``; all contiguous."""
        rows, tile, whole, decode = self._rows, self._tile, self._parts == 1, self._qo_indptr is None
        _attend_kernel[(self._tiles, self._parts)](
            q, cache, out if whole else self._results, self._lse, rows.indptr if decode else self._qo_indptr,
            rows.indptr, rows.indices, rows.last_block_len, self._scale, self._heads, self._num_slices,
            self._num_tokens, self._parts, BLOCK=self._block_size, RANK=self._rank, ROPE=self._rope, ROWS=tile.rows,
            KEYS=tile.keys, DIVIDED=not whole, LEAST_KEYS=_LEAST_KEYS,
            SLICES=0 if decode else triton.next_power_of_2(self._num_slices), num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        if not whole:
            num_rows = self._num_tokens * self._heads
            _merge_kernel[(num_rows,)](
                self._results, self._lse, out, num_rows, self._parts, RANK=self._rank,
                POWER=triton.next_power_of_2(self._parts), num_warps=4,
            )  # fmt: skip


class PrefillRows(LatentRows):
    """As ``flashinfer_attention.PrefillRows``."""

    def __init__(
        self, spec: ModelSpec, types: Types, block_size: int, num_tokens: int, workspace: "Workspace",
        qo_indptr: torch.Tensor, rows: "PagedRows",
    ) -> None:  # fmt: skip
        super().__init__(spec, block_size, num_tokens, rows, workspace.scratch, PREFILL, PREFILL_PROGRAMS, qo_indptr)

    def plan(self, qo_indptr: torch.Tensor, indptr: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """Nothing: the kernels read these on the device."""


class DecodeRows(LatentRows):
    """As ``flashinfer_attention.DecodeRows``."""

    def __init__(
        self, spec: ModelSpec, types: Types, block_size: int, workspace: "Workspace", rows: "PagedRows"
    ) -> None:
        tile = DECODE if spec.num_heads <= DECODE.rows else DECODE_MANY_HEADS
        count = len(rows.last_block_len)
        super().__init__(spec, block_size, count, rows, workspace.scratch, tile, DECODE_PROGRAMS, None)

    def plan(self, indptr: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """See ``PrefillRows.plan``."""


class GraphAttention:
    """``kernels.attention.Attention.run`` for a step of these rows; q, k, v as ``TorchLatentAttention`` takes them."""

    def __init__(self, kv: torch.Tensor, places: torch.Tensor, rows: Rows) -> None:
        self._caches = [layer[0] for layer in kv]
        self._places = places  # int32 [T]: where in the array each token's vector goes
        self._rows = rows

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache = self._caches[layer]
        write_vectors(k, cache, self._places)
        q = q.contiguous()
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
        self._rows.run(q, cache, out)
        return out
