"""Each form of sharing on a GPU: the same tokens, what lanes really have, and shares that move without a stall."""

import time

import pytest
from across_modes import move_shares
from engine_driver import EngineDriver, mixed_prompts
from test_gpu_engine import MAX_TOKENS, check, config

from tidegate.device.places import FORMS

SMS_WAIT_S = 10.0


@pytest.mark.parametrize("form", list(FORMS))
def test_tokens_are_transformers_in_every_form_of_sharing(tiny_on_gpu, form):
    path, model = tiny_on_gpu
    prompts = mixed_prompts(24, 2000, 1000, seed=6)
    with EngineDriver(config(path, mode="semi", sharing=form, prefix_caching=False)) as engine:
        specs = [engine.spec(prompt, MAX_TOKENS) for prompt in prompts]
        check(model, prompts, engine.answers(specs, meanwhile=move_shares(engine.engine)), form)
        assert engine.stats().blocks_used == 0


def moved(engine, share, expected):
    """Whether both lanes, P and D, come to run on so many SMs once P's share is this."""
    engine.run(engine.engine.set_shares({"P": share, "D": 1 - share}))
    end = time.monotonic() + SMS_WAIT_S
    while time.monotonic() < end:
        lanes = engine.stats().lanes
        if (lanes["P"].sms, lanes["D"].sms) == expected:
            return True
        time.sleep(0.02)
    return False


def test_lanes_report_the_sms_that_their_kernels_run_on(tiny_on_gpu):
    from tidegate.device.green_contexts import SmParts

    parts = SmParts()
    for form, whole in (("disjoint", False), ("capped", True)):
        with EngineDriver(config(tiny_on_gpu[0], mode="semi", sharing=form)) as engine:
            for share in (0.5, 0.3, 0.7):
                first, rest = parts.pair(share)
                assert moved(engine, share, (first.sms, parts.total if whole else rest.sms))
            assert all(lane.extra_memory_bytes > 0 for lane in engine.stats().lanes.values())
    with EngineDriver(config(tiny_on_gpu[0], mode="semi", sharing="streams")) as engine:
        assert moved(engine, 0.3, (parts.total, parts.total))


def test_a_graph_for_another_part_is_captured_without_giving_the_device_work_or_waiting_for_it(tiny_on_gpu):
    """A step that is running when a graph is captured for another part is still running afterwards, and is right."""
    import torch
    from gpu_lane import Lane

    lane = Lane(tiny_on_gpu[0])
    first, second = lane.places.of("D", 0.5), lane.places.of("D", 0.3)
    step = lane.prefill(list(range(1, 65)))
    expected = lane.runner.enqueue(step, first).collect().tokens
    decode = lane.decode(64)
    after = lane.runner.enqueue(decode, first).collect().tokens
    with torch.cuda.stream(first.stream):
        torch.cuda._sleep(2_000_000_000)  # about a second
    running = lane.runner.enqueue(step, first)
    lane.runner.prepare(lane.shape(step), second)
    lane.runner.prepare(lane.shape(decode), second)
    assert not running.done.query(), "capturing waited for the step that runs"
    following = lane.runner.enqueue(decode, second)
    assert running.collect().tokens == expected
    assert following.collect().tokens == after


def test_a_capture_leaves_alone_what_a_step_that_has_been_launched_is_yet_to_read(tiny_on_gpu, monkeypatch):
    """The lists of blocks belong to the lane, and planning a new graph's shape must not write them."""
    import torch
    from gpu_lane import Lane

    from tidegate.base.batch import Batch
    from tidegate.runner.step_graph import StepGraph

    lane = Lane(tiny_on_gpu[0])
    first, second = lane.places.of("D", 0.5), lane.places.of("D", 0.3)
    slot = 3  # whose blocks are not those that a shape is planned with
    steps = [lane.prefill(list(range(1, 65)), slot), Batch(1, 1.0, [], [slot], [64], [], [])]
    expected = [lane.runner.enqueue(step, first).collect().tokens for step in steps]
    replay = StepGraph.replay

    def late(graph):
        torch.cuda._sleep(2_000_000_000)  # about a second, after all that the step reads has been copied
        replay(graph)

    monkeypatch.setattr(StepGraph, "replay", late)
    for step, tokens in zip(steps, expected, strict=True):
        running = lane.runner.enqueue(step, first)
        lane.runner.prepare(lane.shape(step), second)
        assert not running.done.query()
        assert running.collect().tokens == tokens
