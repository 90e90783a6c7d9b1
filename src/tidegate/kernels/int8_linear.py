"""Products with int8 weights on the CPU: W8A8, symmetric, a scale for each row of the weight and of the input.

The integers come from fbgemm, which is fast from one row to hundreds, with and without VNNI. Its operator knows only
one scale for the whole input; so each row is divided by its largest magnitude first, which makes one fixed scale fit
all rows, and multiplied back after. Integer sums are exact: a row's result is the same whatever rows are beside it.

A row whose few largest values would take most of the levels can be spread first: a Hadamard transform across segments
of the row mixes every value with up to 31 others. It vectorises along the segments and takes a fifteenth of a product.
"""

import functools
import warnings
from typing import Any, cast

import numpy as np
import torch

from tidegate.kernels.compiled import Kernel, Words, floats, share_of

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MOST_SEGMENTS = 32  # with more, accuracy is no better


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 ``[out, in]`` and float32 ``scale [out]`` such that their product is nearest to ``weight``."""
    scale = weight.abs().amax(dim=1).clamp_min_(torch.finfo(torch.float32).tiny).div_(127.0)
    return weight.div(scale.unsqueeze(1)).round_().to(torch.int8), scale


def segments_of(width: int) -> int:
    """How many equal segments, a power of 2, rows of this width are spread across; 1 if they can't be."""
    return min(width & -width, _MOST_SEGMENTS)


def take_spread_inputs(weight: torch.Tensor) -> None:
    """Turns ``weight [out, in]`` in place into that for which ``Int8Linear`` with ``spread`` gives the same product."""
    segments = segments_of(weight.shape[1])
    parts = weight.unflatten(1, (segments, -1))
    length = segments // 2
    while length:
        pairs = parts.unflatten(1, (-1, 2, length))
        first, second = pairs.select(2, 0), pairs.select(2, 1)
        total, difference = first + second, first - second
        first.copy_(total)
        second.copy_(difference)
        length //= 2
    weight.div_(segments)


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
    out, scales, x, rows, width, segments = words[0], floats(words[1]), words[2], words[3], words[4], words[5]
    first, last = share_of(rows)
    for row in range(first, last):
        source, target = floats(x + 4 * row * width), floats(out + 4 * row * width)
        if segments > 1:
            half = width // 2
            for i in range(half):
                target[i] = source[i] + source[i + half]
                target[i + half] = source[i] - source[i + half]
            source = target
            length = width // 4
            while length * segments >= width:
                for start in range(0, width, 2 * length):
                    at = out + 4 * (row * width + start)
                    first_half, second_half = floats(at), floats(at + 4 * length)
                    for i in range(length):
                        total, difference = first_half[i] + second_half[i], first_half[i] - second_half[i]
                        first_half[i] = total
                        second_half[i] = difference
                length //= 2
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

    With ``spread``, x is spread before it is rounded, and the weight is one after ``take_spread_inputs``. Holds its
    own, packed copy of the weight in memory of this process. Packing starts no threads.
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, spread: bool = False
    ) -> None:
        self._packed = _pack(weight, scale)
        self._bias = bias
        self._segments = segments_of(weight.shape[1]) if spread else 1
        self._levels = activation_levels()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        normalised, scales = torch.empty_like(x), x.new_empty(rows)
        into = normalised.data_ptr(), scales.data_ptr()
        _normalise(x.numel(), *into, x.data_ptr(), rows, width, self._segments)
        y = _multiply(normalised, self._packed, self._levels)
        bias = self._bias.data_ptr() if self._bias is not None else 0
        _scale(y.numel(), y.data_ptr(), scales.data_ptr(), rows, y.shape[1], bias)
        return y
