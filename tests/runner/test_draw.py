"""Temperature, min-p, top-k, top-p and the draw itself, against definitions written out row by row."""

import numpy as np
import pytest
import sampling_reference as reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tidegate.base.batch import SlotSetup
from tidegate.base.request import SamplingParams
from tidegate.runner.draw import draw, filtered, pick
from tidegate.runner.philox import uniforms
from tidegate.runner.sampling_table import Params, SamplingTable

VOCAB = 67


def gathered(sampling: list[SamplingParams], vocab_size: int = VOCAB) -> Params:
    table = SamplingTable(len(sampling), vocab_size)
    table.apply(SlotSetup(slot, 0, params) for slot, params in enumerate(sampling))
    return table.gather(list(range(len(sampling))))


def random_logits(seed: int, rows: int = 1, vocab_size: int = VOCAB, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def kept(logits: torch.Tensor, params: SamplingParams) -> list[bool]:
    return (filtered(logits[None], gathered([params], len(logits)))[0] > -torch.inf).tolist()


def draw_one(logits: list[float], params: SamplingParams, position: int = 0) -> int:
    return int(draw(torch.tensor([logits]), gathered([params], len(logits)), np.array([position])))


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.01, 0.3, 1.0, 1.7, 30.0]),
    top_p=st.just(1.0) | st.floats(0.01, 0.999),
    top_k=st.sampled_from([0, 1, 2, 5, 30, VOCAB, 1000]),
    min_p=st.just(0.0) | st.floats(1e-6, 1.0),
    seed=st.integers(0, 2**64 - 1),
)
seeds = st.integers(0, 2**31)


