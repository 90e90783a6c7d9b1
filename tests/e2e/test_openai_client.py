"""The real openai client against the real server with the real model."""

import asyncio
import json
import math

import httpx
import openai
import pytest
import torch

NAME = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def prompt_ids(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_a_chat_streams_what_it_answers_at_once_and_counts_as_the_tokenizer_does(client, smollm2):
    _, _, tokenizer = smollm2
    whole = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=40)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.prompt_tokens == len(prompt_ids(tokenizer, QUESTION))
    stream = client.chat.completions.create(
        model=NAME, messages=QUESTION, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "stop"


def test_logprobs_are_transformers_log_softmax(client, smollm2):
    _, model, tokenizer = smollm2
    prompt = "The gate moves with the tide, and the water"
    completion = client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=8, logprobs=3)
    logprobs = completion.choices[0].logprobs
    ids = tokenizer(prompt).input_ids
    generated = tokenizer(completion.choices[0].text, add_special_tokens=False).input_ids
    assert completion.usage.completion_tokens == len(logprobs.tokens) == 8
    assert "".join(logprobs.tokens) == completion.choices[0].text
    with torch.inference_mode():
        expected = model(torch.tensor([ids + generated])).logits[0].float().log_softmax(-1)
    for i, token in enumerate(generated):
        row = expected[len(ids) - 1 + i]
        assert math.isclose(logprobs.token_logprobs[i], float(row[token]), abs_tol=2e-3)
        best = sorted(logprobs.top_logprobs[i].values(), reverse=True)[:3]
        assert torch.allclose(torch.tensor(best), row.topk(3).values, atol=2e-3)


def test_a_stop_string_ends_the_answer_before_it(client):
    free = client.completions.create(model=NAME, prompt="1, 2, 3, 4,", temperature=0, max_tokens=24)
    stop = free.choices[0].text[8:11]
    ended = client.completions.create(model=NAME, prompt="1, 2, 3, 4,", temperature=0, max_tokens=24, stop=[stop])
    assert ended.choices[0].text == free.choices[0].text.split(stop)[0]
    assert ended.choices[0].finish_reason == "stop"


def test_a_seed_repeats_an_answer_and_n_gives_different_ones(client):
    ask = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "seed": 5}
    first, again = client.completions.create(**ask), client.completions.create(**ask)
    assert first.choices[0].text == again.choices[0].text
    several = client.completions.create(**ask, n=3)
    texts = [choice.text for choice in several.choices]
    assert texts[0] == first.choices[0].text and len(set(texts)) == 3
    assert several.usage.completion_tokens == 36


def test_a_client_that_leaves_frees_its_blocks(server):
    async def work():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {"model": NAME, "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())
                assert (await http.get("/admin/stats")).json()["decoding"] == 1
            for _ in range(200):
                stats = (await http.get("/admin/stats")).json()
                if stats["decoding"] == 0 and stats["blocks_used"] == 0:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("the request was not aborted")

    asyncio.run(work())


def test_shares_and_modes_change_while_an_answer_streams(server, client):
    ask = {"model": NAME, "prompt": "One two three four", "max_tokens": 48, "temperature": 0}
    expected = client.completions.create(**ask).choices[0].text
    text = ""
    orders = iter(
        [("shares", {"prefill": 0.3, "decode": 0.7}), ("mode", {"mode": "chunked"}),
         ("mode", {"mode": "prefill-first"}), ("mode", {"mode": "semi"})]
    )  # fmt: skip
    for i, chunk in enumerate(client.completions.create(**ask, stream=True)):
        text += chunk.choices[0].text
        if i % 10 == 5:
            path, body = next(orders, (None, None))
            if path:
                answer = httpx.post(f"{server.url}/admin/{path}", json=body, timeout=60)
                assert answer.status_code == 200, answer.text
    assert text == expected
    assert httpx.get(f"{server.url}/admin/stats").json()["mode"] == "semi"


def test_metrics_tell_what_happened(server, client):
    client.completions.create(model=NAME, prompt="Hi", max_tokens=2)
    text = httpx.get(f"{server.url}/metrics").text
    for name in ("vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket", "tidegate:lane_busy_seconds"):
        assert name in text
    assert "tidegate:handover_copied_bytes_total{" in text


def test_bad_requests_get_a_sentence_and_disturb_nobody(server, client):
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=NAME, prompt="long " * 3000, max_tokens=10)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    answer = httpx.post(f"{server.url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and set(json.loads(answer.text)["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{server.url}/health").status_code == 200
