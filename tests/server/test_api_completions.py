import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.server.fake import Script, fake_info

TEXT = "Tides rise and fall: 日本 🙂 naïve. The END of it."


@pytest.fixture(scope="module")
def says(live, smollm):
    """Its model says TEXT, whatever the prompt."""
    return live(lambda request: Script(smollm.encode(TEXT), cached_tokens=3))


def length(smollm) -> int:
    return len(smollm.encode(TEXT))


def stream_events(server, path, **body):
    """All ``data:`` payloads of a stream, as they are on the wire."""
    with server.http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def test_a_completion_has_text_finish_reason_and_usage(says, smollm):
    answer = says.openai.completions.create(model="smol", prompt="Say it", max_tokens=length(smollm))
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "smol")
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "length"
    prompt = len(smollm.encode("Say it"))
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == length(smollm)
    assert answer.usage.total_tokens == prompt + length(smollm)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_without_max_tokens_there_are_sixteen(says):
    answer = says.openai.completions.create(model="smol", prompt="Say it")
    assert answer.usage.completion_tokens == 16


def test_a_stream_has_one_event_for_every_token_and_the_same_text(says, smollm):
    chunks = list(says.openai.completions.create(model="smol", prompt="x", max_tokens=length(smollm), stream=True))
    assert len(chunks) == length(smollm)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_usage_if_asked_and_done(says, smollm):
    events = stream_events(says, "/v1/completions", prompt="x", max_tokens=4, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    *tokens, total = [json.loads(event) for event in events[:-1]]
    assert len(tokens) == 4
    assert all(event["usage"] is None for event in tokens)
    assert total["choices"] == []
    assert total["usage"]["completion_tokens"] == 4


def test_continuous_usage_counts_every_token(says):
    events = stream_events(
        says,
        "/v1/completions",
        prompt="x",
        max_tokens=4,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_a_prompt_may_have_any_of_four_forms(echo, smollm, form):
    ids = smollm.encode("up and down")
    prompt = {"text": "up and down", "texts": ["up and down"] * 2, "ids": ids, "lists of ids": [ids, ids]}[form]
    answer = echo.openai.completions.create(model="smol", prompt=prompt, max_tokens=len(ids))
    prompts = 2 if form in ("texts", "lists of ids") else 1
    assert [choice.text for choice in answer.choices] == ["up and down"] * prompts
    assert answer.usage.prompt_tokens == len(ids) * prompts


def test_n_choices_of_each_prompt_are_numbered_in_order_and_seeded_apart(echo, smollm):
    before = len(echo.engine.submitted)
    answer = echo.openai.completions.create(model="smol", prompt=["one", "two"], n=2, seed=7, max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["one", "one", "two", "two"]
    specs = echo.engine.submitted[before:]
    assert [spec.sampling.seed for spec in specs] == [7, 8, 7, 8]
    assert len({spec.id for spec in specs}) == 4
    assert answer.usage.prompt_tokens == len(smollm.encode("one")) + len(smollm.encode("two"))
    assert answer.usage.completion_tokens == 4


def test_a_stream_of_several_choices_has_all_events_of_each(echo):
    chunks = list(
        echo.openai.completions.create(model="smol", prompt=[[300, 301], [302, 303]], n=2, max_tokens=5, stream=True)
    )
    for index in range(4):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert len(mine) == 5
        assert mine[-1].finish_reason == "length"


def test_a_request_repeats_by_its_seed_and_else_gets_a_fresh_one(echo):
    before = len(echo.engine.submitted)
    for seed in (-1, None, None):
        echo.openai.completions.create(model="smol", prompt="x", max_tokens=1, seed=seed)
    given, *fresh = [spec.sampling.seed for spec in echo.engine.submitted[before:]]
    assert given == (1 << 63) - 1
    assert fresh[0] != fresh[1]


def test_echo_puts_the_prompt_before_the_text(says, smollm):
    answer = says.openai.completions.create(model="smol", prompt="Say: ", max_tokens=length(smollm), echo=True)
    assert answer.choices[0].text == "Say: " + TEXT
    chunks = says.openai.completions.create(
        model="smol", prompt="Say: ", max_tokens=length(smollm), echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Say: " + TEXT


def test_all_sampling_parameters_reach_the_engine(echo, smollm):
    echo.openai.completions.create(
        model="smol",
        prompt="x",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": 2.5},
        seed=3,
        logprobs=2,
        extra_body={
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [77],
            "priority": -4,
            "cache_salt": "mine",
        },
    )
    spec = echo.engine.submitted[-1]
    sampling = spec.sampling
    assert (spec.max_tokens, spec.priority, spec.cache_salt) == (9, -4, "mine")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (sampling.logit_bias, sampling.seed, sampling.logprobs, sampling.min_tokens) == ({5: 2.5}, 3, 2, 2)
    assert sampling.stop_token_ids == (*smollm.eos_ids, 77)


def test_ignore_eos_leaves_only_the_stop_ids_that_were_given(echo):
    extra = {"ignore_eos": True, "stop_token_ids": [5]}
    echo.openai.completions.create(model="smol", prompt="x", max_tokens=1, extra_body=extra)
    assert echo.engine.submitted[-1].sampling.stop_token_ids == (5,)


def test_a_request_that_is_silent_gets_openais_defaults(echo):
    echo.http.post("/v1/completions", json={"prompt": "x"})
    sampling = echo.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, 1.0, 0, None)


# ---- stops


@pytest.fixture(scope="module")
def scripted(live):
    """Its model says exactly the prompt's tokens; several at a step, as the prompt's length decides."""
    return live(lambda request: Script(request.prompt, tokens_per_step=1 + len(request.prompt) % 3))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet="ab é🙂", min_size=1, max_size=12),
    stops=st.lists(st.text(alphabet="ab é🙂", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_streamed_text_is_whole_text_and_ends_before_the_first_stop_string(scripted, smollm, text, stops):
    tokens = [token for letter in text for token in smollm.encode(letter)]
    body = {"prompt": tokens, "max_tokens": len(tokens), "stop": stops}
    whole = scripted.http.post("/v1/completions", json=body).json()["choices"][0]
    chunks = [json.loads(event)["choices"][0] for event in stream_events(scripted, "/v1/completions", **body)[:-1]]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = text
    if ends:
        expected = text[: min(text.find(stop) for stop in stops if text[: min(ends)].endswith(stop))]
    assert whole["text"] == "".join(chunk["text"] for chunk in chunks) == expected
    reason = "stop" if ends else "length"
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == reason


def test_a_stop_string_over_several_tokens_ends_the_engines_request(live, smollm):
    server = live(lambda request: Script(smollm.encode(TEXT), wait_steps=1))
    answer = server.openai.completions.create(model="smol", prompt="x", max_tokens=500, stop=["The END"])
    assert answer.choices[0].text == TEXT.partition("The END")[0]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "The END"
    assert server.engine.aborted == [server.engine.submitted[0].id]


def test_events_come_for_tokens_whose_text_is_held_back(says, smollm):
    until = TEXT.index("The END") + len("The END")
    chunks = list(
        says.openai.completions.create(model="smol", prompt="x", max_tokens=500, stop=[TEXT[:until]], stream=True)
    )
    assert len(chunks) == len(smollm.encode(TEXT[:until]))
    assert all(chunk.choices[0].text == "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_string_may_be_kept(says):
    extra = {"include_stop_str_in_output": True}
    answer = says.openai.completions.create(model="smol", prompt="x", max_tokens=500, stop="fall", extra_body=extra)
    assert answer.choices[0].text == "Tides rise and fall"


def test_stop_strings_count_only_after_min_tokens(says, smollm):
    extra = {"min_tokens": len(smollm.encode("Tides rise"))}
    answer = says.openai.completions.create(model="smol", prompt="x", max_tokens=500, stop="s", extra_body=extra)
    assert answer.choices[0].text.startswith("Tides rise and fall")


def test_the_text_of_an_end_token_is_not_shown(live, smollm):
    server = live(lambda request: Script([*smollm.encode("bye"), smollm.eos_ids[0]]))
    answer = server.openai.completions.create(model="smol", prompt="x", max_tokens=50)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bye", "stop")
    assert answer.choices[0].stop_reason is None
    assert answer.usage.completion_tokens == len(smollm.encode("bye")) + 1
    extra = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    answer = server.openai.completions.create(model="smol", prompt="x", max_tokens=50, extra_body=extra)
    assert answer.choices[0].text == "bye<|im_end|>"


def test_a_stop_id_is_reported_and_its_text_only_if_asked(says, smollm):
    stop = smollm.encode(" fall")[0]
    extra = {"stop_token_ids": [stop]}
    answer = says.openai.completions.create(model="smol", prompt="x", max_tokens=50, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].stop_reason) == ("Tides rise and", stop)
    extra["include_stop_str_in_output"] = True
    answer = says.openai.completions.create(model="smol", prompt="x", max_tokens=50, extra_body=extra)
    assert answer.choices[0].text == "Tides rise and fall"


# ---- log-probabilities and token ids


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_lists_of_one_entry_a_token(says, smollm, stream):
    answer = says.openai.completions.create(
        model="smol", prompt="x", max_tokens=length(smollm), logprobs=2, stream=stream
    )
    found = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    tokens = [token for part in found for token in part.tokens]
    offsets = [offset for part in found for offset in part.text_offset]
    assert len(tokens) == len(offsets) == length(smollm)
    assert [value for part in found for value in part.token_logprobs] == [-0.25] * len(tokens)
    assert all(2 <= len(best) <= 3 for part in found for best in part.top_logprobs)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:\\x") or TEXT.startswith(token, offset)


def test_token_ids_can_be_told(says, smollm):
    extra = {"return_token_ids": True}
    answer = says.openai.completions.create(model="smol", prompt="x", max_tokens=5, extra_body=extra)
    assert answer.choices[0].token_ids == smollm.encode(TEXT)[:5]
    chunks = says.openai.completions.create(model="smol", prompt="x", max_tokens=5, stream=True, extra_body=extra)
    assert [chunk.choices[0].token_ids for chunk in chunks] == [[token] for token in smollm.encode(TEXT)[:5]]


def test_a_model_without_tokenizer_takes_token_ids_and_says_nothing(live):
    server = live(tokenizer=None, info=fake_info(vocab_size=100, eos_ids=(9,)))
    answer = server.openai.completions.create(
        model="smol", prompt=[1, 2, 3], max_tokens=3, logprobs=1, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].text == ""
    assert answer.choices[0].token_ids == [1, 2, 3]
    assert answer.choices[0].logprobs.tokens == ["token_id:1", "token_id:2", "token_id:3"]
    assert server.engine.submitted[0].sampling.stop_token_ids == (9,)
    for path, body in (
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"prompt": "text"}),
    ):
        refused = server.http.post(path, json=body)
        assert refused.status_code == 400
        assert "has no tokenizer" in refused.json()["error"]["message"]
