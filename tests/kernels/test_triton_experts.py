"""The GPU's kernels for experts compute what plain torch does. Without a GPU, set TRITON_INTERPRET=1."""

import importlib.util
import os

import pytest
import torch

from tidegate.kernels import torch_experts
from tidegate.kernels.fp8 import quantise_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, TOLERANCE = (torch.bfloat16, 2e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)  # of the largest result
CAN_RUN = importlib.util.find_spec("triton") and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


def by_triton(*arguments):
    from tidegate.kernels.triton_experts import experts

    return experts(*arguments)


def layer(tokens, experts, per_token, hidden, ffn, dtype=DTYPE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    gate_up = torch.randn(experts, 2 * ffn, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(experts, hidden, ffn, generator=generator) * ffn**-0.5
    shares, chosen = torch.rand(tokens, experts, generator=generator).topk(per_token, dim=1)
    x, shares, gate_up, down = (t.to(DEVICE, dtype) for t in (x, shares, gate_up, down))
    return x, shares, chosen.to(DEVICE), gate_up, down


def check(ours, arguments, tolerance=TOLERANCE):
    exact = torch_experts.experts(*(t.float() if t.is_floating_point() else t for t in arguments))
    assert (ours.float() - exact).abs().max() < tolerance * exact.abs().max()


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "hidden", "ffn"),
    [
        (1, 4, 2, 64, 48),  # one token
        (3, 128, 8, 64, 48),  # fewer pairs than experts
        (40, 6, 2, 100, 36),  # sizes that no tile divides, tiles of 16 rows
        (150, 4, 1, 64, 200),  # tiles of 64 rows
        (700, 4, 2, 72, 130),  # tiles of 128 rows, more pairs than the schedule looks at at a time
    ],
)
def test_what_plain_torch_computes(tokens, experts, per_token, hidden, ffn):
    arguments = layer(tokens, experts, per_token, hidden, ffn)
    check(by_triton(*arguments), arguments)


@pytest.mark.parametrize("tokens", [3, 150])
def test_weights_in_fp8_are_multiplied_by_their_rows_scales(tokens):
    x, shares, chosen, *weights = layer(tokens, 4, 2, 64, 48)
    rounded = [quantise_rows(weight.flatten(0, 1)) for weight in weights]
    matrices = [levels.view(weight.shape) for (levels, _), weight in zip(rounded, weights, strict=True)]
    scales = tuple(scale.view(4, -1) for _, scale in rounded)
    arguments = x, shares, chosen, *matrices, scales
    exact = torch_experts.experts(x.float(), shares.float(), *arguments[2:])
    assert (by_triton(*arguments).float() - exact).abs().max() < TOLERANCE * exact.abs().max()


def test_all_tokens_to_the_same_experts():
    arguments = layer(50, 5, 2, 64, 48)
    arguments[2][:] = torch.tensor([4, 1])
    check(by_triton(*arguments), arguments)


def test_sixteen_bits_are_near_the_exact_result():
    arguments = layer(33, 8, 2, 96, 64, torch.float16)
    check(by_triton(*arguments), arguments, 5e-3)


def test_a_token_has_the_same_bits_in_another_crowd_that_takes_tiles_of_the_same_height():
    first, second = layer(20, 6, 2, 64, 48), layer(24, 6, 2, 64, 48, seed=1)
    x, shares, chosen = (torch.cat((a[:1], b)) for a, b in zip(first[:3], second[:3], strict=True))
    assert torch.equal(by_triton(*first)[0], by_triton(x, shares, chosen, *first[3:])[0])


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs need a GPU")
def test_a_graph_follows_the_routing_of_each_replay():
    arguments = layer(16, 8, 2, 128, 64)
    by_triton(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = by_triton(*arguments)
    for seed in (1, 2):
        for ours, theirs in zip(arguments, layer(16, 8, 2, 128, 64, seed=seed), strict=True):
            ours.copy_(theirs)
        graph.replay()
        check(out, arguments)
