"""Steps are padded to shapes of a ladder, all of which are captured before a lane serves."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate.runner.shapes import DECODE_STEPS, PREFILL_STEPS, held_by, ladder, shape_for

tokens, decodes = st.integers(0, PREFILL_STEPS[-1]), st.integers(0, DECODE_STEPS[-1])


@given(tokens, decodes)
def test_a_shape_holds_its_step_and_has_no_phase_that_the_step_has_not(prefill, decode):
    shape = shape_for(prefill, decode)
    assert shape.prefill_tokens >= prefill and shape.decodes >= decode
    assert bool(shape.prefill_tokens) == bool(prefill) and bool(shape.decodes) == bool(decode)


@given(st.integers(1, PREFILL_STEPS[-1]), st.integers(1, DECODE_STEPS[-1]), st.data())
def test_a_lanes_ladder_has_the_shape_of_every_step_that_it_may_be_given(budget, seqs, data):
    prefill, decode = data.draw(st.integers(0, budget)), data.draw(st.integers(0, seqs))
    runs_prefill, runs_decode = data.draw(st.booleans()) or prefill > 0, data.draw(st.booleans()) or decode > 0
    if prefill or decode:
        assert shape_for(prefill, decode) in ladder(runs_prefill, runs_decode, budget, seqs)


@given(st.integers(1, PREFILL_STEPS[-1]), st.integers(1, DECODE_STEPS[-1]), st.integers(1, 2048), st.integers(1, 512))
def test_a_hybrid_shape_is_that_of_the_batches_that_it_says_it_holds(prefill, decode, other_prefill, other_decode):
    shape = shape_for(prefill, decode)
    (least, most), (fewest, rows) = held_by(shape)
    assert least <= prefill <= most and fewest <= decode <= rows
    held = least <= other_prefill <= most and fewest <= other_decode <= rows
    assert held == (shape_for(other_prefill, other_decode) == shape)
