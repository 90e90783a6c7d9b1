"""Ranks as processes, as on GPUs, over the CPU: the whole engine, whose lanes are threads in each rank's process."""

import asyncio
import os
from pathlib import Path

import pytest
from engine_driver import SLO, EngineDriver

from tidegate.base.errors import ConfigError
from tidegate.node.config import EngineConfig
from tidegate.policy.modes import MODES

AS_GPU = Path(__file__).parent / "cpu_as_gpu"


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(AS_GPU), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def config(model, **more):
    asked = {"max_model_len": 300, "num_blocks": 60, "max_num_seqs": 16, "slo": SLO, "tensor_parallel_size": 2}
    return EngineConfig(model=model, device="cuda", dtype="float32", **asked | more)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_processes_give_transformers_greedy_tokens_in_every_mode(tiny_model, references):
    short = [r for r in references if len(r.prompt) < 250][:12]
    with EngineDriver(config(tiny_model[0])) as engine:
        assert engine.engine.info.device.startswith("2 × CPU")
        for mode in MODES:
            engine.run(engine.engine.set_mode(mode))
            answers = engine.answers([engine.spec(r.prompt, len(r.tokens)) for r in short])
            ties = sum(r.check(a.tokens, mode) for r, a in zip(short, answers, strict=True))
            assert ties <= len(short) // 4, "ties should be rare"
        assert engine.stats().blocks_used == 0


def test_a_killed_rank_ends_the_engine_with_its_name_and_requests_with_a_reason(tiny_model):
    with EngineDriver(config(tiny_model[0])) as engine:
        (other,) = children(engine.engine.process.pid)
        spec = engine.spec([1, 2, 3], 290, min_tokens=290)
        engine.run(asyncio.wait_for(engine.ends_with_a_lost_rank(other, spec), 60))


def test_when_the_node_is_killed_the_other_rank_ends(tiny_model):
    with EngineDriver(config(tiny_model[0])) as engine:
        (other,) = children(engine.engine.process.pid)
        engine.engine.process.kill()

        async def gone():
            while Path(f"/proc/{other}").exists():
                await asyncio.sleep(0.05)

        engine.run(asyncio.wait_for(gone(), 30))


def test_more_ranks_than_gpus_are_refused(tiny_model):
    with pytest.raises(ConfigError, match="needs as many GPUs, and there are 2"):
        EngineDriver(config(tiny_model[0], tensor_parallel_size=4))
