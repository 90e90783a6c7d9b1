"""The sizes to which a step on a GPU is padded: prompt tokens and decode rows. One CUDA graph is captured for each."""

import bisect
from typing import NamedTuple

from tidegate.slo.latency import Padding

MAX_SLICES = 16  # prompts in one step
# Matrix products on an H200 take as long as for the next multiple of 128 rows, and on 448 rows longer than on 512.
TOKEN_STEPS = (32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048, 2304, 2560)
PREFILL_STEPS = TOKEN_STEPS[: TOKEN_STEPS.index(2048) + 1]
DECODE_STEPS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
PADDING = Padding(TOKEN_STEPS, rows=16)  # of hybrid steps


class StepShape(NamedTuple):
    prefill_tokens: int
    decodes: int

    @property
    def hybrid(self) -> bool:
        return bool(self.prefill_tokens and self.decodes)


class Scratch(NamedTuple):
    """What padding uses: a block and a slot that the core never gives away."""

    block: int
    slot: int


def shape_for(prefill_tokens: int, decodes: int) -> StepShape:
    """The smallest that holds a step."""
    if prefill_tokens and decodes:
        rows = PADDING.padded_rows(decodes)
        return StepShape(_at_least(TOKEN_STEPS, prefill_tokens + rows) - rows, rows)
    return StepShape(_at_least(PREFILL_STEPS, prefill_tokens), _at_least(DECODE_STEPS, decodes))


def held_by(shape: StepShape) -> tuple[tuple[int, int], tuple[int, int]]:
    """The prompt tokens and the decode rows (each from, to) of batches that a hybrid shape is the smallest for."""
    step = TOKEN_STEPS.index(shape.prefill_tokens + shape.decodes)
    smaller = TOKEN_STEPS[step - 1] - shape.decodes if step else 0
    return (max(0, smaller) + 1, shape.prefill_tokens), PADDING.held_by(shape.decodes)


def ladder(prefill: bool, decode: bool, max_prefill_tokens: int, max_decodes: int) -> list[StepShape]:
    """Every shape that steps of a lane can have, by the phases that it runs; hybrid ones where it runs both."""
    prefills = [StepShape(n, 0) for n in _up_to(PREFILL_STEPS, max_prefill_tokens)] if prefill else []
    decodes = [StepShape(0, n) for n in _up_to(DECODE_STEPS, max_decodes)] if decode else []
    hybrids = [
        StepShape(n - rows, rows)
        for rows in sorted({PADDING.padded_rows(count) for count in range(1, max_decodes + 1)})
        for n in _up_to(TOKEN_STEPS, max_prefill_tokens + rows)
        if prefill and decode and n > rows
    ]
    return decodes + prefills + hybrids


def _at_least(steps: tuple[int, ...], count: int) -> int:
    """The smallest step that holds ``count``; 0 for none."""
    return steps[bisect.bisect_left(steps, count)] if count else 0


def _up_to(steps: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The steps that batches of up to ``most`` are padded to."""
    return steps[: bisect.bisect_left(steps, most) + 1]
