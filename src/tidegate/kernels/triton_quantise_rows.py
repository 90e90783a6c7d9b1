"""``kernels.fp8.quantise_rows`` on a GPU, in one pass over the input."""

import torch
import triton
import triton.language as tl

from tidegate.kernels.fp8 import E4M3, LARGEST, LEAST_SCALE


@triton.jit
def _quantise_kernel(
    x, out, scales, given, stride, LARGEST: tl.constexpr, LEAST: tl.constexpr, GIVEN: tl.constexpr,
    WIDTH: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, POWER)
    inside = element < WIDTH
    values = tl.load(x + row * stride + element, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(given) if GIVEN else tl.maximum(tl.max(tl.abs(values), 0) / LARGEST, LEAST)
    rounded = tl.clamp(values / scale, -LARGEST, LARGEST).to(tl.float8e4nv)
    tl.store(out + row * WIDTH + element, rounded, mask=inside)
    tl.store(scales + row, scale)


def quantise_rows(x: torch.Tensor, given: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 ``[T, width]`` and float32 scales ``[T, 1]`` of ``x [T, width]``, dense in its last axis: each row's own, or
    the ``given`` one [1] for all."""
    rows, width = x.shape
    assert x.stride(1) == 1
    out = torch.empty((rows, width), dtype=E4M3, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    power = triton.next_power_of_2(width)
    _quantise_kernel[(rows,)](
        x, out, scales, scales if given is None else given, x.stride(0), LARGEST=LARGEST, LEAST=LEAST_SCALE,
        GIVEN=given is not None, WIDTH=width, POWER=power, num_warps=min(16, max(4, power // 1024)),
    )  # fmt: skip
    return out, scales
