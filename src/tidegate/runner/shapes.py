"""The sizes to which a step on a GPU is padded: prompt tokens and decode rows. One CUDA graph is captured for each."""

import bisect
from typing import NamedTuple

MAX_SLICES = 16  # prompts in one step
PREFILL_STEPS = (64, *range(128, 2049, 128))
DECODE_STEPS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
HYBRID_PREFILL_STEPS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
HYBRID_DECODE_STEPS = (16, 32, 64, 96, 128, 192, 256)


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
        return StepShape(_at_least(HYBRID_PREFILL_STEPS, prefill_tokens), _at_least(HYBRID_DECODE_STEPS, decodes))
    return StepShape(_at_least(PREFILL_STEPS, prefill_tokens), _at_least(DECODE_STEPS, decodes))


def ladder(prefill: bool, decode: bool, max_prefill_tokens: int, max_decodes: int) -> list[StepShape]:
    """Every shape that steps of a lane can have, by the phases that it runs; hybrid ones where it runs both."""
    prefills = [StepShape(n, 0) for n in _up_to(PREFILL_STEPS, max_prefill_tokens)] if prefill else []
    decodes = [StepShape(0, n) for n in _up_to(DECODE_STEPS, max_decodes)] if decode else []
    hybrids = [
        StepShape(n, d)
        for n in _up_to(HYBRID_PREFILL_STEPS, max_prefill_tokens)
        for d in _up_to(HYBRID_DECODE_STEPS, max_decodes)
        if prefill and decode
    ]
    return decodes + prefills + hybrids


def _at_least(steps: tuple[int, ...], count: int) -> int:
    """The smallest step that holds ``count``; 0 for none."""
    return steps[bisect.bisect_left(steps, count)] if count else 0


def _up_to(steps: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The steps that batches of up to ``most`` are padded to."""
    return steps[: bisect.bisect_left(steps, most) + 1]
