"""Sizes of hybrid steps: the fastest within a limit, and the best in turns with decode alone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.slo.chunks import Chunk, fastest, in_turns

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


def test_steps_without_prefill_make_up_for_the_chunk_that_prefills_most_in_what_it_adds():
    turns = in_turns(CHUNKS, 0.0150)
    assert turns.chunk == CHUNKS[1]
    part = (0.0150 - 0.0122) / (0.0183 - 0.0122)  # of the steps that have it
    assert turns.tokens_per_s == pytest.approx(part * 404 / 0.0150)


def test_a_chunk_that_takes_less_than_the_mean_is_taken_always():
    turns = in_turns(CHUNKS[:2], 0.05)
    assert turns.tokens_per_s == pytest.approx(404 / 0.0183)


def test_decode_that_takes_too_long_alone_is_not_made_up_for():
    assert in_turns(CHUNKS, 0.01) is None
    assert in_turns(CHUNKS[:1], 0.05) is None, "there is no chunk"


@given(ladders, st.floats(0.1, 1.0))
def test_no_other_chunk_in_turns_with_decode_alone_prefills_more(chunks, part):
    alone = chunks[0]._replace(tokens=0)
    chunks = [alone, *chunks[1:]]
    if len(chunks) > 1:
        mean_s = alone.seconds + part * (chunks[1].seconds - alone.seconds)
        best = in_turns(chunks, mean_s).tokens_per_s
        for chunk in chunks[1:]:
            steps = (mean_s - alone.seconds) / (chunk.seconds - alone.seconds)
            assert steps * chunk.tokens / mean_s <= best * 1.0001
