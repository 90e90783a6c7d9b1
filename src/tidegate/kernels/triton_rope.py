"""Rotary embedding in place, for the query and key heads of a fused projection."""

import torch
import triton
import triton.language as tl

_HEADS = 8  # of one program


@triton.jit
def _rope_kernel(x, cos, sin, token_stride, heads, HALF: tl.constexpr, HEADS: tl.constexpr, POWER: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    element = tl.arange(0, POWER)
    turned = element < HALF
    c = tl.load(cos + token * HALF + element, mask=turned).to(tl.float32)[None, :]
    s = tl.load(sin + token * HALF + element, mask=turned).to(tl.float32)[None, :]
    place = x + token * token_stride + head[:, None] * 2 * HALF + element[None, :]
    inside = (head < heads)[:, None] & turned[None, :]
    first = tl.load(place, mask=inside).to(tl.float32)
    second = tl.load(place + HALF, mask=inside).to(tl.float32)
    tl.store(place, (first * c - second * s).to(x.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * c + first * s).to(x.dtype.element_ty), mask=inside)


def rope(qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns element i of each head ``qk[T, H, D]`` with element i + D/2 by cos and sin ``[T, 1, D/2]``, in place.

    The last two axes must be dense; the first may have any stride.
    """
    tokens, heads, dim = qk.shape
    assert qk.stride(2) == 1 and qk.stride(1) == dim
    half = dim // 2
    _rope_kernel[(tokens, triton.cdiv(heads, _HEADS))](
        qk, cos, sin, qk.stride(0), heads, HALF=half, HEADS=_HEADS, POWER=triton.next_power_of_2(half), num_warps=4
    )
    return qk
