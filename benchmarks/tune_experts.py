"""Measures in which tiles this GPU computes experts fastest, for every number of tokens, and writes the table that
``tidegate.kernels.expert_tiles`` reads.

    python benchmarks/tune_experts.py [--json FILE] [SHAPE ...]

Random weights and routing; the cache is flushed before every run. "floor" is what reading the experts that have tokens
at 4.1 TB/s, or computing at 790 TFLOP/s, would take (an H200).
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from kernel_time import us
from model_shapes import SHAPES

from tidegate.kernels.expert_tiles import MEASURED, USUAL, Tile, Tiles
from tidegate.kernels.triton_experts import experts_in_tiles
from tidegate.models.config import spec_from_hf

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2304)
TUNED = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite")
BYTES_PER_S, FLOPS = 4.1e12, 7.9e14
CANDIDATES = (
    *USUAL,
    Tile(16, 32, 256, 4, 4),
    Tile(16, 64, 128, 4, 5),
    Tile(16, 128, 64, 4, 5),
    Tile(16, 128, 128, 8, 3),
    Tile(32, 128, 64, 4, 4),
    Tile(32, 128, 128, 8, 3),
    Tile(64, 64, 128, 4, 3),
    Tile(64, 128, 64, 8, 4),
    Tile(64, 256, 64, 8, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 64, 64, 4, 4),
)


class Layer:
    """The experts of one layer of a model, and tokens for them."""

    def __init__(self, name: str) -> None:
        spec = spec_from_hf(SHAPES[name])
        assert spec.experts is not None
        self.experts, self.hidden = spec.experts, spec.hidden_size
        number, ffn = self.experts.num_experts, self.experts.ffn_size
        self._gate_up = self._random(number, 2 * ffn, self.hidden)
        self._down = self._random(number, self.hidden, ffn)
        self._evicted = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")  # more than the cache holds

    @property
    def shape(self) -> dict[str, int]:
        experts = self.experts
        names = "num_experts", "per_token", "hidden", "ffn"
        return dict(zip(names, (experts.num_experts, experts.per_token, self.hidden, experts.ffn_size), strict=True))

    def take(self, tokens: int) -> None:
        """What is measured from now on."""
        self._x = self._random(tokens, self.hidden)
        scores = torch.rand(tokens, self.experts.num_experts, device="cuda")
        shares, self._chosen = scores.topk(self.experts.per_token, dim=1)
        self._shares = shares.bfloat16()

    def floor_us(self) -> float:
        elements = 3 * self.hidden * self.experts.ffn_size
        reading = 2 * elements * len(self._chosen.unique()) / BYTES_PER_S
        return max(reading, 2 * elements * self._chosen.numel() / FLOPS) * 1e6

    def us(self, tiles: Tiles) -> float:
        return us(
            lambda: experts_in_tiles(self._x, self._shares, self._chosen, self._gate_up, self._down, tiles),
            self._evicted,
        )

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0.0, shape[-1] ** -0.5)


def heights(layer: Layer, tokens: int) -> Iterator[int]:
    """Rows of tiles that so many tokens could be worth: not four times more than an expert has, nor far fewer."""
    per_expert = tokens * layer.experts.per_token / layer.experts.num_experts
    for rows in sorted({tile.rows for tile in CANDIDATES}):
        if rows <= max(16, 4 * per_expert) and rows >= min(128, per_expert / 4):
            yield rows


def best(layer: Layer, tokens: int) -> tuple[float, Tiles]:
    """The fastest: of every height, first product by first product, then the second beside the fastest of these."""
    found = []
    for rows in heights(layer, tokens):
        tiles = [tile for tile in CANDIDATES if tile.rows == rows]
        usual = next(tile for tile in USUAL if tile.rows == rows)
        _, first = min((layer.us(Tiles(tile, usual)), tile) for tile in tiles)
        found.append(min((layer.us(Tiles(first, tile)), Tiles(first, tile)) for tile in tiles))
    return min(found)


def tune(name: str) -> dict[str, Any]:
    layer = Layer(name)
    print(f"{name}: {layer.shape}")
    rows = []
    for tokens in TOKENS:
        layer.take(tokens)
        us, tiles = best(layer, tokens)
        print(f"  {tokens:5} tokens: {us:8.1f} us (floor {layer.floor_us():7.1f})  {tiles}", flush=True)
        rows.append({"up_to_tokens": tokens, "gate_up": list(tiles.gate_up), "down": list(tiles.down)})
    return {**layer.shape, "tiles": rows}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=MEASURED, metavar="FILE", help="(default: %(default)s)")
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"{', '.join(TUNED)} (default: all)")
    arguments = parser.parse_args()
    unknown = set(arguments.shapes) - set(TUNED)
    if unknown:
        parser.error(f"there is no shape {', '.join(sorted(unknown))}; choose from {', '.join(TUNED)}")
    layers = []
    for name in arguments.shapes or TUNED:
        layers.append(tune(name))
        table = {"device": torch.cuda.get_device_name(), "layers": layers}
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")  # after each: a run may be cut short


if __name__ == "__main__":
    main()
