"""Random weights for a model of which only the configuration is at hand: for load tests and benchmarks."""

import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tidegate.base.specs import ModelSpec, Shard
from tidegate.models.shards import Cut
from tidegate.models.weights import WHOLE, fill


class DummySource:
    """See ``models.sources.ModelSource``. The same spec and seed give the same weights, however many
    ranks divide them.

    Every matrix has variance 1 / fan-in, so that activations neither vanish nor explode and logits have a spread of
    about one; norms are near 1 and biases near 0.
    """

    def __init__(self, spec: ModelSpec, seed: int, tokenizer_dir: Path | None, gguf_file: Path | None = None) -> None:
        self.spec = spec
        self.tokenizer_dir = tokenizer_dir
        self.gguf_file = gguf_file
        self._seed = seed

    def load(self, into: Mapping[str, torch.Tensor], progress: Callable[[float], None], shard: Shard = WHOLE) -> None:
        fill(self.spec, into, self._draw_cut, progress, shard)

    def _draw_cut(self, part: str, out: torch.Tensor, cut: Cut) -> None:
        if cut.whole:
            self._draw(part, out)
            return
        tensor = torch.empty(cut.shape, dtype=out.dtype, device=out.device)
        self._draw(part, tensor)
        out.copy_(tensor.narrow(cut.axis, cut.start, cut.stop - cut.start))

    def _draw(self, part: str, out: torch.Tensor) -> None:
        # Seeded by name, so that a tensor does not depend on which others were drawn before it.
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(f"{self._seed} {part}".encode()))
        centre = 1.0 if out.dim() == 1 and part.endswith(("norm", ".weight")) else 0.0
        half_width = math.sqrt(3.0 / out.shape[-1]) if out.dim() > 1 else 0.1
        out.uniform_(centre - half_width, centre + half_width, generator=generator)
