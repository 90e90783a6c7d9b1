"""FP8 numbers of the kind e4m3 (arXiv 2209.05433): how floats become them, in plain torch, on any device.

A number is stored as ``round(number / scale)``; magnitudes beyond the largest saturate. Scales are float32.
"""

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SCALE = 1e-12  # of a row of zeros, too

KvScales = tuple[tuple[float, float], ...]  # of each layer: what its keys are divided by when stored, and its values


def saturated(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """``x / scale`` in e4m3."""
    return (x / scale).clamp_(-LARGEST, LARGEST).to(E4M3)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 ``[rows, width]`` and ``scale [rows]`` such that their product is nearest to ``x``; each row by itself."""
    scale = x.abs().amax(dim=1).float().div_(LARGEST).clamp_min_(LEAST_SCALE)
    return saturated(x.float(), scale.unsqueeze(1)), scale


def unit_scales(num_layers: int) -> KvScales:
    """Of a model whose checkpoint brings none."""
    return ((1.0, 1.0),) * num_layers
