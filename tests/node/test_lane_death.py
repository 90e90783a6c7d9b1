"""A lane's process may die at any time: it is started again and nobody notices but by the wait."""

import asyncio
import os

import pytest
from engine_driver import EngineDriver

from tidegate.base.errors import EngineDead
from tidegate.node.config import EngineConfig


def config(model, **more):
    return EngineConfig(model=model, max_model_len=2100, num_blocks=2000, max_num_batched_tokens=256, **more)


@pytest.mark.parametrize("lane", ["P", "D"])
def test_a_killed_lane_is_restarted_and_every_request_ends_once_with_the_same_tokens(tiny_model, references, lane):
    with EngineDriver(config(tiny_model[0])) as engine:
        specs = [engine.spec(r.prompt, len(r.tokens)) for r in references]
        answers = engine.answers(specs, meanwhile=engine.kill_lane(lane, after_outputs=10))
        for expected, answer in zip(references, answers, strict=True):
            assert answer.finish == "length"
            expected.check(answer.tokens, f"{lane} killed")
        stats = engine.stats()
        assert stats.lanes[lane].restarts == 1 and stats.lanes[lane].alive
        assert stats.blocks_used == 0


def test_sampled_tokens_too_are_the_same_after_a_lane_died(tiny_model):
    sampling = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.3, "min_tokens": 60}
    prompts = [[i + 1] * (5 + 40 * i) for i in range(6)]
    with EngineDriver(config(tiny_model[0])) as engine:
        undisturbed = engine.answers([engine.spec(p, 60, **sampling) for p in prompts])
        killing = engine.kill_lane("D", after_outputs=100)
        again = engine.answers([engine.spec(p, 60, **sampling) for p in prompts], meanwhile=killing)
        assert engine.stats().lanes["D"].restarts == 1
    assert [a.tokens for a in again] == [a.tokens for a in undisturbed]


def test_when_the_engine_itself_dies_every_request_ends_with_an_error(tiny_model):
    with EngineDriver(config(tiny_model[0])) as engine:

        async def work():
            stream = engine.engine.submit(engine.spec([1, 2, 3], 1500))
            await anext(stream)
            engine.engine.process.kill()
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
            assert not engine.engine.alive
            with pytest.raises(EngineDead):
                engine.engine.submit(engine.spec([1], 1))
            with pytest.raises(EngineDead):
                await engine.engine.stats()

        engine.run(work())
        pids = engine.engine.info.lane_pids.values()

        async def gone():
            while any(alive(pid) for pid in pids):
                await asyncio.sleep(0.05)

        engine.run(asyncio.wait_for(gone(), 20))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
