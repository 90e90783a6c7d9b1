"""The experts of a mixture on a GPU: the same kernels whatever the routing, in a form that a CUDA graph can hold.

Pairs of a token and one of its experts are ordered by expert, and each expert's pairs are cut into tiles of rows. Which
tile is whose is found out on the device; the grid has room for the most tiles that so many pairs can make, and programs
without a tile end at once. Nothing is shared between calls: what they allocate belongs to the caller's stream.
"""

import torch
import triton
import triton.language as tl

from tidegate.kernels.expert_tiles import Tile, Tiles, tiles_for
from tidegate.kernels.torch_experts import ExpertScales

_CHUNK = 1024  # pairs that the schedule looks at at a time


# Numbers of tokens and what follows from them are not specialized on: each would be compiled anew.
@triton.jit(do_not_specialize=("num_pairs", "max_tiles"))
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


@triton.jit(do_not_specialize=("max_tiles", "per_token"))
def _product_kernel(
    x, weight, scales, shares, out, order, tiles, max_tiles, depth, width, per_token, GATED: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of an expert's product with its ordered pairs. GATED: of the pairs' tokens with both halves of
    ``weight``, ``silu(first) * second``; otherwise of results in order, times the pair's share, to its place."""
    expert = tl.load(tiles + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        row = tl.load(tiles + max_tiles + tl.program_id(0)) + tl.arange(0, ROWS)
        inside = row < tl.load(tiles + 2 * max_tiles + tl.program_id(0))
        pair = tl.load(order + row, mask=inside, other=0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        source = pair // per_token if GATED else row
        inputs = x + source.to(tl.int64)[:, None] * depth + k[None, :]
        factors = weight + expert * (2 if GATED else 1) * width * depth
        factors += column[None, :].to(tl.int64) * depth + k[:, None]
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        other = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for done in range(0, depth, DEPTH):
            a = tl.load(inputs + done, mask=inside[:, None] & (k[None, :] < depth - done), other=0.0)
            wanted = (column[None, :] < width) & (k[:, None] < depth - done)
            b = tl.load(factors + done, mask=wanted, other=0.0).to(x.dtype.element_ty)
            total = tl.dot(a, b, total, input_precision="ieee")
            if GATED:
                b = tl.load(factors + width.to(tl.int64) * depth + done, mask=wanted, other=0.0).to(x.dtype.element_ty)
                other = tl.dot(a, b, other, input_precision="ieee")
        if SCALED:
            ours = scales + expert * (2 if GATED else 1) * width + column
            total *= tl.load(ours, mask=column < width, other=0.0)[None, :]
            if GATED:
                other *= tl.load(ours + width, mask=column < width, other=0.0)[None, :]
        if GATED:
            target, total = row, total / (1.0 + tl.exp(-total)) * other
        else:
            target, total = pair, total * tl.load(shares + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
        places = out + target.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=inside[:, None] & (column[None, :] < width))


def experts(
    x: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: ExpertScales | None = None,
) -> torch.Tensor:
    """As ``torch_experts.experts``, without waiting for the device; all arguments contiguous.

    A token's sums run over the same chunks in the same order whoever is beside it; how many tokens there are in all
    decides the tiles, and so how long a chunk is and which matrix instruction adds within it.
    """
    (num_experts, hidden, ffn), (tokens, per_token) = down.shape, chosen.shape
    by = tiles_for(num_experts, per_token, hidden, ffn, tokens)
    return experts_in_tiles(x, shares, chosen, gate_up, down, by, scales)


def experts_in_tiles(
    x: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    by: Tiles,
    scales: ExpertScales | None = None,
) -> torch.Tensor:
    """``experts`` by tiles that the caller has chosen."""
    (num_experts, hidden, ffn), (tokens, per_token) = down.shape, chosen.shape
    pairs, rows = tokens * per_token, by.gate_up.rows
    max_tiles = (pairs + min(pairs, num_experts) * (rows - 1)) // rows
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    tiles = torch.empty((3, max_tiles), dtype=torch.int32, device=x.device)  # whose, first row, the expert's end
    _schedule_kernel[(num_experts,)](
        chosen, order, tiles, pairs, max_tiles, ROWS=rows, EXPERTS=triton.next_power_of_2(num_experts),
        TILES=triton.next_power_of_2(max_tiles), CHUNK=min(_CHUNK, triton.next_power_of_2(pairs)),
    )  # fmt: skip

    def multiply(source: torch.Tensor, part: int, width: int, tile: Tile) -> torch.Tensor:
        out = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
        _product_kernel[(max_tiles, triton.cdiv(width, tile.columns))](
            source, (gate_up, down)[part], shares if scales is None else scales[part], shares, out, order, tiles,
            max_tiles, source.shape[1], width, per_token, GATED=part == 0, SCALED=scales is not None, ROWS=rows,
            COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out

    gated = multiply(x, 0, ffn, by.gate_up)
    terms = multiply(gated, 1, hidden, by.down)
    return terms.view(tokens, per_token, hidden).sum(dim=1)
