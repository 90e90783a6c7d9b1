"""Writes a step's keys and values to their places in the paged array."""

import torch
import triton
import triton.language as tl

from tidegate.kernels.fp8 import E4M3, LARGEST


@triton.jit
def _write_kv_kernel(
    k, v, k_cache, v_cache, places, k_stride, v_stride, k_scale, v_scale, WIDTH: tl.constexpr, POWER: tl.constexpr,
    SATURATE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    element = tl.arange(0, POWER)
    inside = element < WIDTH
    key = tl.load(k + token * k_stride + element, mask=inside)
    value = tl.load(v + token * v_stride + element, mask=inside)
    if SATURATE:
        key = tl.clamp(key.to(tl.float32) / k_scale, -LARGEST, LARGEST)
        value = tl.clamp(value.to(tl.float32) / v_scale, -LARGEST, LARGEST)
    tl.store(k_cache + place * WIDTH + element, key.to(k_cache.dtype.element_ty), mask=inside)
    tl.store(v_cache + place * WIDTH + element, value.to(v_cache.dtype.element_ty), mask=inside)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    places: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """``k, v [T, Hkv, D]`` (dense in the last two axes) to token places ``int32 [T]`` of caches
    ``[num_blocks, block_size, Hkv, D]``; place = block * block_size + offset. Caches in e4m3 hold k and v over their
    ``scales``, saturated."""
    width = k.shape[1] * k.shape[2]
    _write_kv_kernel[(k.shape[0],)](
        k, v, k_cache, v_cache, places, k.stride(0), v.stride(0), *scales, WIDTH=width,
        POWER=triton.next_power_of_2(width), SATURATE=k_cache.dtype == E4M3, LARGEST=LARGEST,
    )  # fmt: skip


@triton.jit
def _write_vectors_kernel(vectors, cache, places, stride, WIDTH: tl.constexpr, POWER: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    element = tl.arange(0, POWER)
    inside = element < WIDTH
    vector = tl.load(vectors + token * stride + element, mask=inside)
    tl.store(cache + place * WIDTH + element, vector.to(cache.dtype.element_ty), mask=inside)


def write_vectors(vectors: torch.Tensor, cache: torch.Tensor, places: torch.Tensor) -> None:
    """``vectors [T, 1, D]`` (dense in the last axis) to token places ``int32 [T]`` of a cache
    ``[num_blocks, block_size, 1, D]``; place = block * block_size + offset."""
    width = vectors.shape[2]
    _write_vectors_kernel[(vectors.shape[0],)](
        vectors, cache, places, vectors.stride(0), WIDTH=width, POWER=triton.next_power_of_2(width)
    )
