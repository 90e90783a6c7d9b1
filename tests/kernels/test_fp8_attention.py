"""Attention over an FP8 KV cache is float attention over keys and values that were rounded, token by token."""

import pytest
import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import AttentionRows
from tidegate.kernels.choose_attention import attention_over
from tidegate.kernels.fp8 import E4M3
from tidegate.kernels.fp8_attention import Fp8Attention
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.kernels.windows import LayerWindows

LAYERS, BLOCKS, SIZE, HEADS, KV_HEADS, DIM = 2, 12, 4, 4, 2, 16
SCALES = ((0.5, 0.02), (1.0, 3.0))
STEPS = [AttentionRows([0, 1], [0, 0], [13, 6]), AttentionRows([1, 0], [6, 13], [1, 1]), AttentionRows([0], [14], [5])]


def spec(**more):
    return ModelSpec("LlamaForCausalLM", LAYERS, HEADS * DIM, HEADS, KV_HEADS, DIM, 64, 100, 64, **more)


def array(dtype):
    return torch.zeros(LAYERS, 2, BLOCKS, SIZE, KV_HEADS, DIM, dtype=dtype)


def table(order):
    blocks = torch.arange(BLOCKS, dtype=torch.int32)
    return (blocks if order == "ascending" else blocks.flip(0)).view(2, -1)


def rounded(x, scale):
    return (x / scale).clamp(-448, 448).to(E4M3).float() * scale


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_what_float_attention_gives_over_rounded_keys_and_values(order, window):
    model = spec(sliding_window=window)
    ours = attention_over(TorchAttention, model, array(E4M3), table(order), SCALES)
    exact = TorchAttention(model, array(torch.float32), table(order))
    assert isinstance(ours, Fp8Attention)
    generator = torch.Generator().manual_seed(5)
    for rows in STEPS:
        ours.plan(rows)
        exact.plan(rows)
        for layer, (k_scale, v_scale) in enumerate(SCALES):
            q, k, v = (torch.randn(sum(rows.counts), n, DIM, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
            v[0] *= 1000.0  # beyond the largest, in the first layer
            expected = exact.run(layer, q, rounded(k, k_scale), rounded(v, v_scale))
            torch.testing.assert_close(ours.run(layer, q, k, v), expected)


def test_scales_are_1_unless_a_checkpoint_brings_others():
    results = []
    for scales in (None, ((1.0, 1.0),) * LAYERS):
        attention = attention_over(TorchAttention, spec(), array(E4M3), table("ascending"), scales)
        attention.plan(AttentionRows([0], [0], [3]))
        q = torch.ones(3, HEADS, DIM)
        results.append(attention.run(1, q, q[:, :KV_HEADS] * 0.3, q[:, :KV_HEADS] * 0.7))
    assert torch.equal(*results)
    assert results[0].unique().tolist() == [rounded(torch.tensor(0.7), 1.0).item()]


def test_layers_of_different_windows_keep_their_scales():
    model = spec(layer_windows=(3, None))
    ours = attention_over(TorchAttention, model, array(E4M3), table("descending"), SCALES)
    assert isinstance(ours, LayerWindows)
    exact = LayerWindows(TorchAttention, model, array(torch.float32), table("descending"))
    rows = AttentionRows([0], [0], [9])
    ours.plan(rows)
    exact.plan(rows)
    for layer, (k_scale, v_scale) in enumerate(SCALES):
        q, k, v = (torch.randn(9, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
        expected = exact.run(layer, q, rounded(k, k_scale), rounded(v, v_scale))
        torch.testing.assert_close(ours.run(layer, q, k, v), expected)
