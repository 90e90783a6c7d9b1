"""The largest slice for a time is the largest: one token more would take longer."""

import hypothesis.strategies as st
from hypothesis import given

from tidegate.slo.latency import Costs, Work

ROUNDING = 1e-9


@st.composite
def rising_costs(draw):
    steps = draw(st.lists(st.tuples(st.integers(1, 500), st.floats(1e-5, 1e-2)), min_size=2, max_size=6))
    tokens, dense_s, at, seconds = [], [], 0, 0.0
    for step, more_s in steps:
        at, seconds = at + step, seconds + more_s
        tokens.append(at)
        dense_s.append(seconds)
    coefficient = st.sampled_from([0.0, 1e-10, 1e-8, 1e-6])
    return Costs(tuple(tokens), tuple(dense_s), draw(coefficient), draw(coefficient), draw(coefficient))


works = st.builds(
    Work,
    new=st.integers(0, 50),
    pairs=st.floats(0, 1e4),
    reused=st.integers(0, 1000),
    rows=st.integers(0, 300),
    context=st.integers(0, 100_000),
)


@given(rising_costs(), works, st.integers(0, 5000), st.integers(1, 4000), st.floats(0.0, 0.1), st.integers(1, 64))
def test_the_most_new_tokens_fit_and_another_quantum_of_them_would_not(costs, work, start, most, seconds, quantum):
    found = costs.most_new(work, start, most, seconds, quantum)
    assert found == most or (found % quantum == 0 and found < most)
    if found:
        assert costs.seconds(work.and_slice(start, found)) <= seconds + ROUNDING
    if found < most:
        more = min(most, found + quantum)
        assert costs.seconds(work.and_slice(start, more)) >= seconds - ROUNDING
