"""config.json to ``ModelSpec``: old and new spellings, defaults, and refusals."""

import math
import subprocess
import sys
from typing import Any

import pytest

from tidegate.base.errors import ModelError
from tidegate.base.specs import ExpertsSpec, LatentSpec, ModelSpec, RopeScaling
from tidegate.models.config import SUPPORTED_ARCHITECTURES, spec_from_hf
from tidegate.models.registry import MODELS, build_model


def config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    }
    return base | changes


def test_keys_left_out_take_transformers_defaults() -> None:
    assert spec_from_hf(config()) == ModelSpec("LlamaForCausalLM", 4, 64, 8, 8, 8, 96, 100, 512, norm_eps=1e-6)


def test_old_and_new_rope_spellings_agree() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = spec_from_hf(config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3}))
    old = spec_from_hf(config(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3}))
    oldest = spec_from_hf(config(rope_theta=5e5, rope_scaling={"type": "llama3", **llama3}))
    assert new == old == oldest
    assert new.rope_theta == 5e5
    assert new.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_no_scaling_is_spelled_in_three_ways() -> None:
    for rope in ({}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}):
        assert spec_from_hf(config(**rope)).rope_scaling == RopeScaling()


def test_yarn_extends_the_length_and_scales_the_amplitude() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    spec = spec_from_hf(config(rope_scaling=yarn))
    assert spec.max_len == 2048
    assert spec.rope_scaling.attention_factor == pytest.approx(1.1386294)
    assert spec_from_hf(config(rope_scaling={**yarn, "attention_factor": 1.0})).rope_scaling.attention_factor == 1.0


def test_end_ids_may_be_one_many_or_none() -> None:
    assert spec_from_hf(config(eos_token_id=3)).eos_ids == (3,)
    assert spec_from_hf(config(eos_token_id=[3, 4]), {"eos_token_id": [4, 5]}).eos_ids == (3, 4, 5)
    assert spec_from_hf(config(eos_token_id=None), {"eos_token_id": 7}).eos_ids == (7,)
    assert spec_from_hf(config()).eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 9}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, 9),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": True}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            9,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 4,
            },
            9,
        ),
    ],
)
def test_sliding_windows(changes: dict[str, Any], window: int | None) -> None:
    assert spec_from_hf(config(**changes)).sliding_window == window


MOE: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24}


def test_experts() -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    assert spec_from_hf(config(**mixtral)).experts == ExpertsSpec(8, 2, 96, normalised=True)
    qwen3 = spec_from_hf(config(architectures=["Qwen3MoeForCausalLM"], norm_topk_prob=True, mlp_only_layers=[2], **MOE))
    assert qwen3.experts == ExpertsSpec(16, 4, 24, normalised=True, dense_layers=(2,))
    assert [qwen3.experts_of(i) is None for i in range(4)] == [False, False, True, False]
    qwen2 = config(
        architectures=["Qwen2MoeForCausalLM"], decoder_sparse_step=2, shared_expert_intermediate_size=40, **MOE
    )
    assert spec_from_hf(qwen2).experts == ExpertsSpec(
        16, 4, 24, False, shared_ffn_size=40, shared_gated=True, dense_layers=(0, 2)
    )
    assert spec_from_hf(config()).experts is None


DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.0, "n_group": 4, "topk_group": 2,
}  # fmt: skip
YARN_MSCALE = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 128,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}


def test_latent_attention() -> None:
    spec = spec_from_hf(config(architectures=["DeepseekV2ForCausalLM"], **DEEPSEEK))
    assert spec.latent == LatentSpec(32, 8, 4, 8, None, scale=12**-0.5, rope_pairs=True)
    assert (spec.num_kv_heads, spec.head_dim, spec.kv_elements_per_token) == (1, 36, 4 * 36)
    assert spec.experts == ExpertsSpec(
        16, 4, 24, False, shared_ffn_size=48, dense_layers=(0,), scale=2.0, exact_router=True
    )
    v3 = {"architectures": ["DeepseekV3ForCausalLM"], "rope_interleave": False, "rope_scaling": YARN_MSCALE}
    spec = spec_from_hf(config(**(DEEPSEEK | v3 | {"q_lora_rank": 16})))
    assert spec.latent is not None and (spec.latent.query_rank, spec.latent.rope_pairs) == (16, False)
    assert spec.latent.scale == pytest.approx(12**-0.5 * (1 + 0.07 * math.log(40)) ** 2)
    assert spec.rope_scaling.attention_factor == 1.0
    assert spec.experts == ExpertsSpec(
        16,
        4,
        24,
        True,
        shared_ffn_size=48,
        dense_layers=(0,),
        scores="sigmoid",
        groups=4,
        groups_per_token=2,
        scale=2.0,
        exact_router=True,
    )


def test_layers_with_different_windows_are_refused() -> None:
    mixed = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 3}
    with pytest.raises(ModelError, match="1 of 4 layers use a sliding window"):
        spec_from_hf(config(**mixed))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            r"GemmaForCausalLM is not supported; supported are .*LlamaForCausalLM, ",
        ),
        ({"architectures": None}, "is not supported"),
        ({"vocab_size": None}, "'vocab_size'"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "Quantized"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncat"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "'num_local_experts'"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "'qk_nope_head_dim'"),
        ({"architectures": ["DeepseekV2ForCausalLM"], **DEEPSEEK, "topk_method": "noaux_tc"}, "'noaux_tc'"),
        ({"architectures": ["DeepseekV2ForCausalLM"], **DEEPSEEK, "mlp_bias": True}, "Biases in the MLPs"),
    ],
)
def test_what_cannot_be_run_faithfully_is_refused_in_one_sentence(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        spec_from_hf(config(**changes))
    assert "\n" not in str(caught.value)


def test_every_supported_architecture_has_a_model_and_no_other() -> None:
    assert set(SUPPORTED_ARCHITECTURES) == set(MODELS)
    stranger = ModelSpec("GemmaForCausalLM", 1, 8, 1, 1, 8, 8, 8, 8)
    with pytest.raises(ModelError, match=r"GemmaForCausalLM is not supported; supported are .*LlamaForCausalLM, "):
        build_model(stranger, {}, None)  # type: ignore[arg-type]


def test_reading_a_configuration_does_not_import_torch() -> None:
    program = "import sys, tidegate.models.config, tidegate.models.gguf_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
