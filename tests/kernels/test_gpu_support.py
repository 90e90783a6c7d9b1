"""Where attention of prompts and decodes can't be one kernel, people are told why."""

import sys

import msgspec
import pytest
import torch

from tidegate.base.specs import LatentSpec, ModelSpec
from tidegate.kernels.gpu_support import why_no_pod
from tidegate.kernels.step_rows import Types

MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=2, hidden_size=512, num_heads=32, num_kv_heads=8, head_dim=128,
    ffn_size=512, vocab_size=100, max_len=4096,
)  # fmt: skip
LATENT = LatentSpec(64, 32, 64, 32, None, 0.1, True)
BF16 = Types(torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sliding_window": 1024}, "sliding windows"),
        ({"head_dim": 256}, "heads of 256"),
        ({"num_kv_heads": 1}, "at most 16 query heads"),
        ({"num_kv_heads": 1, "head_dim": 128, "latent": LATENT}, "latent vectors"),
    ],
)
def test_shapes_that_the_kernel_does_not_take_are_named(changed, words):
    assert words in why_no_pod(msgspec.structs.replace(MODEL, **changed), BF16)


def test_keys_and_values_in_fp8_are_attended_to_in_two_kernels():
    assert "FP8" in why_no_pod(MODEL, Types(torch.bfloat16, torch.float8_e4m3fn))


def test_a_kernel_that_can_not_be_built_is_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "tidegate.kernels.pod_attention", raising=False)
    assert "could not build" in why_no_pod(MODEL, BF16)
