import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.runner.philox import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (np.array([int(word, 16)], dtype=np.uint64) for word in counter.split())
    k0, k1 = (np.array([int(word, 16)], dtype=np.uint64) for word in key.split())
    words = philox4x32((c0, c1, c2, c3), (k0, k1))
    assert [f"{int(word[0]):08x}" for word in words] == expected.split()


def chi_square(numbers: np.ndarray, bins: int) -> float:
    """Normalised so that it is near 0, and beyond 5 once in a million times, for uniform numbers."""
    counts = np.bincount((numbers * bins).astype(int), minlength=bins)
    expected = len(numbers) / bins
    return float((((counts - expected) ** 2 / expected).sum() - (bins - 1)) / np.sqrt(2 * (bins - 1)))


@pytest.mark.parametrize("along", ["positions of one request", "seeds at one position"])
def test_neighbouring_keys_give_numbers_that_are_uniform_and_unrelated(along: str) -> None:
    run, fixed = np.arange(200_000), np.full(200_000, 12345)
    seeds, positions = (fixed, run) if along == "positions of one request" else (run, fixed)
    numbers = uniforms(seeds.astype(np.uint64), positions)
    assert abs(chi_square(numbers, 1000)) < 5
    pairs = (np.floor(numbers[:-1] * 30) + numbers[1:]) / 30
    assert abs(chi_square(pairs, 900)) < 5
    assert len(np.unique(numbers)) == len(numbers)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 5))
def test_a_number_depends_on_its_own_seed_and_position_only(seed: int, position: int, others: int) -> None:
    alone = uniforms(np.array([seed], dtype=np.uint64), np.array([position]))
    crowd = uniforms(np.array([7] * others + [seed], dtype=np.uint64), np.array([3] * others + [position]))
    assert crowd[-1] == alone[0]
    assert 0 <= alone[0] < 1


def test_every_bit_of_seed_and_position_matters() -> None:
    seeds = np.array([0, *(1 << bit for bit in range(64))], dtype=np.uint64)
    assert len(np.unique(uniforms(seeds, np.zeros(65, dtype=np.int64)))) == 65
    positions = np.array([0, *(1 << bit for bit in range(63))], dtype=np.int64)
    assert len(np.unique(uniforms(np.zeros(64, dtype=np.uint64), positions))) == 64
