"""Which of the sizes that hybrid steps are padded to. Larger ones prefill more in a second, but not evenly so: some
fill the device better than their neighbours. So where steps have to keep a mean, two sizes in turns can be better than
one that takes as long as the mean.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    seconds: float  # that a step with it takes
    tokens: int  # of prompts; 0: decode alone


class Average(NamedTuple):
    """The two sizes whose mix prefills most while steps take ``seconds`` on average; equal where one is enough."""

    short: Chunk
    long: Chunk
    tokens_per_s: float


def fastest(chunks: Sequence[Chunk], limit_s: float, decodes: float = 0.0) -> Chunk | None:
    """The most prompt tokens a second, of those that take at most ``limit_s``; None if all take longer.

    ``decodes``: prompt tokens to which the decodes of each step amount; they count too. But decode alone is taken only
    where nothing else fits.
    """
    within = [chunk for chunk in chunks if chunk.seconds <= limit_s]
    with_prompts = [chunk for chunk in within if chunk.tokens] or within
    return max(with_prompts, key=lambda chunk: ((chunk.tokens + decodes) / chunk.seconds, chunk.tokens), default=None)


def average(chunks: Sequence[Chunk], mean_s: float) -> Average | None:
    """``chunks`` ascend. None if all take longer than ``mean_s``.

    The mix lies on the upper hull of tokens over seconds, between the corners to the left and to the right of the mean.
    """
    hull: list[Chunk] = []
    for chunk in chunks:
        if hull and chunk.tokens <= hull[-1].tokens:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], chunk):
            hull.pop()
        hull.append(chunk)
    short = next((chunk for chunk in reversed(hull) if chunk.seconds <= mean_s), None)
    if short is None:
        return None
    long = next((chunk for chunk in hull if chunk.seconds > mean_s), None)
    if long is None:
        return Average(short, short, short.tokens / short.seconds)
    tokens = short.tokens + _slope(short, long) * (mean_s - short.seconds)
    return Average(short, long, tokens / mean_s)


def _slope(low: Chunk, high: Chunk) -> float:
    """Tokens for each second more; ``high`` has more tokens, and takes no less time."""
    return (high.tokens - low.tokens) / max(high.seconds - low.seconds, 1e-9)
