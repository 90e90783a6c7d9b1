"""Sampling on a GPU is enqueued like everything else: nothing in a step waits for the device."""

import pytest
import torch
from gpu_lane import Lane

from tidegate.base.batch import SlotSetup
from tidegate.base.request import SamplingParams

PROMPT = list(range(1, 65))
WAYS = {
    "random": SamplingParams(temperature=0.9, seed=1),
    "top-p": SamplingParams(temperature=0.9, top_p=0.9, seed=1),
    "top-k and min-p": SamplingParams(temperature=0.9, top_k=20, top_p=0.8, min_p=0.02, seed=1),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    "bias and barred": SamplingParams(logit_bias={5: 3.0, 9: -100.0}, min_tokens=4, stop_token_ids=(7, 8)),
    "logprobs": SamplingParams(logprobs=5),
}


@pytest.fixture(scope="module")
def lane(tiny_on_gpu):
    return Lane(tiny_on_gpu[0])


@pytest.mark.parametrize("way", [*WAYS, "all together"])
def test_a_step_that_samples_is_enqueued_while_the_one_before_it_still_runs(lane, way):
    asked = list(WAYS.values()) if way == "all together" else [WAYS[way]]
    place = lane.places.of("D", 1.0)
    setups = [SlotSetup(slot, len(PROMPT), params) for slot, params in enumerate(asked)]

    def run():
        for slot in range(len(asked)):
            lane.runner.enqueue(lane.prefill(PROMPT, slot, [setups[slot]]), place).collect()
        return lane.runner.enqueue(lane.decode(*[64] * len(asked)), place)

    expected = run().collect()  # compiles and captures too
    lane.runner.enqueue(lane.decode(*[64] * len(asked)), place).collect()
    with torch.cuda.stream(place.stream):
        torch.cuda._sleep(2_000_000_000)  # about a second
    torch.cuda.set_sync_debug_mode("error")
    try:
        enqueued = lane.runner.enqueue(lane.decode(*[64] * len(asked)), place)
        waited = enqueued.start.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waited, "the host went on before the device had begun"
    result = enqueued.collect()
    assert result.tokens == expected.tokens and result.logprobs == expected.logprobs
