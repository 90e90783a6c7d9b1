"""What all compiled kernels are built from."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tidegate.kernels.compiled import Kernel, Words, as_float, exp, floats, int64s, share_of, word


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@Kernel
def _count(words: Words) -> None:
    counts = int64s(words[0])
    first, last = share_of(words[1])
    for i in range(first, last):
        counts[i] += 1


@Kernel
def _exp(words: Words) -> None:
    x = floats(words[0])
    for i in range(words[1]):
        x[i] = exp(x[i])


@Kernel
def _fill(words: Words) -> None:
    x = floats(words[0])
    for i in range(words[1]):
        x[i] = as_float(np.int32(words[2]))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("items", [0, 1, 2, 3, 1000])
@pytest.mark.parametrize("work", [1, 1 << 20])
def test_every_item_is_one_threads_whatever_their_number(number: int, items: int, work: int) -> None:
    torch.set_num_threads(number)
    counts = torch.zeros(1000, dtype=torch.int64)
    _count(work, counts.data_ptr(), items)
    assert counts.tolist() == [1] * items + [0] * (1000 - items)


def test_exp_is_right_to_a_few_units_in_the_last_place() -> None:
    x = torch.cat((torch.linspace(-87, 88, 100_001), torch.linspace(-1, 1, 100_001)))
    got = x.clone()
    _exp(1, got.data_ptr(), len(got))
    error = (got.double() / x.double().exp() - 1).abs()
    assert error.max() < 3e-7


def test_exp_of_what_lies_beyond_is_as_of_the_ends() -> None:
    x = torch.tensor([-1e30, -100.0, 1000.0])
    _exp(1, x.data_ptr(), 3)
    assert x[0] == x[1] and 0 < x[0] < 2e-38
    assert 1e38 < x[2] < torch.inf


def test_a_float_comes_through_as_a_word() -> None:
    for value in (0.0, -1.5, 1e-5, 3.4e38):
        x = torch.zeros(3)
        _fill(1, x.data_ptr(), 2, word(value))
        assert x.tolist() == [torch.tensor(value).item()] * 2 + [0.0]
