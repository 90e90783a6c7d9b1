import json

import openai
import pytest

from tidegate.server.fake import Script, fake_info

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def small(live):
    """A model with 100 tokens of context and a vocabulary of 1000, behind a small body limit."""
    info = fake_info(max_model_len=100, vocab_size=49152)
    return live(info=info, max_body_bytes=4096, max_choices=8)


def refused(response, status, param=None, code=None):
    """Checks that the answer is an error in OpenAI's shape, and returns its sentence."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 and status != 429 else error["type"])
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error["message"]


BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": [[1, 2], [10**12]]}, "prompt"),
    ({"prompt": [1] * 100}, "prompt"),
    ({"prompt": [1] * 60, "max_tokens": 41}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1 << 64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"prompt": ["a"] * 3, "n": 3}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [49152]}, "stop_token_ids"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"suffix": "end"}, "suffix"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
]

BAD_CHATS = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "long " * 100}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:60])
def test_a_bad_completion_is_refused_with_the_field_at_fault(small, body, param):
    before = len(small.engine.submitted)
    base = {"prompt": "hi"} if body else {}
    message = refused(small.http.post("/v1/completions", json=base | body), 400, param)
    assert param.partition("[")[0] in message or param == "n"
    assert message.endswith(".")
    assert len(small.engine.submitted) == before


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=lambda value: str(value)[:60])
def test_a_bad_chat_is_refused_with_the_field_at_fault(small, body, param):
    before = len(small.engine.submitted)
    message = refused(small.http.post("/v1/chat/completions", json={"messages": CHAT} | body), 400, param)
    assert message.endswith(".")
    assert len(small.engine.submitted) == before


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "unknown": 1},
        {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"temperature": None, "max_tokens": None, "stop": None, "tools": None, "n": None, "stream": None},
    ],
)
def test_what_does_not_change_the_answer_is_accepted(small, body):
    answer = small.http.post("/v1/chat/completions", json={"messages": CHAT, "max_completion_tokens": 2} | body)
    assert answer.status_code == 200


def test_the_context_length_is_told_as_openai_tells_it(small):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 100 tokens") as caught:
        small.openai.completions.create(model="smol", prompt=[1] * 60, max_tokens=41)
    assert caught.value.code == "context_length_exceeded"
    assert small.openai.completions.create(model="smol", prompt=[1] * 60, max_tokens=40).usage.total_tokens == 100


def test_the_default_limit_shrinks_to_what_is_left(small):
    assert small.openai.completions.create(model="smol", prompt=[1] * 95).usage.completion_tokens == 5


def test_an_unknown_model_is_not_found(small):
    with pytest.raises(openai.NotFoundError, match="This server has: smol") as caught:
        small.openai.completions.create(model="gpt-4", prompt="hi")
    assert caught.value.code == "model_not_found"
    refused(small.http.get("/v1/models/gpt-4"), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"hi"', b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 4000]
)
def test_a_body_that_is_no_json_object_is_refused(small, content):
    response = small.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    refused(response, 400, code="invalid_json")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_another_content_type_is_refused(small, kind):
    headers = {"content-type": kind} if kind else {}
    response = small.http.post("/v1/completions", content=b'{"prompt": "hi"}', headers=headers)
    assert "Content-Type: application/json" in refused(response, 415)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(small, chunked):
    content = json.dumps({"prompt": "x" * 5000}).encode()
    body = iter([content[:3000], content[3000:]]) if chunked else content
    response = small.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    refused(response, 413, code="body_too_large")


def test_an_unknown_path_and_a_wrong_method_are_told_in_the_same_shape(small):
    assert "/v1/chat/completions" in refused(small.http.post("/v1/nothing", json={}), 404)
    response = small.http.get("/v1/completions")
    refused(response, 405)
    assert response.headers["allow"] == "POST"


# ---- what the engine says


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "status", "code"),
    [
        ("rejected", 429, "overloaded"),
        ("invalid", 400, None),
        ("error", 500, "engine_error"),
        ("abort", 503, "aborted"),
    ],
)
def test_a_failure_before_the_first_token_has_a_status_of_its_own(live, finish, status, code, stream):
    server = live(lambda request: Script([1], finish=finish, reason="this is why"))
    for body in ({"prompt": "hi"}, {"prompt": ["hi", "ho"], "n": 2}):
        response = server.http.post("/v1/completions", json=body | {"stream": stream})
        assert refused(response, status, code=code) == "this is why"
        assert ("retry-after" in response.headers) == (status == 429)


def test_a_full_queue_is_an_overload_that_clients_know_to_retry(live):
    server = live(lambda request: Script([1], finish="rejected"))
    with pytest.raises(openai.RateLimitError) as caught:
        server.openai.completions.create(model="smol", prompt="hi")
    assert int(caught.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_within_a_stream_is_an_event_and_then_done(live, n):
    server = live(lambda request: Script([300], finish="error", fail_after=2, reason="a lane was lost"))
    with server.http.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True, "n": n}) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["message"] == "a lane was lost"
    assert sum("choices" in event for event in events) == 2 * n


def test_the_openai_client_raises_the_error_of_a_stream(live):
    server = live(lambda request: Script([300], finish="error", fail_after=1, reason="a lane was lost"))
    with pytest.raises(openai.APIError, match="a lane was lost"):
        list(server.openai.chat.completions.create(model="smol", messages=CHAT, stream=True))


def test_a_dead_engine_is_an_error_now_and_unhealthy_from_then_on(live):
    server = live(lambda request: Script([300], wait_steps=10**9), step_s=0.01)
    assert server.http.get("/health").status_code == 200
    server.call(server.engine.die)
    refused(server.http.get("/health"), 503, code="engine_dead")
    refused(server.http.post("/v1/completions", json={"prompt": "hi"}), 500, code="engine_dead")
    assert "tidegate:engine_up{" in server.http.get("/metrics").text


def test_our_own_bugs_are_errors_in_the_same_shape_that_tell_nothing(live, smollm):
    class Broken:
        eos_ids = ()

        def encode(self, text, add_special_tokens):
            raise ZeroDivisionError("a secret")

    server = live(tokenizer=Broken())
    response = server.http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-request-id": "a"})
    assert "secret" not in refused(response, 500, code="internal_error")
    assert response.headers["x-request-id"] == "a"


def test_a_request_id_is_taken_over_and_else_made(echo):
    response = echo.http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-request-id": "my-id.1"})
    assert response.headers["x-request-id"] == "my-id.1"
    assert response.json()["id"] == "cmpl-my-id.1"
    for bad in ("", "a b", "x" * 200):
        response = echo.http.get("/health", headers={"x-request-id": bad})
        assert response.headers["x-request-id"] not in ("", bad)
    assert echo.http.get("/nothing").headers["x-request-id"]
