"""The process that lanes are forked from: lanes outlive it, and it outlives nobody."""

import asyncio
import os
import signal
from pathlib import Path

from engine_driver import EngineDriver

from tidegate.node.config import EngineConfig

MAX_TOKENS = 300  # enough for a lane to be killed long before the last


def config(model):
    return EngineConfig(model=model, max_model_len=400, num_blocks=600)


def children(pid):
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def stem(engine):
    """Of the engine's child processes, the one that is no lane."""
    (pid,) = children(engine.engine.process.pid) - set(engine.engine.info.lane_pids.values())
    return pid


async def until(condition):
    while not condition():
        await asyncio.sleep(0.02)


def test_lanes_serve_on_without_their_stem_and_a_lost_one_comes_back_from_a_new_stem(tiny_model):
    with EngineDriver(config(tiny_model[0])) as engine:
        node = engine.engine.process.pid
        (before,) = engine.answers([engine.spec([1, 2, 3], MAX_TOKENS)])
        first = stem(engine)
        os.kill(first, signal.SIGKILL)
        engine.run(asyncio.wait_for(until(lambda: first not in children(node)), 10))
        (without,) = engine.answers([engine.spec([1, 2, 3], MAX_TOKENS)])
        killing = engine.kill_lane("D", after_outputs=3)
        (after,) = engine.answers([engine.spec([1, 2, 3], MAX_TOKENS)], meanwhile=killing)
        assert engine.stats().lanes["D"].restarts == 1
        assert before.tokens == without.tokens == after.tokens


def test_no_process_is_left_when_an_engine_is_closed(tiny_model):
    with EngineDriver(config(tiny_model[0])) as engine:
        processes = {stem(engine), *engine.engine.info.lane_pids.values(), engine.engine.process.pid}
        assert len(processes) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


def test_a_stopped_lane_does_not_keep_the_engine_from_closing(tiny_model):
    with EngineDriver(config(tiny_model[0])) as engine:
        lane = engine.engine.info.lane_pids["P"]
        os.kill(lane, signal.SIGSTOP)
    assert not Path(f"/proc/{lane}").exists()
