"""An engine with int8 weights: one copy of the packed ones, and the same tokens in every mode and batch mix."""

import json
from pathlib import Path

from engine_driver import SLO, EngineDriver, mixed_prompts

from tidegate.node.config import EngineConfig

VOCAB = 193


def test_greedy_tokens_are_the_same_alone_in_a_crowd_and_after_a_restart_in_every_mode(tiny_model):
    prompts = mixed_prompts(12, 300, VOCAB, seed=1)
    settings = EngineConfig(
        model=tiny_model[0], quantization="int8", max_model_len=400, num_blocks=600, prefix_caching=False, slo=SLO
    )
    with EngineDriver(settings) as engine:
        differing, compared = engine.differing_from_alone(prompts, 16)
        assert engine.stats().lanes["D"].restarts == 1
    assert not differing, f"{differing} of {compared} requests"


def memory(pid):
    """(private, shared) bytes of a process's memory that is no file's; shared is its part of what several hold."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kib = {name: int(value.split()[0]) for name, value in fields.items()}
    private = kib["Private_Dirty"]
    return private * 1024, (kib["Pss_Anon"] - private) * 1024


def test_two_lanes_hold_one_copy_of_the_packed_weights_and_so_does_a_restarted_one(tmp_path):
    """On a model whose int8 weights (480 MB) outweigh all else in the lanes: kernels compiled there, too."""
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 2048,
             "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
             "max_position_embeddings": 256, "rms_norm_eps": 1e-5}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = EngineConfig(model=str(tmp_path), load_format="dummy", num_blocks=64, quantization="int8")
    with EngineDriver(settings) as engine:
        packed = 0.95 * engine.engine.info.weight_bytes
        assert packed > 400e6
        specs = [engine.spec([i + 1] * 100, 8) for i in range(4)]
        before = engine.answers(specs)
        readings = [memory(pid) for pid in descendants(engine.engine.process.pid)]
        assert len(readings) == 3
        assert all(private < 0.3 * packed for private, _ in readings), "no process has weights of its own"
        assert all(shared > 0.3 * packed for _, shared in readings), "each has a third of the one copy"
        again = engine.answers(
            [engine.spec([i + 1] * 100, 8) for i in range(4)], meanwhile=engine.kill_lane("D", after_outputs=2)
        )
        assert [a.tokens for a in again] == [a.tokens for a in before]
        assert engine.stats().lanes["D"].restarts == 1
        for pid in descendants(engine.engine.process.pid):
            assert memory(pid)[0] < 0.3 * packed, "and after a restart there is still only one copy"


def descendants(pid):
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]
