"""Several ranks serve as one engine: the same tokens as one rank's, and a clear end where one of them dies."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from engine_driver import SLO, EngineDriver

from tidegate.base.errors import ConfigError, EngineDead
from tidegate.base.specs import ModelSpec, Shard
from tidegate.models.dummy_source import DummySource
from tidegate.models.shards import divide
from tidegate.node.config import EngineConfig
from tidegate.node.cpu_backend import CpuBackend

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from every_mode import check_tokens_in_every_mode
from tiny_models import FAMILIES

MEMORY_BYTES = 64 << 20


def config(model, **more):
    return EngineConfig(
        model=model, device="cpu", tensor_parallel_size=2, max_model_len=400, num_blocks=400, max_num_batched_tokens=64,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3 moe", "deepseek v3"])
def test_two_ranks_give_transformers_greedy_tokens_in_every_mode(family, tmp_path):
    check_tokens_in_every_mode(FAMILIES[family], tmp_path, ranks=2)


def test_sampled_tokens_and_their_probabilities_are_those_of_one_rank(tiny_model):
    sampling = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.3, "logprobs": 2}
    prompts = [[i + 1] * (5 + 30 * i) for i in range(6)]
    by_ranks = []
    for ranks in (1, 2):
        with EngineDriver(config(tiny_model[0]).__replace__(tensor_parallel_size=ranks)) as engine:
            by_ranks.append(engine.answers([engine.spec(prompt, 20, **sampling) for prompt in prompts]))
    for one, two in zip(*by_ranks, strict=True):
        assert one.tokens == two.tokens
        for a, b in zip(one.outputs, two.outputs, strict=True):
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert x.top_ids == y.top_ids and x.chosen == pytest.approx(y.chosen, abs=1e-3)


def test_steps_are_measured_at_the_start_on_both_ranks(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with EngineDriver(config(tiny_model[0], mode="auto", slo=SLO, calibration_seconds=1.0)) as engine:
        assert engine.engine.info.predictions.startswith("measured")
        assert "2 ranks" in engine.engine.info.device
        (answer,) = engine.answers([engine.spec([3, 4, 5], 4)])
        assert len(answer.tokens) == 4


@pytest.mark.parametrize("victim", ["D@1", "D"])
def test_a_killed_rank_ends_the_engine_with_its_name_and_requests_with_a_reason(tiny_model, victim):
    lost = f"rank {int(victim.endswith('1'))} of 2 was lost"
    with EngineDriver(config(tiny_model[0])) as engine:
        running = engine.engine

        async def work():
            stream = running.submit(engine.spec([1, 2, 3], 390, min_tokens=390))
            await anext(stream)
            os.kill(running.info.lane_pids[victim], signal.SIGKILL)
            outputs = [output async for output in stream]
            assert outputs[-1].finish == "error" and lost in outputs[-1].reason
            await asyncio.to_thread(running.process.wait)
            with pytest.raises(EngineDead, match=lost):
                while True:  # until what the process said last has been read
                    await asyncio.sleep(0.01)
                    await running.stats()

        engine.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize(("ranks", "words"), [(0, "at least 1"), (5, "4 heads")])
def test_what_can_not_be_divided_is_refused_before_anything_is_loaded(tiny_model, ranks, words):
    asked = config(tiny_model[0]).__replace__(tensor_parallel_size=ranks)
    with pytest.raises(ConfigError, match=words):
        EngineDriver(asked)


@pytest.mark.parametrize("kv_heads", [4, 3], ids=["as many heads on each rank", "more heads on one rank"])
def test_ranks_together_keep_to_the_memory_for_kv_and_have_as_many_tokens_as_one(kv_heads):
    spec = ModelSpec("LlamaForCausalLM", 2, 64, 4 * kv_heads, kv_heads, 16, 128, 500, max_len=4096)
    source = DummySource(spec, 0, None)
    blocks = []
    for ranks in (1, 2):
        asked = EngineConfig(model="", tensor_parallel_size=ranks, kv_cache_memory_bytes=MEMORY_BYTES)
        blocks.append(CpuBackend(asked, source).size_pool(asked).num_blocks)
    assert blocks[0] == MEMORY_BYTES // (spec.kv_elements_per_token * 4 * 16)
    assert blocks[1] == pytest.approx(blocks[0], abs=1)
    assert sum(divide(spec, Shard(rank, 2)).kv_elements_per_token for rank in range(2)) == spec.kv_elements_per_token
