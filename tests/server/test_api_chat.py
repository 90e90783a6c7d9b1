import pytest

from tidegate.server.fake import Script

TEXT = "Hello 🙂 there"
MESSAGES = [{"role": "user", "content": "Greet me"}]


@pytest.fixture(scope="module")
def says(live, smollm):
    """Its model says TEXT and ends."""
    return live(lambda request: Script([*smollm.encode(TEXT), *smollm.eos_ids]))


def chat(server, messages=MESSAGES, **options):
    return server.openai.chat.completions.create(model="smol", messages=messages, **options)


def test_a_chat_answers_with_a_message(says, smollm):
    answer = chat(says)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.choices[0].finish_reason) == ("chat.completion", "stop")
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", TEXT)
    prompt = smollm.encode(smollm.render_chat(MESSAGES), add_special_tokens=False)
    assert says.engine.submitted[-1].prompt == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(smollm.encode(TEXT)) + 1


def test_a_chat_without_limit_has_all_that_is_left_of_the_context(says):
    chat(says)
    spec = says.engine.submitted[-1]
    assert spec.max_tokens == 8192 - len(spec.prompt)


def test_both_names_of_the_limit_are_understood(says):
    for name in ("max_tokens", "max_completion_tokens"):
        assert chat(says, **{name: 2}).choices[0].finish_reason == "length"


def test_a_stream_begins_with_the_role_and_has_one_event_for_every_token(says, smollm):
    first, *tokens = list(chat(says, stream=True))
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert len(tokens) == len(smollm.encode(TEXT)) + 1
    assert "".join(chunk.choices[0].delta.content for chunk in tokens) == TEXT
    assert tokens[-1].choices[0].finish_reason == "stop"
    assert {chunk.object for chunk in tokens} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in (first, *tokens)}) == 1


def test_a_stream_can_end_with_the_usage(says):
    *_, last = chat(says, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_several_choices_each_begin_with_the_role(says):
    chunks = [chunk.choices[0] for chunk in chat(says, stream=True, n=3)]
    for index in range(3):
        mine = [choice for choice in chunks if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content for choice in mine) == TEXT


def test_content_may_be_text_parts(says, smollm):
    parts = [{"type": "text", "text": "Greet"}, {"type": "text", "text": "me"}]
    chat(says, [{"role": "user", "content": parts}])
    expected = smollm.render_chat([{"role": "user", "content": "Greet\nme"}])
    assert says.engine.submitted[-1].prompt == smollm.encode(expected, add_special_tokens=False)


def test_a_last_message_can_be_continued(says, smollm):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, hel"}]
    chat(says, messages, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert smollm.decode(says.engine.submitted[-1].prompt, skip_special_tokens=False).endswith("assistant\nWell, hel")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_token_bytes_and_the_best_alternatives(says, smollm, stream):
    answer = chat(says, logprobs=True, top_logprobs=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer][1:] if stream else [answer.choices[0]]
    content = [entry for choice in choices for entry in choice.logprobs.content]
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == TEXT + "<|im_end|>"
    assert all(entry.logprob == -0.25 and len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].token == "Hello"


def test_logprobs_without_alternatives_are_given_too(says):
    content = chat(says, logprobs=True).choices[0].logprobs.content
    assert content[0].top_logprobs == []


def test_tokenize_tells_what_a_chat_would_be(echo, smollm):
    rendered = smollm.encode(smollm.render_chat(MESSAGES), add_special_tokens=False)
    answer = echo.http.post("/tokenize", json={"model": "smol", "messages": MESSAGES}).json()
    assert answer["tokens"] == rendered
    assert (answer["count"], answer["max_model_len"]) == (len(rendered), 8192)


def test_tokenize_and_detokenize_are_inverse(echo):
    answer = echo.http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert answer["token_strs"][0] == "Hello"
    assert echo.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": TEXT}


def test_models_are_listed(echo):
    assert [model.id for model in echo.openai.models.list()] == ["smol"]
    assert echo.openai.models.retrieve("smol").max_model_len == 8192


def test_every_served_name_answers_under_itself(live):
    server = live(model_names=("one", "team/two"))
    assert [model.id for model in server.openai.models.list()] == ["one", "team/two"]
    assert server.openai.models.retrieve("team/two").root == "one"
    assert server.openai.completions.create(model="team/two", prompt="x", max_tokens=1).model == "team/two"
