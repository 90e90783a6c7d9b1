"""The latency model: what it predicts, what fits into a time, and that it is found again in measurements."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.slo.latency import Costs, Division, LatencyModel, Padding, Sample, Work, fit, relative_errors

COSTS = Costs((64, 256, 1024, 4096), (0.005, 0.006, 0.02, 0.08), 2e-10, 1e-8, 3e-8, row_s=1e-5, hybrid_s=5e-4)
works = st.builds(
    Work, st.just(0), st.just(0.0), st.just(0), st.integers(0, 256), st.integers(0, 200_000)
)  # of decode rows


def times(costs, factor):
    return Costs(
        costs.tokens,
        tuple(s * factor for s in costs.dense_s),
        costs.pair_s * factor,
        costs.reused_s * factor,
        costs.context_s * factor,
        row_s=costs.row_s * factor,
        hybrid_s=costs.hybrid_s * factor,
    )


def test_decodes_amount_to_the_prompt_tokens_that_take_as_long_in_a_large_batch():
    crowd = Work(new=1024 - 40, rows=40, context=40 * 500)
    alone = COSTS.seconds(crowd._replace(rows=0, context=0.0)) + COSTS.hybrid_s
    amount = COSTS.in_prompt_tokens(crowd._replace(new=0), 1024)
    assert amount * COSTS.dense(1024) / 1024 == pytest.approx(COSTS.seconds(crowd) - alone, rel=0.05)


def test_a_batch_takes_its_dense_work_and_its_attention():
    work = Work(rows=56, context=100_000).and_slice(1000, 200)
    assert work.pairs == 200 * 1100 and work.reused == 1000
    attention = 2e-10 * 220_000 + 1e-8 * 1000 + 3e-8 * 100_000 + 56 * 1e-5
    assert COSTS.seconds(work) == pytest.approx(0.006 + attention + 5e-4)
    assert COSTS.seconds(Work(rows=56, context=100_000)) == pytest.approx(0.005 + 3e-3 + 56e-5), "nothing hybrid in it"


def test_dense_work_is_linear_between_known_points_constant_below_and_goes_on_above():
    assert COSTS.dense(1) == COSTS.dense(64) == 0.005
    assert COSTS.dense(640) == pytest.approx(0.013)
    assert COSTS.dense(8192) == pytest.approx(0.08 + 4096 * 0.06 / 3072)


def test_above_the_largest_known_size_a_token_takes_no_longer_than_its_tokens_do_on_average():
    """Though a size that is hardly smaller may have taken much less, where the device was disturbed."""
    disturbed = Costs((96, 127, 128), (0.031, 0.043, 0.070), 0.0, 0.0, 0.0)
    assert disturbed.dense(512) == pytest.approx(0.070 * 4)


def test_padded_batches_take_as_long_as_the_next_size():
    padded = Costs((64, 256, 1024), (0.005, 0.006, 0.02), 0.0, 0.0, 0.0, Padding((64, 256, 1024), rows=16))
    assert padded.dense(65) == padded.dense(256) == 0.006
    assert padded.seconds(Work(rows=49)) == 0.005 and padded.seconds(Work(rows=65)) == 0.006


@given(works, st.integers(0, 8000), st.integers(1, 4096), st.floats(0.001, 0.2), st.sampled_from([1, 16, 64]))
def test_the_most_new_tokens_are_the_largest_multiple_that_fits(work, start, most, seconds, quantum):
    tokens = COSTS.most_new(work, start, most, seconds, quantum)
    assert 0 <= tokens <= most and (tokens == most or tokens % quantum == 0)
    if tokens:
        assert COSTS.seconds(work.and_slice(start, tokens)) <= seconds
    if tokens < most:
        more = min(most, tokens + quantum)
        assert COSTS.seconds(work.and_slice(start, more)) > seconds


@given(works, st.integers(0, 8000), st.floats(0.001, 0.2), st.floats(1.0, 2.0))
def test_more_time_fits_no_fewer_tokens_and_more_decoding_no_more(work, start, seconds, factor):
    fits = COSTS.most_new(work, start, 4096, seconds, 16)
    assert COSTS.most_new(work, start, 4096, seconds * factor, 16) >= fits
    busier = work._replace(rows=work.rows + 64, context=work.context + 64_000)
    assert COSTS.most_new(busier, start, 4096, seconds, 16) <= fits


def test_running_beside_the_other_lane_slows_each_by_its_own_factor():
    model = LatencyModel(COSTS, (Division(0.5, times(COSTS, 2.0), times(COSTS, 1.5), 1.3, 1.2),))
    work, whole = Work(rows=64, context=64_000), COSTS.seconds(Work(rows=64, context=64_000))
    assert model.seconds(work, "D", 0.5, beside=True) == pytest.approx(whole * 1.5 * 1.2)
    assert model.seconds(work, "P", 0.5, beside=False) == pytest.approx(whole * 2.0)
    assert model.seconds(work, "P", 1.0, beside=True) == whole, "who has the whole device shares it with nobody"


TRUTH = LatencyModel(
    COSTS,
    (
        Division(0.25, times(COSTS, 4.0), times(COSTS, 1.4), 1.1, 1.3),
        Division(0.5, times(COSTS, 2.0), times(COSTS, 2.0), 1.25, 1.2),
    ),
)


def measured(noise, seed=3):
    """A calibration: prompts and decodes of many sizes on every place, alone and beside each other."""
    rng, samples = random.Random(seed), []
    for lane, share in [("D", 1.0), ("P", 0.25), ("D", 0.75), ("P", 0.5), ("D", 0.5)]:
        for beside in (False, True) if share < 1.0 else (False,):
            for _ in range(150):
                work = Work()
                if lane == "P" or (share == 1.0 and rng.random() < 0.5):
                    work = work.and_slice(rng.choice([0, 0, 1000, 4000]), rng.choice([64, 256, 640, 1024, 2048, 4096]))
                if lane == "D" and (not work.new or rng.random() < 0.3):
                    rows = rng.choice([1, 16, 64, 128, 256])
                    work = work._replace(rows=rows, context=rows * rng.randint(100, 4000))
                seconds = TRUTH.seconds(work, lane, share, beside) * rng.lognormvariate(0.0, noise)
                samples.append(Sample(lane, share, beside, work, seconds))
    return samples


def test_a_fit_finds_the_costs_again_in_noisy_measurements():
    model = fit(measured(noise=0.03))
    assert [d.share for d in model.divisions] == [0.25, 0.5]
    exact = measured(noise=0.0, seed=4)
    assert max(relative_errors(model, exact)) < 0.05
    assert model.whole.context_s == pytest.approx(COSTS.context_s, rel=0.1)
    assert model.whole.row_s == pytest.approx(COSTS.row_s, rel=0.5)
    assert model.whole.hybrid_s == pytest.approx(COSTS.hybrid_s, rel=0.5)
    assert model.divisions[0].decode_slowdown == pytest.approx(1.3, rel=0.03)
    assert model.divisions[1].prefill_slowdown == pytest.approx(1.25, rel=0.03)


def test_sizes_that_are_fitted_to_lie_apart_and_end_with_the_largest():
    def tokens(*sizes):
        return fit([Sample("D", 1.0, False, Work(new=n), 0.001 * n + 0.005) for n in sizes]).whole.tokens

    assert tokens(16, 96, 100, 127, 128) == (16, 96, 128)
    assert tokens(16, 96, 127, 160) == (16, 96, 127, 160)
    assert tokens(127, 128) == (127, 128), "two at least"


def test_no_cost_is_ever_fitted_below_zero():
    for seed in range(5):
        model = fit(measured(noise=0.5, seed=seed))
        for costs in [model.whole, *(c for d in model.divisions for c in (d.prefill, d.decode))]:
            of_attention = (costs.pair_s, costs.reused_s, costs.context_s, costs.row_s, costs.hybrid_s)
            assert min(*costs.dense_s, *of_attention) >= 0.0
            assert list(costs.dense_s) == sorted(costs.dense_s), "more tokens never take less time"


def test_a_share_at_which_one_lane_was_not_measured_alone_is_no_division():
    samples = [s for s in measured(noise=0.0) if not (s.lane == "D" and s.share == 0.5)]
    assert [d.share for d in fit(samples).divisions] == [0.25]
    with pytest.raises(ValueError, match="nothing was measured"):
        fit([s for s in samples if s.share < 1.0])


def test_chunks_are_the_padded_sizes_that_a_batch_may_be_filled_up_to():
    padded = Costs((64, 256, 1024), (0.005, 0.006, 0.02), 2e-10, 1e-8, 3e-8, Padding((64, 256, 1024), 16), 1e-5, 5e-4)
    decode = Work(rows=49, context=10_000)
    chunks = padded.chunks(decode, start=1000, most=500)
    assert [tokens for _, tokens in chunks] == [256 - 64, 500], "64 tokens are the rows alone"
    for seconds, tokens in chunks:
        assert seconds == pytest.approx(padded.seconds(decode.and_slice(1000, tokens)))
    assert COSTS.chunks(decode, 0, 500) == [], "where nothing is padded, any size will do"
