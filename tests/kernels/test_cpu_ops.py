"""The compiled small kernels compute what torch does, for any shape and any number of threads."""

from collections.abc import Iterator

import pytest
import torch

from tidegate.kernels import cpu_ops, torch_ops

CLOSE = {"rtol": 2e-6, "atol": 2e-6}
ROWS = [1, 3, 700]  # the last is enough work for all threads


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 64, 577])
def test_norms(rows: int, width: int) -> None:
    x, added, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    torch.testing.assert_close(cpu_ops.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5), **CLOSE)
    ours, theirs = x.clone(), x.clone()
    normed = cpu_ops.add_rms_norm(ours, added, weight, 1e-6)
    torch.testing.assert_close(normed, torch_ops.add_rms_norm(theirs, added, weight, 1e-6), **CLOSE)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", ROWS)
def test_norm_of_each_head_of_a_part_of_a_row(rows: int) -> None:
    heads, weight = torch.randn(rows, 7, 32)[:, 2:5], torch.randn(32)
    torch.testing.assert_close(cpu_ops.rms_norm(heads, weight, 1e-5), torch_ops.rms_norm(heads, weight, 1e-5), **CLOSE)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", [2, 20, 64])
def test_rotation_in_place_of_a_part_of_each_row(rows: int, head_dim: int) -> None:
    ours = torch.randn(rows, 9, head_dim)
    theirs = ours.clone()
    angles = torch.rand(rows, 1, head_dim // 2) * 6
    cpu_ops.rope(ours[:, :6], angles.cos(), angles.sin())
    torch_ops.rope(theirs[:, :6], angles.cos(), angles.sin())
    torch.testing.assert_close(ours, theirs, **CLOSE)
    first, second = torch.randn(1, 1, 2).unbind(-1)
    turned = cpu_ops.rope(torch.stack((first, second), -1), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    torch.testing.assert_close(turned, torch.stack((-second, first), -1))  # by a right angle


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 31, 1536])
def test_gated_silu(rows: int, width: int) -> None:
    gate_up = torch.randn(rows, 2 * width) * 30
    gate_up[0, 0] = -1000.0
    expected = torch.nn.functional.silu(gate_up[:, :width].double()) * gate_up[:, width:].double()
    torch.testing.assert_close(cpu_ops.silu_mul(gate_up), expected.float(), rtol=1e-6, atol=1e-6)
