"""How the products of experts are cut into tiles, by how many tokens there are: measured for some shapes of layer.

``expert_tiles.json`` beside this file holds what ``benchmarks/tune_experts.py`` measured on the device that it names;
where it does not have a shape, what holds for most shapes is taken.
"""

import bisect
import functools
import json
from pathlib import Path
from typing import NamedTuple


class Tile(NamedTuple):
    """What one program computes, over ``depth`` elements of the sum at a time, and with what."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Of the two products of a layer. Their rows are the same pairs of a token and an expert, so as many."""

    gate_up: Tile
    down: Tile


MEASURED = Path(__file__).with_suffix(".json")

# Few rows to an expert: bound by reading weights, so many bytes in flight. Many: bound by arithmetic.
USUAL = (Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 8, 3))


def tiles_for(num_experts: int, per_token: int, hidden: int, ffn: int, tokens: int) -> Tiles:
    """The tiles for ``tokens`` tokens in a layer of this shape (``base.specs.ExpertsSpec``)."""
    measured = _measured().get((num_experts, per_token, hidden, ffn))
    if measured is not None:
        up_to, tiles = measured
        return tiles[min(bisect.bisect_left(up_to, tokens), len(tiles) - 1)]
    usual = next((tile for tile in USUAL if tokens * per_token <= tile.rows * num_experts), USUAL[-1])
    return Tiles(usual, usual)


@functools.cache
def _measured() -> dict[tuple[int, ...], tuple[list[int], list[Tiles]]]:
    """By (experts, per token, hidden, ffn): ascending numbers of tokens, and the tiles for up to so many."""
    found = {}
    for layer in json.loads(MEASURED.read_text())["layers"]:
        shape = tuple(layer[name] for name in ("num_experts", "per_token", "hidden", "ffn"))
        tiles = [Tiles(Tile(*row["gate_up"]), Tile(*row["down"])) for row in layer["tiles"]]
        found[shape] = ([row["up_to_tokens"] for row in layer["tiles"]], tiles)
    return found
