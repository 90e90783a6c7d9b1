"""Which of the sizes that hybrid steps are padded to. Larger ones prefill more in a second, but not evenly so: some
fill the device better than their neighbours.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    seconds: float  # that a step with it takes
    tokens: int  # of prompts; 0: decode alone


class Turns(NamedTuple):
    """Steps with one chunk and steps of decode alone, in turns."""

    chunk: Chunk
    tokens_per_s: float


def fastest(chunks: Sequence[Chunk], limit_s: float, decodes: float = 0.0) -> Chunk | None:
    """The most prompt tokens a second, of those that take at most ``limit_s``; None if all take longer.

    ``decodes``: prompt tokens to which the decodes of each step amount; they count too. But decode alone is taken only
    where nothing else fits.
    """
    within = [chunk for chunk in chunks if chunk.seconds <= limit_s]
    with_prompts = [chunk for chunk in within if chunk.tokens] or within
    return max(with_prompts, key=lambda chunk: ((chunk.tokens + decodes) / chunk.seconds, chunk.tokens), default=None)


def in_turns(chunks: Sequence[Chunk], mean_s: float) -> Turns | None:
    """How to prefill most with one chunk, while steps take at most ``mean_s`` on average.

    ``chunks`` ascend, decode alone is the first. None if that takes longer than the mean, or is all there is.
    """
    alone, *others = chunks
    if alone.seconds > mean_s or not others:
        return None
    turns = (Turns(chunk, _tokens_per_s(alone, chunk, mean_s)) for chunk in others)
    return max(turns, key=lambda each: (each.tokens_per_s, each.chunk.tokens))


def part_of_steps(short_s: float, long_s: float, mean_s: float) -> float:
    """That may take ``long_s``, if the others take ``short_s``, for all of them to take ``mean_s`` on average."""
    return (mean_s - short_s) / (long_s - short_s)


def _tokens_per_s(alone: Chunk, chunk: Chunk, mean_s: float) -> float:
    """Of as many steps with the chunk among those without as the mean allows."""
    if chunk.seconds <= max(mean_s, alone.seconds):
        return chunk.tokens / chunk.seconds
    return part_of_steps(alone.seconds, chunk.seconds, mean_s) * chunk.tokens / mean_s
