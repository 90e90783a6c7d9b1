"""Small matrix products inside kernels that numba compiles for the CPU: sums stay in vector registers."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tidegate.kernels.compiled import Function

_LINE_BYTES = 64  # of a cache line
_LANES = 16 if llvm.get_host_cpu_features().get("avx512f") else 8  # floats in a register; there are 32 of them, or 16
ROWS_AT_ONCE = 8 if _LANES == 16 else 6  # each with two registers of sums: as many as fit besides what is added
_WORD, _FLOAT, _INDEX = ir.IntType(64), ir.FloatType(), ir.IntType(32)


@cast(Callable[[Function], Function], intrinsic(prefer_literal=True))
def multiply_add(
    context: Any, rows: Any, terms: Any, a: Any, a_row: Any, b: Any, b_row: Any, c: Any, c_row: Any, ahead: Any,
    width: Any, onto: Any,
) -> Any:  # fmt: skip
    """``c [rows, width] = a [rows, terms] @ b [terms, width]`` in float32, or ``+=`` where ``onto`` is 1.

    Matrices are given by their addresses and the bytes from one row to the next. 1 to ``ROWS_AT_ONCE`` rows, at least
    one term; ``width`` and ``onto`` are constants. ``ahead``: of a matrix like ``b`` that is brought into the cache
    meanwhile. Each element is a sum of its own in the order of the terms, so its value depends on its row of ``a`` and
    its column of ``b`` and on no other.
    """
    columns, adds = int(width.literal_value), bool(onto.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, matrices = arguments[0], arguments[1:9]
        after = builder.append_basic_block("multiplied")
        choice = builder.switch(rows, after)
        for count in range(1, ROWS_AT_ONCE + 1):
            block = builder.append_basic_block(f"rows{count}")
            choice.add_case(_WORD(count), block)
            builder.position_at_end(block)
            for first, size in _panels(columns):
                _panel(builder, count, first, size, adds, *matrices)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 9, width, onto), generate


def _panels(width: int) -> Iterator[tuple[int, int]]:
    """Where each panel of a row of ``width`` floats begins, and how wide it is."""
    first, panel = 0, 2 * _LANES
    while first < width:
        while panel > width - first:
            panel //= 2
        yield first, panel
        first += panel


def _panel(
    builder: Any, rows: int, first: int, size: int, adds: bool,
    terms: Any, a: Any, a_row: Any, b: Any, b_row: Any, c: Any, c_row: Any, ahead: Any,
) -> None:  # fmt: skip
    """The product's columns from ``first`` on, ``size`` of them."""
    vector = ir.VectorType(_FLOAT, size)
    to_all = ir.Constant(ir.VectorType(_INDEX, size), [0] * size)
    places = [_place(builder, c, c_row, _WORD(row), _WORD(first), vector) for row in range(rows)]
    zeros = ir.Constant(vector, [0.0] * size)
    begun = [builder.load(place, align=4) if adds else zeros for place in places]

    before, loop, done = builder.block, builder.append_basic_block("terms"), builder.append_basic_block("summed")
    builder.branch(loop)
    builder.position_at_end(loop)
    term = builder.phi(_WORD)
    sums = [builder.phi(vector) for _ in range(rows)]
    of_b = builder.load(_place(builder, b, b_row, term, _WORD(first), vector), align=4)
    for within in range(0, 4 * size, _LINE_BYTES):
        _prefetch(builder, _place(builder, ahead, b_row, term, _WORD(first + within // 4), ir.IntType(8)))
    following = []
    for row, total in enumerate(sums):
        number = builder.load(_place(builder, a, a_row, _WORD(row), term, _FLOAT))
        lone = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _INDEX(0))
        product = builder.fmul(builder.shuffle_vector(lone, lone, to_all), of_b, flags=("contract",))
        following.append(builder.fadd(total, product, flags=("contract",)))
    next_term = builder.add(term, _WORD(1))
    for phi, start, again in zip((term, *sums), (_WORD(0), *begun), (next_term, *following), strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(again, loop)
    builder.cbranch(builder.icmp_signed("<", next_term, terms), loop, done)

    builder.position_at_end(done)
    for place, total in zip(places, following, strict=True):
        builder.store(total, place, align=4)


def _place(builder: Any, matrix: Any, row_bytes: Any, row: Any, column: Any, kind: ir.Type) -> Any:
    offset = builder.add(builder.mul(row, row_bytes), builder.mul(column, _WORD(4)))
    return builder.inttoptr(builder.add(matrix, offset), kind.as_pointer())


def _prefetch(builder: Any, place: Any) -> None:
    """Begins to bring a cache line in. It may lie anywhere."""
    kind = ir.FunctionType(ir.VoidType(), [place.type, _INDEX, _INDEX, _INDEX])
    function = builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
    to_read, keep, data = _INDEX(0), _INDEX(3), _INDEX(1)
    builder.call(function, [place, to_read, keep, data])
