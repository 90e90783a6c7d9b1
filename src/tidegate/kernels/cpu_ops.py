"""``kernels.torch_ops`` for float32 on the CPU: one pass over memory each, compiled.

A step of a small model has hundreds of these operations on a few kilobytes each; here one costs about two
microseconds, where several torch calls would cost ten or more.
"""

import numpy as np
import torch

from tidegate.kernels.compiled import Kernel, Words, as_float, exp, floats, share_of, word
from tidegate.kernels.routing import choose_experts as choose_experts
from tidegate.kernels.torch_experts import experts as experts

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@Kernel
def _rms_norm(words: Words) -> None:
    out, x, weight, rows, width, eps = words[0], words[1], floats(words[2]), words[3], words[4], words[5]
    first, last = share_of(rows)
    for row in range(first, last):
        source, target = floats(x + 4 * row * width), floats(out + 4 * row * width)
        squares = _ZERO
        for i in range(width):
            squares += source[i] * source[i]
        factor = _ONE / np.sqrt(squares / np.float32(width) + as_float(np.int32(eps)))
        for i in range(width):
            target[i] = source[i] * factor * weight[i]


@Kernel
def _add_rms_norm(words: Words) -> None:
    out, x, weight, rows, width, eps = words[0], words[1], floats(words[2]), words[3], words[4], words[5]
    first, last = share_of(rows)
    for row in range(first, last):
        source, target = floats(x + 4 * row * width), floats(out + 4 * row * width)
        more = floats(words[6] + 4 * row * width)
        squares = _ZERO
        for i in range(width):
            value = source[i] + more[i]
            source[i] = value
            squares += value * value
        factor = _ONE / np.sqrt(squares / np.float32(width) + as_float(np.int32(eps)))
        for i in range(width):
            target[i] = source[i] * factor * weight[i]


@Kernel
def _rope(words: Words) -> None:
    x, stride, cos, sin, tokens, heads, half = words[0], words[1], words[2], words[3], words[4], words[5], words[6]
    first, last = share_of(tokens)
    for token in range(first, last):
        c, s = floats(cos + 4 * token * half), floats(sin + 4 * token * half)
        for head in range(heads):
            a = floats(x + 4 * (token * stride + head * 2 * half))
            b = floats(x + 4 * (token * stride + head * 2 * half + half))
            for i in range(half):
                left, right = a[i], b[i]
                a[i] = left * c[i] - right * s[i]
                b[i] = right * c[i] + left * s[i]


@Kernel
def _silu_mul(words: Words) -> None:
    out, gate_up, rows, width = words[0], words[1], words[2], words[3]
    first, last = share_of(rows)
    for row in range(first, last):
        target = floats(out + 4 * row * width)
        gate, up = floats(gate_up + 8 * row * width), floats(gate_up + 8 * row * width + 4 * width)
        for i in range(width):
            target[i] = gate[i] / (_ONE + exp(-gate[i])) * up[i]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``torch_ops.rms_norm``."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = weight.shape[0]
    rows = x.numel() // width
    _rms_norm(x.numel(), out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, width, word(eps))
    return out


def add_rms_norm(residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``torch_ops.add_rms_norm``. ``residual`` and ``added`` are contiguous."""
    out = torch.empty_like(residual)
    rows, width = residual.shape
    addresses = out.data_ptr(), residual.data_ptr(), weight.data_ptr()
    _add_rms_norm(out.numel(), *addresses, rows, width, word(eps), added.data_ptr())
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As ``torch_ops.rope``. Heads are contiguous and follow each other; tokens may be further apart."""
    tokens, heads, head_dim = x.shape
    addresses = x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr()
    _rope(x.numel(), *addresses, tokens, heads, head_dim // 2)
    return x


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As ``torch_ops.silu_mul``. ``gate_up`` is contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _silu_mul(out.numel(), out.data_ptr(), gate_up.data_ptr(), rows, width)
    return out
