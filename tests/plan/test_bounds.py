"""What bounds say on devices whose answers can be worked out by hand."""

import pytest
import toy

from tidegate.base.errors import ConfigError
from tidegate.plan import bounds
from tidegate.plan.hardware import GPUS, hardware
from tidegate.plan.memory import degrees, memory
from tidegate.plan.parameters import stored_elements
from tidegate.plan.setting import MAX_SEQS
from tidegate.plan.shapes import KNOWN
from tidegate.slo.goodput import Slo
from tidegate.slo.latency import Costs, LatencyModel


def constant(seconds):
    """Every step takes so long."""
    return LatencyModel(Costs((1, 1 << 20), (seconds, seconds), 0.0, 0.0, 0.0))


def test_decode_alone_is_bound_by_how_many_requests_fit_at_the_pace_of_a_step():
    setting = toy.setting(constant(0.01), lengths=[(10, 50)])
    assert bounds.decode_only(setting, 1).ceiling == pytest.approx(MAX_SEQS / (50 * 0.01), rel=0.01)


def test_where_steps_are_longer_than_the_limit_there_is_capacity_but_no_goodput():
    setting = toy.setting(constant(0.05), slo=Slo(1.0, 0.03), lengths=[(10, 50)])
    rates = bounds.decode_only(setting, 1)
    assert rates.ceiling == 0.0
    assert rates.capacity == pytest.approx(MAX_SEQS / (50 * 0.05), rel=0.01)


def test_prefill_alone_is_bound_by_its_tokens():
    model = LatencyModel(Costs((1, 4096), (1e-4, 0.4096), 0.0, 0.0, 0.0))
    setting = toy.setting(model, lengths=[(100, 5)])
    assert bounds.prefill_only(setting, 1).capacity == pytest.approx(1 / (100 * 1e-4), rel=0.01)


def test_a_prompt_that_takes_longer_than_the_limit_alone_makes_every_rate_unreachable():
    setting = toy.setting(toy.STEADY, slo=Slo(0.05, 0.03), lengths=[(4000, 10)])
    assert bounds.prefill_first(setting, 1).ceiling == 0.0
    assert bounds.chunked(setting, 1, 2048).ceiling == 0.0
    assert bounds.prefill_only(setting, 1).ceiling == 0.0


def test_the_hardware_bound_is_the_busier_of_arithmetic_and_bandwidth():
    setting = toy.setting(lengths=[(1000, 1)])
    long_prompts = bounds.hardware_bound(setting)
    assert long_prompts.resource == "prefill compute"
    assert long_prompts.requests_per_s == pytest.approx(1 / long_prompts.compute_s)
    reading = LatencyModel(Costs((64, 4096), (0.01, 0.02), 0.0, 0.0, 1e-6))
    long_answers = bounds.hardware_bound(toy.setting(reading, lengths=[(10, 1000)]))
    assert long_answers.resource == "decode bandwidth"
    assert long_answers.requests_per_s == pytest.approx(1 / long_answers.bandwidth_s)


# ---- memory


def test_weights_and_kv_are_divided_among_devices():
    model, device = KNOWN["llama-3.3-70b"], GPUS["h200"]
    four, eight = memory(model, device, 4), memory(model, device, 8)
    assert stored_elements(model) == pytest.approx(70.6e9, rel=0.01)
    assert four.weight_bytes == 2 * eight.weight_bytes
    assert eight.kv_tokens > 2 * four.kv_tokens


def test_more_devices_than_kv_heads_hold_each_head_more_than_once():
    model = KNOWN["qwen2.5-7b"]  # 4 KV heads, 28 heads
    device = GPUS["h200"]._replace(per_node=16)
    assert degrees(model, device, 16) == [1, 2, 4]
    halved = toy.model(num_heads=8, num_kv_heads=2)
    two, eight = (memory(halved, device, tp).kv_tokens for tp in (2, 8))
    assert eight < 1.1 * two


def test_what_does_not_fit_says_how_much_is_short():
    big = toy.model(num_layers=400, hidden_size=4096, ffn_size=16384)
    with pytest.raises(ConfigError, match=r"toy does not fit: over 1 × toy GPU .* GiB are short of the 72.0 GiB"):
        _ = toy.setting(None, of=big, gpus=1, memory_gib=80.0).degrees


def test_what_does_not_fit_says_on_how_many_devices_it_would():
    big = toy.model(num_heads=4, num_layers=400, hidden_size=4096, ffn_size=16384)
    with pytest.raises(ConfigError, match="--gpus 4 would do"):
        _ = toy.setting(None, of=big, gpus=1, memory_gib=80.0).degrees


def test_a_request_longer_than_the_model_takes_is_refused():
    with pytest.raises(ConfigError, match="longest request has 220 tokens and toy takes 100"):
        _ = toy.setting(of=toy.model(max_len=100)).degrees


def test_an_unknown_gpu_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match="no entry for --gpu b300; known are a100, h100, h200, cpu:CORES"):
        hardware("b300")
