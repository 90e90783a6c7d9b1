"""Steps enqueued and collected later give what steps run one after another give."""

import pytest
from tiny_lane import MODEL, WEIGHTS, batch, generate, new_pool, new_runner

from tidegate.base.batch import Slice, SlotSetup
from tidegate.base.request import SamplingParams
from tidegate.device.places import Place
from tidegate.runner.eager_runner import EagerRunner

PROMPTS = [[5, 17, 80, 3, 44, 61, 2, 9], [64, 1, 7, 7, 20]]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.1, top_p=0.9, top_k=30, seed=7, repetition_penalty=1.3, logit_bias={4: 2.0}),
]


@pytest.fixture
def eager():
    return EagerRunner.over(MODEL, WEIGHTS, new_pool())


def test_steps_enqueued_ahead_in_changing_places_give_the_tokens_of_a_runner(eager):
    expected = [
        generate(new_runner(new_pool()), prompt, 6, params, slot)
        for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    places = [Place(), Place()]
    setups = [SlotSetup(slot, len(prompt), PARAMS[slot]) for slot, prompt in enumerate(PROMPTS)]
    steps = [batch([Slice(slot, 0, prompt, True) for slot, prompt in enumerate(PROMPTS)], setups=setups)]
    steps += [batch(decodes={slot: len(prompt) + i for slot, prompt in enumerate(PROMPTS)}) for i in range(5)]
    enqueued = [eager.enqueue(step, places[i % 2]) for i, step in enumerate(steps)]
    results = [step.collect() for step in enqueued]
    assert [list(tokens) for tokens in zip(*(result.tokens for result in results), strict=True)] == expected
    assert all(result.seconds >= 0 for result in results)


def test_a_slice_that_does_not_reach_its_prompts_end_gives_no_token(eager):
    result = eager.enqueue(batch([Slice(0, 0, PROMPTS[0][:4], False)]), Place()).collect()
    assert result.tokens == [] and result.logprobs is None


def test_logprobs_come_with_the_rows_that_ask(eager):
    setups = [SlotSetup(0, 8, SamplingParams()), SlotSetup(1, 5, SamplingParams(logprobs=3))]
    step = batch([Slice(slot, 0, prompt, True) for slot, prompt in enumerate(PROMPTS)], setups=setups)
    result = eager.enqueue(step, Place()).collect()
    assert result.logprobs == new_runner(new_pool()).run(step).logprobs
    assert result.logprobs[0] is None and result.logprobs[1].top_ids[0] == result.tokens[1]
