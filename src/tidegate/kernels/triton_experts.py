"""The experts of a mixture on a GPU: three kernels whatever the routing, in a form that a CUDA graph can hold.

Pairs of a token and one of its experts are ordered by expert, and each expert's pairs are cut into tiles of rows. Which
tile is whose is found out on the device; the grid has room for the most tiles that so many pairs can make, and programs
without a tile end at once. Nothing is shared between calls: what they allocate belongs to the caller's stream.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tidegate.kernels.torch_experts import ExpertScales

_CHUNK = 1024  # pairs that the schedule looks at at a time


class _Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Few rows to an expert: bound by reading weights, so many bytes in flight. Many: bound by arithmetic.
_TILES = (_Tile(16, 64, 128, 4, 4), _Tile(32, 64, 128, 4, 4), _Tile(64, 128, 64, 4, 3), _Tile(128, 128, 64, 8, 3))


@triton.jit
def _schedule_kernel(
    chosen, order, tiles, num_pairs, max_tiles, ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e lists expert e's pairs, in ascending order, and its tiles. EXPERTS and TILES are powers of 2."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], dtype=tl.int32)
    for first in range(0, num_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        inside = pair < num_pairs
        theirs = tl.load(chosen + pair, mask=inside, other=0).to(tl.int32)
        counts += tl.histogram(theirs, EXPERTS, mask=inside)
    tiles_of = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(experts < expert, counts, 0), 0)
    end = start + tl.sum(tl.where(experts == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(experts < expert, tiles_of, 0), 0)
    end_tile = first_tile + (end - start + ROWS - 1) // ROWS
    place = start
    for first in range(0, num_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        inside = pair < num_pairs
        theirs = tl.load(chosen + pair, mask=inside, other=0).to(tl.int32)
        ours = (inside & (theirs == expert)).to(tl.int32)
        tl.store(order + place + tl.cumsum(ours, 0) - 1, pair, mask=ours > 0)
        place += tl.sum(ours, 0)
    tile = tl.arange(0, TILES)
    inside = (tile >= first_tile) & (tile < end_tile)
    tl.store(tiles + tile, tl.zeros([TILES], dtype=tl.int32) + expert, mask=inside)
    tl.store(tiles + max_tiles + tile, start + (tile - first_tile) * ROWS, mask=inside)
    tl.store(tiles + 2 * max_tiles + tile, tl.zeros([TILES], dtype=tl.int32) + end, mask=inside)
    if expert == 0:
        nobodys = (tile >= tl.sum(tiles_of, 0)) & (tile < max_tiles)
        tl.store(tiles + tile, tl.full([TILES], -1, dtype=tl.int32), mask=nobodys)


@triton.jit
def _gate_up_kernel(
    x, weight, scales, out, order, tiles, max_tiles, hidden, ffn, per_token, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """``out[row] = silu(gate) * up`` of the token of each ordered pair."""
    expert = tl.load(tiles + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        row = tl.load(tiles + max_tiles + tl.program_id(0)) + tl.arange(0, ROWS)
        inside = row < tl.load(tiles + 2 * max_tiles + tl.program_id(0))
        token = (tl.load(order + row, mask=inside, other=0) // per_token).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        inputs = x + token[:, None] * hidden + k[None, :]
        gates = weight + expert * 2 * ffn * hidden + column[None, :].to(tl.int64) * hidden + k[:, None]
        ups = gates + ffn.to(tl.int64) * hidden
        gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for done in range(0, hidden, DEPTH):
            a = tl.load(inputs + done, mask=inside[:, None] & (k[None, :] < hidden - done), other=0.0)
            wanted = (column[None, :] < ffn) & (k[:, None] < hidden - done)
            b = tl.load(gates + done, mask=wanted, other=0.0).to(x.dtype.element_ty)
            gate = tl.dot(a, b, gate, input_precision="ieee")
            b = tl.load(ups + done, mask=wanted, other=0.0).to(x.dtype.element_ty)
            up = tl.dot(a, b, up, input_precision="ieee")
        if SCALED:
            ours = scales + expert * 2 * ffn + column
            gate *= tl.load(ours, mask=column < ffn, other=0.0)[None, :]
            up *= tl.load(ours + ffn, mask=column < ffn, other=0.0)[None, :]
        value = gate / (1.0 + tl.exp(-gate)) * up
        places = out + row[:, None].to(tl.int64) * ffn + column[None, :]
        tl.store(places, value.to(out.dtype.element_ty), mask=inside[:, None] & (column[None, :] < ffn))


@triton.jit
def _down_kernel(
    x, weight, scales, out, shares, order, tiles, max_tiles, hidden, ffn, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """``out[pair]``: the pair's share times its expert's second product."""
    expert = tl.load(tiles + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        row = tl.load(tiles + max_tiles + tl.program_id(0)) + tl.arange(0, ROWS)
        inside = row < tl.load(tiles + 2 * max_tiles + tl.program_id(0))
        pair = tl.load(order + row, mask=inside, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        inputs = x + row[:, None].to(tl.int64) * ffn + k[None, :]
        factors = weight + expert * hidden * ffn + column[None, :].to(tl.int64) * ffn + k[:, None]
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for done in range(0, ffn, DEPTH):
            a = tl.load(inputs + done, mask=inside[:, None] & (k[None, :] < ffn - done), other=0.0)
            wanted = (column[None, :] < hidden) & (k[:, None] < ffn - done)
            b = tl.load(factors + done, mask=wanted, other=0.0).to(x.dtype.element_ty)
            total = tl.dot(a, b, total, input_precision="ieee")
        if SCALED:
            ours = scales + expert * hidden + column
            total *= tl.load(ours, mask=column < hidden, other=0.0)[None, :]
        total *= tl.load(shares + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
        places = out + pair[:, None] * hidden + column[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=inside[:, None] & (column[None, :] < hidden))


def experts(
    x: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: ExpertScales | None = None,
) -> torch.Tensor:
    """As ``torch_experts.experts``, without waiting for the device; all arguments contiguous.

    A token's sums run over the same chunks in the same order whoever is beside it; how many pairs there are in all
    decides the height of tiles, and so which matrix instruction adds within a chunk.
    """
    (num_experts, hidden, ffn), (tokens, per_token) = down.shape, chosen.shape
    pairs = tokens * per_token
    tile = next((t for t in _TILES if pairs <= t.rows * num_experts), _TILES[-1])
    max_tiles = (pairs + min(pairs, num_experts) * (tile.rows - 1)) // tile.rows
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    tiles = torch.empty((3, max_tiles), dtype=torch.int32, device=x.device)  # whose, first row, the expert's end
    _schedule_kernel[(num_experts,)](
        chosen, order, tiles, pairs, max_tiles, ROWS=tile.rows, EXPERTS=triton.next_power_of_2(num_experts),
        TILES=triton.next_power_of_2(max_tiles), CHUNK=min(_CHUNK, triton.next_power_of_2(pairs)),
    )  # fmt: skip
    launch = {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "num_warps": tile.warps,
        "num_stages": tile.stages, "SCALED": scales is not None,
    }  # fmt: skip
    gate_up_scales, down_scales = scales or (shares, shares)  # not read where there are none
    gated = torch.empty((pairs, ffn), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(max_tiles, triton.cdiv(ffn, tile.columns))](
        x, gate_up, gate_up_scales, gated, order, tiles, max_tiles, hidden, ffn, per_token, **launch
    )
    terms = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    _down_kernel[(max_tiles, triton.cdiv(hidden, tile.columns))](
        gated, down, down_scales, terms, shares, order, tiles, max_tiles, hidden, ffn, **launch
    )
    return terms.view(tokens, per_token, hidden).sum(dim=1)
