"""Products with int8 weights on the CPU: W8A8, symmetric, a scale for each row of the weight and of the input.

The integers come from fbgemm, which is fast from one row to hundreds, with and without VNNI. Its operator knows only
one scale for the whole input; so each row is divided by its largest magnitude first, which makes one fixed scale fit
all rows, and multiplied back after. Integer sums are exact: a row's result is the same whatever rows are beside it.
"""

import functools
import warnings
from typing import Any, cast

import numpy as np
import torch

from tidegate.kernels.compiled import Kernel, Words, floats, share_of

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 ``[out, in]`` and float32 ``scale [out]`` such that their product is nearest to ``weight``."""
    scale = weight.abs().amax(dim=1).clamp_min_(torch.finfo(torch.float32).tiny).div_(127.0)
    return weight.div(scale.unsqueeze(1)).round_().to(torch.int8), scale


@functools.cache
def activation_levels() -> int:
    """The largest magnitude of a quantised input: 127 where products of 8-bit inputs are exact, else 63.

    Without VNNI, pairs of products are added in 16 bits, which saturate; so tried on the largest there are.
    """
    weight = torch.full((32, 64), 127, dtype=torch.int8)
    packed = _pack(weight, torch.ones(32))
    ones, sums = torch.ones(1, 64), torch.full((1, 32), 64.0 * 127.0)
    return 127 if torch.allclose(_multiply(ones, packed, 127), sums) else 63


def _pack(weight: torch.Tensor, scale: torch.Tensor) -> Any:
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop quantised tensors some day; this one lives until it is packed
        quantised = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(quantised, None)


def _multiply(x: torch.Tensor, packed: Any, levels: int) -> torch.Tensor:
    """``[T, out]`` of x ``[T, in]`` in [-1, 1], which is rounded to ``levels`` on either side of 0."""
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return cast(torch.Tensor, multiply(x, 1.0 / levels, levels + 1, packed))


@Kernel
def _normalise(words: Words) -> None:
    out, scales, x, rows, width = words[0], floats(words[1]), words[2], words[3], words[4]
    first, last = share_of(rows)
    for row in range(first, last):
        source, target = floats(x + 4 * row * width), floats(out + 4 * row * width)
        most = _ZERO
        for i in range(width):
            most = max(most, abs(source[i]))
        scales[row] = most
        factor = _ONE / most if most > _ZERO else _ZERO
        for i in range(width):
            target[i] = source[i] * factor


@Kernel
def _scale(words: Words) -> None:
    y, scales, rows, width, bias = words[0], floats(words[1]), words[2], words[3], words[4]
    first, last = share_of(rows)
    for row in range(first, last):
        target, factor = floats(y + 4 * row * width), scales[row]
        if bias:
            added = floats(bias)
            for i in range(width):
                target[i] = target[i] * factor + added[i]
        else:
            for i in range(width):
                target[i] *= factor


class Int8Linear:
    """``x @ (weight * scale).T + bias`` for int8 ``weight [out, in]``, ``scale [out]`` and contiguous x ``[T, in]``.

    Holds its own, packed copy of the weight in memory of this process. Packing starts no threads.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = _pack(weight, scale)
        self._bias = bias
        self._levels = activation_levels()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        normalised, scales = torch.empty_like(x), x.new_empty(rows)
        _normalise(x.numel(), normalised.data_ptr(), scales.data_ptr(), x.data_ptr(), rows, width)
        y = _multiply(normalised, self._packed, self._levels)
        bias = self._bias.data_ptr() if self._bias is not None else 0
        _scale(y.numel(), y.data_ptr(), scales.data_ptr(), rows, y.shape[1], bias)
        return y
