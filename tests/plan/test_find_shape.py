"""Shapes that a plan is made for: well-known ones are those of their config.json."""

import json

import msgspec
import pytest

from tidegate.base.specs import ModelSpec
from tidegate.plan.shapes import KNOWN, find_shape

CONFIGS = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 10944,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
        "max_position_embeddings": 163840, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False,
    },
}  # fmt: skip
LAYERS = ["architecture", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size"]
SIZES = [*LAYERS, "vocab_size", "max_len", "tied_embeddings"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_with_experts_or_latents_is_the_well_known_shape(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    read, known = find_shape(str(tmp_path)), KNOWN[name]
    assert sizes(read) == sizes(known)
    for part in ("experts", "latent"):
        ours, theirs = getattr(known, part), getattr(read, part)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert msgspec.structs.astuple(ours)[:3] == msgspec.structs.astuple(theirs)[:3]
    if known.experts is not None:
        assert known.experts.shared_ffn_size == read.experts.shared_ffn_size
        assert known.experts.dense_layers == read.experts.dense_layers


def sizes(spec: ModelSpec):
    return {name: getattr(spec, name) for name in SIZES}
