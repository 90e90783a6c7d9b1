"""Rotary position embedding (RoFormer, arXiv 2104.09864), with the scalings of Llama 3.1 and YaRN (arXiv 2309.00071).

All in float32, in the order of operations of transformers, so that long positions round alike.
"""

import math

import torch

from tidegate.base.specs import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians a position for each pair of a head's turned elements, float32, scaling applied."""
    scaling = spec.rope_scaling
    exponents = torch.arange(0, _rotary_dim(spec), 2, dtype=torch.float32) / _rotary_dim(spec)
    periods = spec.rope_theta**exponents
    plain = 1.0 / periods
    if scaling.kind == "none":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(spec, plain)
    if scaling.kind == "yarn":
        keep = 1.0 - _yarn_ramp(spec)
        return 1.0 / (scaling.factor * periods) * (1.0 - keep) + plain * keep
    raise AssertionError(f"RoPE scaling {scaling.kind!r} got past models.config")


def _rotary_dim(spec: ModelSpec) -> int:
    return spec.latent.rope_dim if spec.latent else spec.head_dim


def _llama3(spec: ModelSpec, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    scaling = spec.rope_scaling
    wavelengths = 2 * math.pi / plain
    longest_kept = scaling.original_max_len / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_len / scaling.low_freq_factor
    smooth = (scaling.original_max_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * plain / scaling.factor + smooth * plain
    scaled = torch.where(wavelengths > shortest_stretched, plain / scaling.factor, blended)
    return torch.where(wavelengths < longest_kept, plain, scaled)


def _yarn_ramp(spec: ModelSpec) -> torch.Tensor:
    """How far each frequency is interpolated, 0 to 1 (YaRN, equations 17 to 19)."""
    scaling = spec.rope_scaling

    def dim_of(rotations: float) -> float:
        """The element that turns so many times within the original length."""
        turns = math.log(scaling.original_max_len / (rotations * 2 * math.pi))
        return _rotary_dim(spec) * turns / (2 * math.log(spec.rope_theta))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), _rotary_dim(spec) - 1)
    width = high - low if high != low else 0.001
    return ((torch.arange(_rotary_dim(spec) // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


class Rotary:
    """Cosines and sines for one step's positions: computed once a step, used by every layer."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec).to(device)
        self._amplitude = spec.rope_scaling.attention_factor or 1.0

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[T, 1, turned elements / 2]`` in ``dtype``, the YaRN amplitude included."""
        angles = (positions.to(torch.float32)[:, None] * self._frequencies).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        if self._amplitude != 1.0:
            cos, sin = cos * self._amplitude, sin * self._amplitude
        return cos.to(dtype), sin.to(dtype)
