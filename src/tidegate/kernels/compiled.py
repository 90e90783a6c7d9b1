"""Kernels for the CPU that are written in Python, compiled by numba, and run on torch's own OpenMP threads.

A kernel takes one argument, its words: 64-bit integers, most of them addresses. Every thread of a team runs it and does
the share of the work that ``share_of`` names. The team is torch's, not a second one: so the number of threads stays
equal to the lane's share of the cores, and a kernel starts on threads that may still be awake from the product before.

Addresses instead of numba's arrays: without bounds and negative indices loops vectorise, and without unboxing a call
costs about two microseconds. Kernels are compiled when they are defined; numba keeps the code on disk.
"""

import ctypes
import struct
from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

Words = Any  # inside a kernel: indexed by number, each item a 64-bit integer
Function = Callable[..., Any]

_SERIAL_ELEMENTS = 1 << 15  # with less to do, waking a thread takes longer than the work
_Arguments = ctypes.c_int64 * 20  # as many as any kernel takes


def _exported(name: str) -> int:
    """The address of a function of torch's OpenMP library, 0 if that is not GNU's."""
    function = getattr(ctypes.CDLL(None), name, None)
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function else 0


_PARALLEL, _THREAD, _TEAM = map(_exported, ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"))
_HAS_TEAM = bool(_PARALLEL and _THREAD and _TEAM)  # without it, kernels run on the calling thread
_run_on_team = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(_PARALLEL)
_first_thread, _one_thread = cfunc(types.int32())(lambda: 0), cfunc(types.int32())(lambda: 1)
llvm.add_symbol("tidegate_thread", _THREAD if _HAS_TEAM else _first_thread.address)
llvm.add_symbol("tidegate_team", _TEAM if _HAS_TEAM else _one_thread.address)
_thread: Function = types.ExternalFunction("tidegate_thread", types.int32())
_team: Function = types.ExternalFunction("tidegate_team", types.int32())


def _pointer_type(element: Any) -> Any:
    return types.CPointer(element)  # type: ignore[no-untyped-call]


def _compile(function: Function, cache: bool) -> Any:
    signature = types.void(_pointer_type(types.int64))
    return cfunc(signature, cache=cache, fastmath=True, error_model="numpy")(function)


class Kernel:
    """``kernel(work, *words)`` runs it over ``work`` elements: on all of torch's threads, or on this one if few."""

    def __init__(self, function: Function) -> None:
        try:
            compiled = _compile(function, cache=True)
        except RuntimeError:  # numba found no directory that it may write to
            compiled = _compile(function, cache=False)
        self._compiled = compiled  # owns the code
        self._address: int = compiled.address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, work: int, *words: int) -> None:
        arguments = _Arguments(*words)
        threads = torch.get_num_threads() if _HAS_TEAM and work >= _SERIAL_ELEMENTS else 1
        if threads == 1:
            self._alone(arguments)
        else:
            _run_on_team(self._address, arguments, threads, 0)


def word(value: float) -> int:
    """A float32 as a kernel's word, to be read there with ``as_float``."""
    return cast(int, struct.unpack("<i", struct.pack("<f", value))[0])


# ---- inside kernels

inlined = cast(Callable[[Function], Function], njit(inline="always", fastmath=True, error_model="numpy"))
_intrinsic = cast(Callable[[Function], Function], intrinsic)


def _pointer_to(element: Any, llvm_element: ir.Type) -> Function:
    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], llvm_element.as_pointer())

        return _pointer_type(element)(types.int64), generate

    return _intrinsic(pointer)


floats = _pointer_to(types.float32, ir.FloatType())
int32s = _pointer_to(types.int32, ir.IntType(32))
int64s = _pointer_to(types.int64, ir.IntType(64))


@_intrinsic
def as_float(context: Any, bits: Any) -> Any:
    """The float32 whose bits are those of an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@inlined
def share_of(count: Any) -> Any:
    """The first of ``count`` items that are this thread's, and the first that are the next thread's."""
    thread, team = np.int64(_thread()), np.int64(_team())
    return count * thread // team, count * (thread + 1) // team


@inlined
def thread_number() -> Any:
    """Which of its team's threads this is, from 0."""
    return np.int64(_thread())


_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_HALF, _ONE, _LEAST = np.float32(0.5), np.float32(1.0), np.float32(-87.0)
_P5, _P4, _P3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P2, _P1, _P0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_MOST, _BIAS, _MANTISSA_BITS = np.float32(88.0), np.int32(127), np.int32(23)


@inlined
def exp(x: Any) -> Any:
    """e**x in float32, to about 1e-7 of it, for x clamped to [-87, 88]. Unlike the C library's it vectorises.

    2**n times a polynomial of what remains of x, with the coefficients of Cephes' expf.
    """
    x = min(max(x, _LEAST), _MOST)
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
    return (p * r * r + r + _ONE) * as_float((np.int32(n) + _BIAS) << _MANTISSA_BITS)
