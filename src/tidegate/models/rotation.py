"""Turning a decoder's residual stream, so that it has no outliers when it is rounded to int8.

A few channels of the stream are tens of times as large as the rest, and would take most of a row's levels. An
orthogonal matrix that spreads every channel over all of them leaves what the model computes as it is: what reads the
stream is turned along, what writes to it too, and RMSNorm sees only its length once the norm's weights have been moved
into the matrices that follow (QuaRot, arXiv 2404.00456, the part of it that costs nothing at run time).
"""

import math

import torch

from tidegate.base.specs import ModelSpec

_LARGEST_FACTOR = 64
_SEED = 5  # of ten tried, that with which SmolLM2 in int8 agrees most often with float32 on the best next token


class Rotation:
    """An orthogonal matrix of ``size`` rows: signs, then a Kronecker product of small ones, Hadamard where they can be.
    The same for the same size."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size + _SEED)
        self._signs = torch.randint(0, 2, (size,), generator=generator).mul_(2).sub_(1).float()
        power = size & -size  # the largest power of 2 that divides it
        odd = size // power
        self._factors = [torch.linalg.qr(_normal(odd, generator))[0].float().contiguous()] if odd > 1 else []
        while power > 1:
            factor = min(power, _LARGEST_FACTOR)
            self._factors.append(_hadamard(factor))
            power //= factor

    def turn_inputs(self, matrix: torch.Tensor) -> None:
        """``matrix [out, size]``, which reads the stream, in place becomes one that reads the turned stream."""
        turned = matrix * self._signs
        for factor in self._factors:
            # The innermost axis is turned and becomes the outermost, so that the next factor finds its own innermost.
            turned = (turned.view(len(matrix), -1, len(factor)) @ factor).transpose(1, 2).flatten(1)
        matrix.copy_(turned)

    def turn_outputs(self, matrix: torch.Tensor) -> None:
        """``matrix [size, in]``, which writes to the stream, or a bias ``[size]`` of one."""
        columns = matrix.view(matrix.shape[0], -1).t().contiguous()
        self.turn_inputs(columns)
        matrix.copy_(columns.t().view_as(matrix))


def rotate(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> None:
    """Turns all of a float model's weights in place; ``lm_head`` must be there, and not be ``embed`` itself."""
    rotation = Rotation(spec.hidden_size)

    def read_by(norm: str, matrix: str) -> None:
        weights[matrix].mul_(weights[norm])
        rotation.turn_inputs(weights[matrix])

    rotation.turn_inputs(weights["embed"])
    for i in range(spec.num_layers):
        layer = f"layers.{i}."
        read_by(layer + "attn_norm", layer + "qkv")
        read_by(layer + "mlp_norm", layer + "gate_up")
        for name in ("o", "down", "o_bias", "down_bias"):
            if layer + name in weights:
                rotation.turn_outputs(weights[layer + name])
        weights[layer + "attn_norm"].fill_(1.0)
        weights[layer + "mlp_norm"].fill_(1.0)
    read_by("norm", "lm_head")
    weights["norm"].fill_(1.0)


def _normal(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, size, dtype=torch.float64, generator=generator)


def _hadamard(size: int) -> torch.Tensor:
    """The orthogonal one of a power of 2, by Sylvester's construction; it is symmetric."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)
