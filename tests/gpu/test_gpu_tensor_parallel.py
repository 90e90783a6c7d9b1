"""Two GPUs that compute a model together: one GPU's tokens, in every mode and while shares move, and a clear end."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch
from across_modes import check_alike, tokens_in_modes
from engine_driver import SLO, EngineDriver, mixed_prompts, reference
from gpu_models import tiny
from test_gpu_engine import regrets
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from tidegate.base.errors import ConfigError
from tidegate.node.config import EngineConfig
from tidegate.policy.modes import MODES

MAX_TOKENS = 16
SHAPE = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "experts": Qwen3MoeConfig(
        **SHAPE, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, head_dim=128, norm_topk_prob=True
    ),
    "latent attention": DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4}, kv_lora_rank=64, q_lora_rank=48, qk_nope_head_dim=32,
        qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=4,
        moe_intermediate_size=128, first_k_dense_replace=1,
    ),
}  # fmt: skip

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")


def config(path, **more):
    asked = {"max_model_len": 1100, "num_blocks": 900, "max_num_seqs": 32, "slo": SLO}
    return EngineConfig(model=path, device="cuda", tensor_parallel_size=2, **asked | more)


def check(model, prompts, answers, what):
    found = [r for p, a in zip(prompts, answers, strict=True) for r in regrets(model, p, a.tokens)]
    best = sum(r == 0.0 for r in found) / len(found)
    print(f"{what}: {best:.1%} of {len(found)} tokens are the reference's, largest regret {max(found):.4f} std")
    assert best > 0.97 and max(found) < 0.1, what


def test_graphs_on_two_gpus_give_the_reference_tokens_in_every_mode_and_share(tiny_on_gpu):
    path, model = tiny_on_gpu
    prompts = mixed_prompts(24, 1000, 1000)
    with EngineDriver(config(path, prefix_caching=False)) as engine:
        print(engine.engine.info.device)
        assert "2 ×" in engine.engine.info.device and "without graphs" not in engine.engine.info.device
        by_mode = tokens_in_modes(engine, MODES, prompts, MAX_TOKENS, partial(check, model))
        (sampled, again) = (
            engine.answers([engine.spec([5, 6, 7], 12, temperature=0.8, seed=3, top_p=0.9)])[0] for _ in range(2)
        )
        assert sampled.tokens == again.tokens
        assert engine.stats().blocks_used == 0
    check_alike(by_mode, 0.8, "bf16 may break ties differently, seldom")


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_on_two_gpus_are_transformers_in_every_mode(family, tmp_path):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(tmp_path)
    references = [reference(model, prompt, 8) for prompt in mixed_prompts(8, 200, 1000)]
    with EngineDriver(config(str(tmp_path), dtype="float32")) as engine:
        for mode in MODES:
            engine.run(engine.engine.set_mode(mode))
            answers = engine.answers([engine.spec(r.prompt, 8) for r in references])
            ties = sum(r.check(a.tokens, mode) for r, a in zip(references, answers, strict=True))
            assert ties <= 2, f"{mode}: ties should be rare"


def test_a_killed_rank_ends_the_engine_with_its_name_and_requests_with_a_reason(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    with EngineDriver(config(str(tmp_path), mode="semi")) as engine:
        (other,) = ranks_of(engine.engine.process.pid)
        spec = engine.spec([1, 2, 3], 1000, min_tokens=1000)
        engine.run(asyncio.wait_for(engine.ends_with_a_lost_rank(other, spec), 30))


def ranks_of(node):
    """The processes of ranks that a node has started."""
    for child in Path(f"/proc/{node}/task/{node}/children").read_text().split():
        if "tidegate.node.rank_process" in Path(f"/proc/{child}/cmdline").read_text():
            yield int(child)


def test_more_ranks_than_gpus_are_refused(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="needs as many GPUs"):
        EngineDriver(
            EngineConfig(model=str(tmp_path), device="cuda", tensor_parallel_size=torch.cuda.device_count() + 1)
        )
