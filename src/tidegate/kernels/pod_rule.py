"""Which hybrid batches' attention is faster in one kernel (POD) than in two, by measurements over a coarse grid.

One kernel hides the decodes' reads of KV behind the prompts' products. It has its price: its prompt part is
FlashInfer's FA2 kernel, where two kernels have FA3, which on Hopper is much the faster one. So it wins on some shapes
only.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import product
from typing import NamedTuple

from tidegate.base.batch import Batch

APART, POD = "apart", "pod"  # two kernels, one after the other; one for both
LEAST_GAIN = 0.03  # below it, what was measured may be noise
PROMPT_TILE, DECODE_TILE = 128, 16  # rows of FA2's tiles at most: query heads of a KV head times queries
RESULT_BYTES = 4  # an element of partial results


class HybridWork(NamedTuple):
    """What the time of a hybrid batch's attention depends on."""

    prompt_tokens: float
    start: float  # tokens of its prompt before a slice: the mean over prompt tokens
    rows: float  # that decode
    context: float  # tokens that a decoding row reads: the mean

    @classmethod
    def of(cls, batch: Batch) -> "HybridWork":
        new = batch.num_prefill_tokens
        start = sum(len(piece.tokens) * piece.start for piece in batch.slices) / new
        rows = len(batch.decode_slots)
        return cls(new, start, rows, sum(batch.decode_positions) / rows + 1)


class Axes(NamedTuple):
    """The values, in ascending order, at whose combinations a device is measured; they correspond to ``HybridWork``."""

    prompt_tokens: tuple[int, ...] = (128, 256, 512, 1024)
    start: tuple[int, ...] = (0, 4096)
    rows: tuple[int, ...] = (1, 16, 64, 128)
    context: tuple[int, ...] = (1024, 4096)

    def points(self) -> list[HybridWork]:
        return [HybridWork(*point) for point in product(*self)]


AXES = Axes()


class PodRule:
    """Between the points of the grid the gain is interpolated, linearly in ``start`` and in the logarithm of all else;
    outside, it is taken to be that at the border. Batches with more prompt tokens than were measured run apart."""

    def __init__(self, seconds: Mapping[HybridWork, tuple[float, float]], axes: Axes = AXES) -> None:
        """``seconds``: what attention of one layer takes (apart, as POD) at each of the axes' points."""
        self._axes = axes
        self._gains = {work: math.log(apart / pod) for work, (apart, pod) in seconds.items()}
        self._least = math.log1p(LEAST_GAIN)

    def gain(self, work: HybridWork) -> float:
        """The logarithm of the time apart relative to that as POD."""
        sides = [_between(knots, value, i == 1) for i, (knots, value) in enumerate(zip(self._axes, work, strict=True))]
        return sum(
            math.prod(weight for _, weight in corner) * self._gains[HybridWork(*(knot for knot, _ in corner))]
            for corner in product(*sides)
        )

    def wins(self, work: HybridWork) -> bool:
        return work.prompt_tokens <= self._axes.prompt_tokens[-1] and self.gain(work) > self._least

    def may_win(self, prompt_tokens: tuple[int, int], rows: tuple[int, int]) -> bool:
        """Whether it wins for some batch with so many (from, to), at whatever starts and contexts."""
        axes = self._axes
        least, most = prompt_tokens[0], min(prompt_tokens[1], axes.prompt_tokens[-1])
        if least > most:
            return False
        # The gain is linear in each coordinate between knots, so that its maximum lies at an end or a knot.
        corners = product(_within(axes.prompt_tokens, least, most), axes.start, _within(axes.rows, *rows), axes.context)
        return any(self.gain(HybridWork(*corner)) > self._least for corner in corners)

    def __str__(self) -> str:
        won = [gain for gain in self._gains.values() if gain > self._least]
        best = f", at best {math.exp(max(won)):.2f} times as fast as two" if won else ""
        return f"one kernel wins on {len(won)} of {len(self._gains)} shapes{best}"


def partial_bytes(heads: int, kv_heads: int, head_dim: int, tokens: int, rows: int, tile: int, sms: int) -> int:
    """What FlashInfer's FA2 scheduler needs for partial results of ``tokens`` queries of ``rows`` sequences, at most,
    where a graph is to hold them (``PrefillPlan`` in its scheduler.cuh): an output and a sum for each row of each tile
    of its padded grid."""
    tiles = -(-tokens * (heads // kv_heads) // tile) + rows - 1
    padded = max(2 * sms // kv_heads, tiles)
    return padded * tile * heads * (head_dim + 1) * RESULT_BYTES


def _between(knots: tuple[int, ...], value: float, linear: bool) -> list[tuple[int, float]]:
    """The knots next to a value, with their weights."""
    if value <= knots[0]:
        return [(knots[0], 1.0)]
    if value >= knots[-1]:
        return [(knots[-1], 1.0)]
    above = next(i for i, knot in enumerate(knots) if knot > value)
    low, high = knots[above - 1], knots[above]
    part = (value - low) / (high - low) if linear else math.log(value / low) / math.log(high / low)
    return [(low, 1.0 - part), (high, part)]


def _within(knots: tuple[int, ...], least: int, most: int) -> Iterable[int]:
    return [least, *(knot for knot in knots if least < knot < most), most]
