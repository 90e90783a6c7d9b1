"""Sizes of hybrid steps: the fastest within a limit, and the two that prefill most while steps keep a mean."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.slo.chunks import Chunk, average, fastest

# As on an H200 with a hundred requests decoding: 640 and 768 fill it worse than 512 and 1024.
SECONDS, TOKENS = (0.0122, 0.0183, 0.0216, 0.0238, 0.0278, 0.0329), (0, 404, 532, 660, 916, 1172)
CHUNKS = [Chunk(*pair) for pair in zip(SECONDS, TOKENS, strict=True)]
ladders = st.lists(st.tuples(st.floats(1e-4, 0.02), st.integers(1, 300)), min_size=1, max_size=12).map(
    lambda steps: [Chunk(s, t) for s, t in itertools.accumulate(steps, lambda a, b: (a[0] + b[0], a[1] + b[1]))]
)


def test_within_a_limit_the_fastest_is_not_always_the_largest():
    chunks = [Chunk(0.010, 300), Chunk(0.020, 800), Chunk(0.022, 810)]
    assert fastest(chunks, 0.025) == chunks[1]
    assert fastest(chunks, 0.015) == chunks[0]
    assert fastest(chunks, 0.005) is None


def test_of_steps_with_many_decodes_a_shorter_one_may_do_more_work():
    assert fastest(CHUNKS, 0.024) == CHUNKS[3]
    assert fastest(CHUNKS, 0.024, decodes=800) == CHUNKS[1], "more decodes are done in a second"
    alone = [Chunk(0.010, 0), Chunk(0.020, 10)]
    assert fastest(alone, 0.025, decodes=1000) == alone[1], "prompts go on all the same"
    assert fastest(alone, 0.015, decodes=1000) == alone[0]


def test_two_sizes_in_turns_do_better_than_one_in_between():
    mix = average(CHUNKS, 0.0245)
    assert (mix.short.tokens, mix.long.tokens) == (404, 916)
    assert mix.tokens_per_s > 1.05 * fastest(CHUNKS, 0.0245).tokens / 0.0245


def test_where_everything_takes_less_than_the_mean_the_largest_is_taken_always():
    mix = average(CHUNKS, 0.05)
    assert mix.short == mix.long == CHUNKS[-1]
    assert mix.tokens_per_s == pytest.approx(1172 / 0.0329)
    assert average(CHUNKS, 0.01) is None, "decode alone takes longer"


@given(ladders, st.floats(1e-3, 0.2))
def test_no_mix_of_two_sizes_prefills_more(chunks, mean_s):
    mix = average(chunks, mean_s)
    if mix is None:
        assert all(chunk.seconds > mean_s for chunk in chunks)
        return
    assert mix.short.seconds <= mean_s
    for low, high in itertools.product(chunks, repeat=2):
        if low.seconds <= mean_s < high.seconds:
            part = (mean_s - low.seconds) / (high.seconds - low.seconds)
            tokens = low.tokens + part * (high.tokens - low.tokens)
            assert tokens / mean_s <= mix.tokens_per_s * 1.0001
