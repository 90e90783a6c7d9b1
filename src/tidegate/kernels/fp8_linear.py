"""Products with e4m3 weights: W8A8, a scale for each row of the weight and for each row of the input.

The input's scales are found as it comes, or, where a checkpoint brings one for all rows, are that one. So a row's
result does not depend on the rows beside it.
"""

import torch

from tidegate.kernels.fp8 import quantise_rows, saturated
from tidegate.kernels.linear import Linear, float_linear

MULTIPLE = 16  # of which both of a weight's sizes must be one for the GPU's product


def fp8_linear(
    weight: torch.Tensor, scale: torch.Tensor, input_scale: torch.Tensor | None, bias: torch.Tensor | None
) -> Linear:
    """``x @ (weight * scale).T + bias`` for e4m3 ``weight [out, in]``, ``scale [out]`` and ``input_scale`` [1]."""
    kind = ScaledLinear if weight.is_cuda else EmulatedLinear
    return kind(weight, scale, input_scale, bias)


class ScaledLinear:
    """On a GPU's FP8 tensor cores (from compute capability 8.9 on), x and the result in bf16. The weight is not
    copied."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        from tidegate.kernels.triton_quantise_rows import quantise_rows as on_gpu  # Triton is only where a GPU is

        self._quantise = on_gpu
        self._weight, self._scale = weight.t(), scale.view(1, -1)  # column-major, as the product wants it
        self._input_scale, self._bias = input_scale, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rounded, scales = self._quantise(x, self._input_scale)
        y = torch._scaled_mm(
            rounded, self._weight, scale_a=scales, scale_b=self._scale, out_dtype=x.dtype, use_fast_accum=True
        )
        return y if self._bias is None else y.add_(self._bias)


class EmulatedLinear:
    """Anywhere: the same numbers multiplied as floats, in which every product of two e4m3 numbers is exact. Holds a
    float32 copy of the weight; making it starts no threads on the CPU that has one."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        self._product = float_linear(weight.float(), None)
        self._scale, self._input_scale, self._bias = scale, input_scale, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._input_scale is None:
            rounded, scales = quantise_rows(x)
            y = self._product(rounded.float()).mul_(scales.unsqueeze(1))
        else:
            y = self._product(saturated(x.float(), self._input_scale).float()).mul_(self._input_scale)
        y.mul_(self._scale)
        return (y if self._bias is None else y.add_(self._bias)).to(x.dtype)
