"""Int8 products: near the float ones, exact in their integers, and a row's result is nobody else's business."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tidegate.kernels.int8_linear import Int8Linear, activation_levels, quantise_rows, segments_of, take_spread_inputs


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def test_weights_are_rounded_to_the_nearest_of_255_levels_of_their_own_row() -> None:
    weight = torch.randn(50, 64) * torch.logspace(-3, 3, 50).unsqueeze(1)
    weight[7] = 0.0
    quantised, scale = quantise_rows(weight)
    assert quantised.abs().amax(1).tolist() == [0 if i == 7 else 127 for i in range(50)]
    assert ((quantised * scale.unsqueeze(1) - weight).abs() <= 0.5001 * scale.unsqueeze(1)).all()


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("shape", [(1, 1), (96, 64), (576, 1536)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_the_rounded_weight_and_the_rounded_input(
    rows: int, shape: tuple[int, int], with_bias: bool
) -> None:
    quantised, scale = quantise_rows(torch.randn(shape))
    bias = torch.randn(shape[0]) if with_bias else None
    x = torch.randn(rows, shape[1]) * torch.logspace(-4, 4, rows).unsqueeze(1)
    levels = activation_levels()
    most = x.abs().amax(1, keepdim=True)
    rounded = (x.double() / most * levels).round()
    expected = rounded @ quantised.double().T * scale * most / levels + (0 if bias is None else bias)
    got = Int8Linear(quantised, scale, bias)(x)
    # A value on the edge between two levels may fall to either: up to one level of one or two inputs.
    edge = 2 * 127 * scale * most / levels
    assert ((got - expected).abs() <= 1e-5 * expected.abs() + edge + 1e-5).all()
    assert (got - expected).abs().div(edge).median() < 1e-2


@pytest.mark.parametrize("width, segments", [(1, 1), (33, 1), (2, 2), (6, 2), (40, 8), (64, 32), (1536, 32)])
def test_spread_inputs_give_the_same_product_and_share_an_outlier_among_segments(width: int, segments: int) -> None:
    assert segments_of(width) == segments
    weight, x = torch.randn(96, width), torch.randn(5, width)
    turned = weight.clone()
    take_spread_inputs(turned)
    expected = x.double() @ weight.double().T
    spread = torch.eye(width // segments)
    while len(spread) < width:
        spread = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), spread)
    torch.testing.assert_close(x @ spread @ turned.T, expected.float(), rtol=1e-4, atol=1e-3)
    x[:, width // 2] = 100.0
    expected = x.double() @ weight.double().T
    plain = Int8Linear(*quantise_rows(weight), None)(x) - expected
    got = Int8Linear(*quantise_rows(turned), None, spread=True)(x) - expected
    assert got.norm() < 0.02 * expected.norm()
    assert segments < 8 or got.norm() < 0.7 * plain.norm()


@pytest.mark.parametrize("spread", [False, True])
def test_a_row_is_the_same_to_the_bit_alone_and_among_any_others(spread: bool) -> None:
    linear = Int8Linear(*quantise_rows(torch.randn(192, 128)), torch.randn(192), spread)
    rows = torch.randn(40, 128)
    together = linear(rows)
    assert torch.equal(torch.cat([linear(row.unsqueeze(0)) for row in rows]), together)
    rows[1::2] *= 1e6
    assert torch.equal(linear(rows)[::2], together[::2])


def test_a_row_of_zeros_gives_the_bias() -> None:
    bias = torch.randn(32)
    linear = Int8Linear(*quantise_rows(torch.randn(32, 48)), bias)
    assert torch.equal(linear(torch.zeros(3, 48)), bias.expand(3, 32))


EXTREME = """
import torch
from tidegate.kernels.int8_linear import Int8Linear, activation_levels
linear = Int8Linear(torch.full((64, 256), 127, dtype=torch.int8), torch.ones(64), None)
torch.testing.assert_close(linear(torch.full((5, 256), 3.0)), torch.full((5, 64), 3.0 * 127 * 256))
print(activation_levels())
"""


@pytest.mark.parametrize("instructions", [None, "AVX2"])
def test_the_largest_values_do_not_overflow_even_without_vnni(instructions: str | None) -> None:
    env = os.environ | ({"FBGEMM_ENABLE_INSTRUCTIONS": instructions} if instructions else {})
    out = subprocess.run([sys.executable, "-c", EXTREME], env=env, capture_output=True, text=True, check=True).stdout
    assert int(out) == (63 if instructions else activation_levels())
