"""The GPU's kernel for routing chooses as plain torch does. Without a GPU, set TRITON_INTERPRET=1."""

import importlib.util
import os

import pytest
import torch

from tidegate.base.specs import ExpertsSpec
from tidegate.kernels import routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = importlib.util.find_spec("triton") and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
SPECS = {
    "mixtral": ExpertsSpec(8, 2, 64, normalised=True),
    "qwen3": ExpertsSpec(128, 8, 64, normalised=True),
    "qwen2, experts that are no power of two": ExpertsSpec(60, 4, 64, normalised=False),
    "deepseek v2, without groups": ExpertsSpec(64, 6, 64, normalised=False, scale=2.5),
    "deepseek v3, without groups": ExpertsSpec(36, 3, 64, normalised=True, scores="sigmoid", scale=1.7),
    "deepseek v3": ExpertsSpec(16, 4, 64, normalised=True, scores="sigmoid", groups=4, groups_per_token=2),
}


def choose(*arguments):
    from tidegate.kernels.triton_routing import choose_experts

    return choose_experts(*arguments)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_plain_torch_chooses(spec):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, spec.num_experts, generator=generator).mul_(2).to(DEVICE)
    correction = None
    if spec.scores == "sigmoid":
        correction = torch.randn(spec.num_experts, generator=generator).mul_(0.3).to(DEVICE)
    shares, chosen = choose(logits, spec, correction)
    their_shares, their_chosen = routing.choose_experts(logits, spec, correction)
    assert torch.equal(chosen, their_chosen) and chosen.dtype == their_chosen.dtype
    torch.testing.assert_close(shares, their_shares, rtol=1e-5, atol=1e-6)


def test_shares_have_the_type_of_the_logits():
    shares, _ = choose(torch.randn(3, 8, device=DEVICE).half(), SPECS["mixtral"], None)
    assert shares.dtype == torch.float16 and torch.allclose(
        shares.float().sum(1), torch.ones(3, device=DEVICE), atol=2e-3
    )


def test_whatever_padding_holds_is_sent_to_experts_that_there_are():
    spec = SPECS["qwen2, experts that are no power of two"]
    logits = torch.tensor([torch.nan, torch.inf, -torch.inf], device=DEVICE)[:, None].expand(3, 60).contiguous()
    _, chosen = choose(logits, spec, None)
    assert bool(((chosen >= 0) & (chosen < 60)).all())
