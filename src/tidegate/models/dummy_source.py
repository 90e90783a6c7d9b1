"""Random weights for a model of which only the configuration is at hand: for load tests and benchmarks."""

import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tidegate.base.specs import ModelSpec
from tidegate.models.weights import fill


class DummySource:
    """See ``models.sources.ModelSource``. The same spec and seed give the same weights.

    Every matrix has variance 1 / fan-in, so that activations neither vanish nor explode and logits have a spread of
    about one; norms are near 1 and biases near 0.
    """

    def __init__(self, spec: ModelSpec, seed: int, tokenizer_dir: Path | None, gguf_file: Path | None = None) -> None:
        self.spec = spec
        self.tokenizer_dir = tokenizer_dir
        self.gguf_file = gguf_file
        self._seed = seed

    def load(self, into: Mapping[str, torch.Tensor], progress: Callable[[float], None]) -> None:
        fill(self.spec, into, self._draw, progress)

    def _draw(self, part: str, out: torch.Tensor) -> None:
        # Seeded by name, so that a tensor does not depend on which others were drawn before it.
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(f"{self._seed} {part}".encode()))
        centre = 1.0 if out.dim() == 1 and part.endswith(("norm", ".weight")) else 0.0
        half_width = math.sqrt(3.0 / out.shape[-1]) if out.dim() > 1 else 0.1
        out.uniform_(centre - half_width, centre + half_width, generator=generator)