@given(seeds, st.lists(sampling_params, min_size=1, max_size=6), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_tokens_are_those_at_which_the_reference_cdf_passes_the_uniform_number(
    seed: int, sampling: list[SamplingParams], position: int
) -> None:
    logits = random_logits(seed, len(sampling))
    positions = np.arange(len(sampling)) + position
    tokens = draw(logits.clone(), gathered(sampling), positions).tolist()
    for row, params in enumerate(sampling):
        p = reference.probabilities(logits[row].double().numpy(), params)
        uniform = uniforms(np.array([params.seed], dtype=np.uint64), positions[row : row + 1])[0]
        below, upto = p[: tokens[row]].sum(), p[: tokens[row] + 1].sum()
        assert p[tokens[row]] > 0
        assert below - 1e-5 <= uniform <= upto + 1e-5


@given(seeds, st.integers(1, 2 * VOCAB))
@settings(deadline=None)
def test_top_k_keeps_what_transformers_keeps(seed: int, top_k: int) -> None:
    logits = random_logits(seed)[0]
    theirs = TopKLogitsWarper(top_k)(None, logits[None].clone())[0] > -torch.inf
    assert kept(logits, SamplingParams(temperature=1.0, top_k=top_k)) == theirs.tolist()


@given(seeds, st.floats(1e-6, 1.0))
@settings(deadline=None)
def test_top_p_keeps_what_transformers_keeps(seed: int, top_p: float) -> None:
    logits = random_logits(seed)[0]
    sums = logits.softmax(-1).sort(descending=True).values.cumsum(-1)
    assume(bool(((sums - top_p).abs() > 1e-5).all()))  # nearer than that, float32 sums may differ
    theirs = TopPLogitsWarper(top_p)(None, logits[None].clone())[0] > -torch.inf
    assert kept(logits, SamplingParams(temperature=1.0, top_p=top_p)) == theirs.tolist()


@given(seeds, st.floats(1e-6, 1.0))
@settings(deadline=None)
def test_min_p_keeps_what_transformers_keeps(seed: int, min_p: float) -> None:
    logits = random_logits(seed)[0]
    relative = logits.softmax(-1) / logits.softmax(-1).max()
    assume(bool(((relative / min_p - 1).abs() > 1e-5).all() or min_p == 1.0))
    theirs = MinPLogitsWarper(min_p)(None, logits[None].clone())[0] > -torch.inf
    assert kept(logits, SamplingParams(temperature=1.0, min_p=min_p)) == theirs.tolist()


@given(seeds, st.integers(1, 2 * VOCAB), st.floats(0.01, 0.99), st.floats(1e-4, 0.5), st.sampled_from([0.5, 1.0, 2.0]))
@settings(deadline=None)
def test_all_filters_together_keep_what_the_reference_keeps(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = random_logits(seed)[0]
    without = SamplingParams(temperature=temperature, top_k=top_k, min_p=min_p)
    sums = np.sort(reference.probabilities(logits.double().numpy(), without))[::-1].cumsum()
    assume(bool((np.abs(sums - top_p) > 1e-5).all()))
    params = SamplingParams(temperature=temperature, top_k=top_k, min_p=min_p, top_p=top_p)
    assert kept(logits, params) == (reference.probabilities(logits.double().numpy(), params) > 0).tolist()


def test_no_filter_keeps_every_token() -> None:
    logits = random_logits(1, spread=200.0)[0]
    assert all(kept(logits, SamplingParams(temperature=1.0, top_p=1.0, top_k=VOCAB)))
    assert all(kept(logits, SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)))


@pytest.mark.parametrize("params", [{"top_p": 1e-9}, {"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_strictest_filters_keep_exactly_the_best(params: dict[str, float]) -> None:
    logits = random_logits(2)[0]
    expected = [token == int(logits.argmax()) for token in range(VOCAB)]
    assert kept(logits, SamplingParams(temperature=1.0, **params)) == expected  # type: ignore[arg-type]


def test_tokens_tied_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0])
    assert kept(logits, SamplingParams(temperature=1.0, top_k=2)) == [True, False, True, True, True]
    assert kept(logits, SamplingParams(temperature=1.0, top_p=0.6)) == [True, False, True, True, True]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_a_tiny_temperature_picks_the_best_without_overflow(temperature: float, scale: float) -> None:
    logits = [-1.0 * scale, 3.0 * scale, 2.5 * scale, float("-inf")]
    tokens = {draw_one(logits, SamplingParams(temperature=temperature, seed=9), position) for position in range(50)}
    assert tokens == {1}


def test_a_huge_temperature_makes_all_tokens_equally_likely() -> None:
    tokens = [
        draw_one([0.0, 50.0, -50.0], SamplingParams(temperature=1e9, seed=3), position) for position in range(300)
    ]
    assert min(tokens.count(token) for token in range(3)) > 70


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_all_mass_on_one_token_gives_that_token(params: dict[str, float]) -> None:
    for best in (0, 3, 6):
        logits = [float("-inf")] * 7
        logits[best] = -2.0
        sampling = SamplingParams(temperature=1.0, **params)  # type: ignore[arg-type]
        assert {draw_one(logits, sampling, position) for position in range(50)} == {best}


def test_tokens_with_logit_minus_infinity_are_never_drawn() -> None:
    logits = [float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]
    tokens = {draw_one(logits, SamplingParams(temperature=5.0, seed=1), position) for position in range(200)}
    assert tokens == {1, 3}


@pytest.mark.parametrize("params", [{}, {"top_p": 0.5, "top_k": 3, "min_p": 0.1}])
@pytest.mark.parametrize("broken", [float("-inf"), float("nan")])
def test_rows_without_any_usable_logit_still_give_a_token_of_the_vocabulary(
    params: dict[str, float], broken: float
) -> None:
    sampling = SamplingParams(temperature=1.0, **params)  # type: ignore[arg-type]
    assert 0 <= draw_one([broken] * 7, sampling) < 7


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.249, 1), (0.25, 3), (0.999, 3), (1 - 2.0**-53, 3)])
@pytest.mark.parametrize("scale", [1, 3, 2**50 - 1])
def test_tokens_of_weight_zero_are_never_picked_at_either_end_of_a_range(
    uniform: float, token: int, scale: int
) -> None:
    weights = torch.tensor([[0, 1, 0, 3, 0, 0]], dtype=torch.float64) * scale
    assert pick(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.05}, {"temperature": 0.6}])
def test_frequencies_over_many_positions_follow_the_probabilities(params: dict[str, float]) -> None:
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 2024, **params})  # type: ignore[arg-type]
    logits, draws = random_logits(5, vocab_size=20, spread=1.5), 20_000
    table = SamplingTable(1, 20)
    table.apply([SlotSetup(0, 0, sampling)])
    tokens = draw(logits.expand(draws, -1).clone(), table.gather([0] * draws), np.arange(draws))
    counts = np.bincount(tokens.numpy(), minlength=20)
    p = reference.probabilities(logits[0].double().numpy(), sampling)
    possible = p > 0
    assert counts[~possible].sum() == 0
    freedom = possible.sum() - 1
    chi_square = ((counts - draws * p)[possible] ** 2 / (draws * p[possible])).sum()
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_a_large_vocabulary_is_covered_to_its_last_token() -> None:
    size, draws = 150_001, 40
    logits = torch.full((draws, size), -20.0)
    logits[:, -1] = 0.0  # has 0.9997 of the mass, behind 150,000 tiny terms
    table = SamplingTable(1, size)
    table.apply([SlotSetup(0, 0, SamplingParams(temperature=1.0))])
    assert (draw(logits, table.gather([0] * draws), np.arange(draws)) == size - 1).sum() >= draws - 1
    logits.zero_()
    tokens = draw(logits, table.gather([0] * draws), np.arange(draws))
    expected = np.floor(uniforms(np.zeros(draws, dtype=np.uint64), np.arange(draws)) * size)
    assert tokens.tolist() == expected.tolist()
