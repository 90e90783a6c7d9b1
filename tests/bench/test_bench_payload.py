"""Bodies ask for what was planned, and prompts are alike only where they are meant to be."""

import json

import pytest

from tidegate.bench.payload import Payloads
from tidegate.bench.workloads import Request


def test_a_completion_asks_for_exactly_so_many_tokens_in_and_out():
    body = json.loads(Payloads("m", vocab_size=5000).body(1, 0, Request(123, 45)))
    assert len(body.pop("prompt")) == 123
    assert body == {
        "model": "m",
        "max_tokens": 45,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


def test_what_a_server_may_not_know_can_be_left_out():
    body = json.loads(Payloads("m", ignore_eos=False, include_usage=False).body(1, 0, Request(3, 4)))
    assert "ignore_eos" not in body
    assert "stream_options" not in body


def test_a_chat_sends_as_many_words_as_tokens_are_asked_for():
    body = json.loads(Payloads("m", endpoint="chat").body(1, 0, Request(123, 45)))
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split(" ")) == 123
    assert "prompt" not in body


@pytest.mark.parametrize("vocab_size", [2, 500, 32000])
def test_token_ids_are_in_the_vocabulary(vocab_size):
    prompt = Payloads("m", vocab_size=vocab_size).prompt(1, 0, Request(2000, 1))
    assert 0 <= min(prompt) <= max(prompt) < vocab_size


def test_prompts_repeat_with_the_seed_and_differ_between_requests_runs_and_seeds():
    request = Request(64, 1)
    prompts = [
        Payloads("m", seed=seed).prompt(run, index, request)
        for seed, run, index in [(0, 1, 0), (0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0)]
    ]
    assert prompts[0] == prompts[1]
    assert len({tuple(prompt) for prompt in prompts}) == 4
