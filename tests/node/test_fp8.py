"""An engine with weights or KV cache in FP8: the same tokens in every mode and batch mix, and twice the KV."""

import pytest
from engine_driver import SLO, EngineDriver, mixed_prompts

from tidegate.base.errors import ConfigError
from tidegate.base.specs import LatentSpec, ModelSpec
from tidegate.node.config import EngineConfig
from tidegate.node.sizing import kv_dtype_of, pool_of

VOCAB, BLOCKS = 193, 24
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16  # of the tiny model: tokens, layers, K and V, heads, elements of a byte
MODEL = ModelSpec("LlamaForCausalLM", 4, 64, 4, 2, 16, 128, 500, 4096)


@pytest.mark.parametrize(
    "asked",
    [{"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"}],
    ids=["kv", "both"],
)
def test_greedy_tokens_are_the_same_alone_in_a_crowd_preempted_and_after_a_restart_in_every_mode(tiny_model, asked):
    prompts = mixed_prompts(10, 250, VOCAB, seed=2)
    settings = EngineConfig(
        model=tiny_model[0], max_model_len=300, num_blocks=BLOCKS, max_num_seqs=10, slo=SLO, **asked
    )
    with EngineDriver(settings) as engine:
        assert engine.engine.info.kv_bytes == BLOCKS * BLOCK_BYTES
        differing, compared = engine.differing_from_alone(prompts, 12)
        stats = engine.stats()
        assert stats.lanes["D"].restarts == 1 and stats.preemptions > 0 and stats.prefix_hits_tokens > 0
    # Only where float sums, in another order, tip a value over an edge between two levels, and that a tie.
    assert differing <= compared // 20, f"{differing} of {compared} requests"


def test_ranks_that_compute_together_keep_their_parts_of_kv_in_fp8(tiny_model):
    prompts = mixed_prompts(10, 250, VOCAB, seed=3)
    by_ranks = []
    for ranks in (1, 2):
        settings = EngineConfig(
            model=tiny_model[0], device="cpu", tensor_parallel_size=ranks, max_model_len=300, num_blocks=200,
            kv_cache_dtype="fp8", slo=SLO,
        )  # fmt: skip
        with EngineDriver(settings) as engine:
            assert engine.engine.info.kv_bytes == 200 * BLOCK_BYTES
            by_ranks.append([a.tokens for a in engine.answers([engine.spec(prompt, 12) for prompt in prompts])])
    differing = sum(one != two for one, two in zip(*by_ranks, strict=True))
    assert differing <= 1, "sums in another order tip few values over an edge between two levels"


def test_kv_in_fp8_has_four_times_float32s_tokens_and_twice_bfloat16s_in_the_same_memory():
    tokens = {}
    for dtype in ("float32", "bfloat16"):
        for asked in ("auto", "fp8"):
            config = EngineConfig(model="m", kv_cache_dtype=asked)
            pool = pool_of(MODEL, config, 1 << 24, kv_dtype_of(MODEL, config, dtype), 8)
            tokens[dtype, asked] = pool.num_blocks * pool.block_size
    assert tokens["float32", "fp8"] == 4 * tokens["float32", "auto"]
    assert tokens["bfloat16", "fp8"] == 2 * tokens["bfloat16", "auto"]


def test_other_types_are_refused_and_so_is_fp8_for_latent_vectors():
    with pytest.raises(ConfigError, match="choose auto, fp8, fp8_e4m3"):
        kv_dtype_of(MODEL, EngineConfig(model="m", kv_cache_dtype="int4"), "float32")
    latent = LatentSpec(rank=8, nope_dim=8, rope_dim=8, value_dim=8, query_rank=None, scale=1.0, rope_pairs=False)
    model = ModelSpec("DeepseekV3ForCausalLM", 4, 64, 4, 1, 16, 128, 500, 4096, latent=latent)
    with pytest.raises(ConfigError, match="not for latent vectors"):
        kv_dtype_of(model, EngineConfig(model="m", kv_cache_dtype="fp8"), "float32")
