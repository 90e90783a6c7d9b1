"""Experts, latent attention and transformers' own modules on a GPU."""

import pytest
import torch
from engine_driver import SLO, EngineDriver, mixed_prompts, reference
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3TextConfig, Qwen3MoeConfig

from tidegate.node.config import EngineConfig
from tidegate.policy.modes import MODES

MAX_TOKENS = 16
SHAPE = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
    "moe_intermediate_size": 128, "first_k_dense_replace": 1,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 60}
FAMILIES = {
    "experts": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=128, norm_topk_prob=True),
    "latent attention": DeepseekV3Config(**{**SHAPE, **LATENT}),
    "transformers' modules": Gemma3TextConfig(**SHAPE, head_dim=64, query_pre_attn_scalar=64, **WINDOWS),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A directory, transformers' model of it, and what that answers."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param], dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1)
    folder = tmp_path_factory.mktemp("family")
    model.save_pretrained(folder)
    return str(folder), [reference(model, prompt, MAX_TOKENS) for prompt in mixed_prompts(12, 500, 1000)]


def test_float32_tokens_are_transformers_in_every_mode(family):
    path, references = family
    asked = EngineConfig(model=path, device="cuda", dtype="float32", max_model_len=600, num_blocks=600, slo=SLO)
    with EngineDriver(asked) as engine:
        for mode in MODES:
            engine.run(engine.engine.set_mode(mode))
            answers = engine.answers([engine.spec(r.prompt, MAX_TOKENS) for r in references])
            ties = sum(r.check(a.tokens, mode) for r, a in zip(references, answers, strict=True))
            assert ties <= 3, f"{mode}: ties should be rare"
            engine.run(engine.engine.reset_prefix_cache())


def test_bfloat16_first_tokens_are_mostly_those_of_float32(family):
    """Later ones may follow another token, and a router near a tie sends a token elsewhere."""
    path, references = family
    asked = EngineConfig(model=path, device="cuda", max_model_len=600, num_blocks=600, slo=SLO)
    with EngineDriver(asked) as engine:
        answers = engine.answers([engine.spec(r.prompt, MAX_TOKENS) for r in references])
    same = sum(a.tokens[0] == r.tokens[0] for r, a in zip(references, answers, strict=True))
    assert same >= 0.6 * len(references)
