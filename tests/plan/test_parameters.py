"""What models store, multiply and read: as worked out by hand, and as this engine's own weights are."""

import math

import pytest

from tidegate.base.specs import ExpertsSpec
from tidegate.models.weights import layout
from tidegate.plan.hardware import GPUS
from tidegate.plan.memory import degrees, memory
from tidegate.plan.parameters import (
    distinct_experts,
    multiplied_elements,
    pair_flops,
    prompt_elements,
    read_elements,
    stored_elements,
)
from tidegate.plan.roofline import kv_bytes_per_token, roofline
from tidegate.plan.shapes import KNOWN
from tidegate.slo.latency import Work

H200 = GPUS["h200"]
MIXTRAL, QWEN, DEEPSEEK = (KNOWN[name] for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite"))

# Attention of a layer, one expert, and the router, of each. Worked out from their config.json by hand.
MIXTRAL_LAYER = (4096 * (32 + 2 * 8) * 128 + 4096 * 4096, 3 * 4096 * 14336, 8 * 4096)
QWEN_LAYER = (2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048, 3 * 2048 * 768, 128 * 2048)
DEEPSEEK_ATTENTION = 2048 * 16 * (128 + 64) + 2048 * (512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048
DEEPSEEK_DENSE, DEEPSEEK_EXPERT, DEEPSEEK_ROUTER = 3 * 2048 * 10944, 3 * 2048 * 1408, 64 * 2048


def test_mixtral_8x7b():
    attention, expert, router = MIXTRAL_LAYER
    assert (attention, expert, router) == (41_943_040, 176_160_768, 32_768)
    assert stored_elements(MIXTRAL) == 32 * (attention + 8 * expert + router) + 2 * 32000 * 4096 == 46_702_526_464
    assert multiplied_elements(MIXTRAL) == 32 * (attention + 2 * expert + router) == 12_617_515_008
    assert kv_bytes_per_token(MIXTRAL, H200, 1) == 32 * 2 * 8 * 128 * 2 == 131_072
    assert pair_flops(MIXTRAL) == 32 * 32 * 4 * 128


def test_qwen3_30b_a3b():
    attention, expert, router = QWEN_LAYER
    assert (attention, expert, router) == (18_874_368, 4_718_592, 262_144)
    assert stored_elements(QWEN) == 48 * (attention + 128 * expert + router) + 2 * 151936 * 2048 == 30_531_911_680
    assert multiplied_elements(QWEN) == 48 * (attention + 8 * expert + router) == 2_730_491_904
    assert kv_bytes_per_token(QWEN, H200, 1) == 48 * 2 * 4 * 128 * 2 == 98_304


def test_deepseek_v2_lite():
    """One dense layer; in the others 64 routed experts of which a token takes 6, and two shared ones."""
    assert DEEPSEEK_ATTENTION == 13_762_560
    fixed = 27 * DEEPSEEK_ATTENTION + DEEPSEEK_DENSE + 26 * (2 * DEEPSEEK_EXPERT + DEEPSEEK_ROUTER)
    assert stored_elements(DEEPSEEK) == fixed + 26 * 64 * DEEPSEEK_EXPERT + 2 * 102400 * 2048 == 15_706_357_760
    assert multiplied_elements(DEEPSEEK) == fixed + 26 * 6 * DEEPSEEK_EXPERT == 2_241_593_344
    assert kv_bytes_per_token(DEEPSEEK, H200, 1) == 27 * (512 + 64) * 2 == 31_104
    assert pair_flops(DEEPSEEK) == 27 * 16 * 2 * (512 + 64 + 512)


def test_a_step_reads_the_experts_that_any_of_its_tokens_goes_to():
    """k of E for one token; with more, E · (1 - (1 - k/E)^n), which ends at all of them."""
    experts = ExpertsSpec(8, 2, 14336, True)
    assert [distinct_experts(experts, n) for n in (1, 2, 4)] == [2.0, 3.5, 5.46875]
    attention, expert, router = MIXTRAL_LAYER
    for tokens, distinct in ((1, 2.0), (2, 3.5), (4, 5.46875)):
        by_hand = 32 * (attention + distinct * expert + router) + 32000 * 4096
        assert read_elements(MIXTRAL, tokens) == pytest.approx(by_hand)
    everything = stored_elements(MIXTRAL) - 32000 * 4096  # all but the embedding's table
    assert read_elements(MIXTRAL, 2048) == pytest.approx(everything)


def test_a_dense_model_reads_all_of_itself_whatever_the_tokens():
    assert read_elements(KNOWN["llama-3.1-8b"], 1) == read_elements(KNOWN["llama-3.1-8b"], 2048)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_stored_is_what_the_engine_lays_out(name):
    matrices = [shape for shape in layout(KNOWN[name]).values() if len(shape) > 1]
    assert stored_elements(KNOWN[name]) == sum(math.prod(shape) for shape in matrices)


def test_of_the_last_layer_a_prompts_token_needs_its_keys_and_values():
    """So neither what attention's results are multiplied with there, nor the MLP."""
    attention, expert, router = MIXTRAL_LAYER
    assert prompt_elements(MIXTRAL) == (31 * 2 * expert, 32 * attention - 4096 * 4096 + 31 * router)
    attention, expert, router = QWEN_LAYER
    assert prompt_elements(QWEN) == (47 * 8 * expert, 48 * attention - 32 * 128 * 2048 + 47 * router)
    fixed = 27 * DEEPSEEK_ATTENTION + DEEPSEEK_DENSE + 25 * (2 * DEEPSEEK_EXPERT + DEEPSEEK_ROUTER)
    assert prompt_elements(DEEPSEEK) == (25 * 6 * DEEPSEEK_EXPERT, fixed - 16 * 128 * 2048)
    llama = KNOWN["llama-3.1-8b"]
    assert prompt_elements(llama) == (0, multiplied_elements(llama) - 4096 * 4096 - 3 * 4096 * 14336)


# ---- what follows for a device


def test_resident_weights_and_the_rest_for_kv():
    held = memory(MIXTRAL, H200, 1)
    assert held.weight_bytes == 2 * 46_702_526_464
    assert held.kv_tokens == int((held.usable_bytes - held.weight_bytes - held.reserve_bytes) / 131_072)


def test_latents_are_on_every_device_and_heads_are_divided():
    assert degrees(DEEPSEEK, H200, 8) == [1, 2, 4, 8]
    assert kv_bytes_per_token(DEEPSEEK, H200, 8) == kv_bytes_per_token(DEEPSEEK, H200, 1)
    assert memory(DEEPSEEK, H200, 2).weight_bytes == 15_706_357_760


def test_prefill_costs_what_a_token_is_multiplied_with_and_decode_what_is_read():
    """Prefill of a mixture takes what its active elements take in products of experts; decode reads the others too."""
    mixture, dense = (roofline(KNOWN[name], H200).whole for name in ("mixtral-8x7b", "llama-3.1-8b"))
    active = multiplied_elements(MIXTRAL) / multiplied_elements(KNOWN["llama-3.1-8b"])
    prefill = Work().and_slice(0, 2048)
    gets = H200.efficiency
    assert active < mixture.seconds(prefill) / dense.seconds(prefill) < active * gets.products / gets.experts
    one, few, many = Work(rows=1), Work(rows=8), Work(rows=128)
    assert mixture.seconds(one) / dense.seconds(one) == pytest.approx(active, rel=0.25)
    assert mixture.seconds(few) > 3 * dense.seconds(few)
    assert mixture.seconds(many) == pytest.approx(mixture.seconds(Work(rows=64)), rel=0.1)
    assert mixture.seconds(many) > 2 * 46.5e9 / H200.bandwidth, "all experts are read"
