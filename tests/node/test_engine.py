"""An engine from the outside: memory, aborts, admin, recording, and settings that can't work."""

import asyncio
import json
from pathlib import Path

import pytest
from engine_driver import EngineDriver

from tidegate.base.errors import ConfigError, RequestError
from tidegate.core.record import replay
from tidegate.node.config import EngineConfig


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "events"
    with EngineDriver(EngineConfig(model=tiny_model[0], num_blocks=600, record=str(log), max_waiting=40)) as driver:
        driver.log = log
        yield driver


def test_a_client_that_leaves_frees_its_blocks_at_the_next_step(engine):
    async def work():
        streams = [engine.engine.submit(engine.spec([i + 1] * 200, 1500)) for i in range(4)]
        for stream in streams:
            await anext(stream)
        for stream in streams:
            engine.engine.abort(stream.request_id)
        finishes = [[o.finish async for o in stream][-1] for stream in streams]
        assert finishes == ["abort"] * 4
        while (await engine.engine.stats()).blocks_used:
            await asyncio.sleep(0.01)
        engine.engine.abort("nobody")

    engine.run(asyncio.wait_for(work(), 30))


def test_orders_that_make_no_sense_are_refused_and_nothing_changes(engine):
    before = engine.stats().mode
    for bad in ({"P": 0.5, "D": 0.6}, {"P": 1.0, "D": 0.0}, {"P": 1.0}, {"X": 0.5, "D": 0.5}):
        with pytest.raises(RequestError):
            engine.run(engine.engine.set_shares(bad))
    with pytest.raises(RequestError, match="choose one of"):
        engine.run(engine.engine.set_mode("turbo"))
    assert engine.stats().mode == before


def test_a_share_set_while_serving_is_in_force_and_shown(engine):
    async def work():
        stream = engine.engine.submit(engine.spec([5] * 300, 50))
        stats = await engine.engine.set_shares({"P": 0.3, "D": 0.7})
        assert (stats.lanes["P"].share, stats.lanes["D"].share) == (0.3, 0.7)
        assert [o.finish async for o in stream][-1] == "length"

    engine.run(work())


def test_more_requests_than_may_wait_are_rejected_and_the_others_served(engine):
    answers = engine.answers([engine.spec([i % 90 + 1] * 400, 4) for i in range(150)])
    finishes = [a.finish for a in answers]
    assert set(finishes) == {"rejected", "length"}
    assert finishes.count("rejected") <= 150 - 40


def test_a_prompt_seen_before_hits_the_prefix_cache_unless_its_salt_differs(engine):
    prompt = [7, 8, 9] * 40
    engine.answers([engine.spec(prompt, 2)])
    (again,) = engine.answers([engine.spec(prompt, 2)])
    assert again.outputs[0].cached_tokens == 112
    salted = engine.spec(prompt, 2)
    salted = type(salted)(salted.id, salted.prompt, 2, salted.sampling, cache_salt="mine")
    (other,) = engine.answers([salted])
    assert other.outputs[0].cached_tokens == 0
    assert other.tokens == again.tokens


def test_a_request_repeats_alone_and_in_a_crowd(engine):
    wanted = [engine.spec([11, 12, 13], 40, temperature=1.2, seed=5, top_k=50, min_p=0.01) for _ in range(3)]
    crowd = [engine.spec([i + 1] * (1 + 20 * i), 30, temperature=1.5, seed=i) for i in range(20)]
    (alone,) = engine.answers(wanted[:1])
    together = engine.answers([*crowd[:10], wanted[1], *crowd[10:], wanted[2]])
    assert together[10].tokens == together[-1].tokens == alone.tokens


def test_what_the_engine_recorded_replays_to_the_same_actions(engine):
    engine.answers([engine.spec([3] * 100, 10) for _ in range(5)])
    assert replay(engine.log) > 20


def pss(pid):
    """(PSS of the shared pool, private memory) of a process, in bytes."""
    shared = private = 0
    in_pool = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            in_pool = "tidegate-pool" in line
        elif fields[0] == "Pss:" and in_pool:
            shared += int(fields[1]) * 1024
        elif fields[0] in ("Private_Dirty:", "Private_Clean:") and not in_pool:
            private += int(fields[1]) * 1024
    return shared, private


def test_two_lanes_hold_one_copy_of_the_weights(tmp_path):
    """On a model whose weights (210 MB) outweigh all else in the lanes."""
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 1024,
             "intermediate_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4,
             "max_position_embeddings": 256, "rms_norm_eps": 1e-5}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with EngineDriver(EngineConfig(model=str(tmp_path), load_format="dummy", num_blocks=64)) as engine:
        engine.answers([engine.spec([i + 1] * 100, 8) for i in range(4)])
        info = engine.engine.info
        weights = info.weight_bytes
        assert weights > 150e6
        readings = [pss(pid) for pid in (engine.engine.process.pid, *info.lane_pids.values())]
    assert len(readings) == 3
    assert 0.95 * weights < sum(shared for shared, _ in readings) < 1.05 * weights + info.kv_bytes
    assert all(shared > 0.25 * weights for shared, _ in readings), "every process maps all of them"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "turbo"}, "choose one of"),
        ({"model": "/nowhere/model"}, "no file or directory"),
        ({"max_model_len": 5000, "num_blocks": 10}, "--max-model-len"),
        ({"num_blocks": 0}, "KV cache"),
        ({"kv_cache_memory_bytes": 10}, "KV cache"),
        ({"gpu_memory_utilization": 1e-9}, "weights alone"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
    ],
)
def test_settings_that_cannot_work_end_with_one_sentence(tiny_model, settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineDriver(EngineConfig(**{"model": tiny_model[0], **settings})).__exit__()
