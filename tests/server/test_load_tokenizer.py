import json
import random
import struct

import gguf
import pytest
from transformers import AutoTokenizer, Qwen2Tokenizer

from tidegate.base.errors import ConfigError, ModelError, RequestError
from tidegate.server.gguf_metadata import read_gguf_metadata
from tidegate.server.gguf_tokenizer import tokenizer_from_gguf
from tidegate.server.load_tokenizer import load_tokenizer

TEXTS = [
    "",
    " ",
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x ** 2  # squared\n\n\nprint(f(3))",
    "I'm you're he'll they've WE'D",
    "In 1969, 3.14159 of 1,000,000 items",
    "日本語のテキスト、中文文本，한국어 👩‍👩‍👧‍👦 🏳️‍🌈",
    "tabs\tand\r\nline ends   and   runs of spaces   ",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>x",
    "ﬁ ℵ a\u0301",
]
CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Hello  \n"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2 "},
        {"role": "user", "content": "{{ not a template }} <|im_end|>"},
    ],
]
TEMPLATES = {
    "blocks": """
    {%- for m in messages %}
        {%- if m.role == 'system' %}
            {%- continue %}
        {%- endif %}
        {% generation %}{{ bos_token }}[{{ m['role'] }}] {{ m['content'] | trim }}{% endgeneration %}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
    """,
    "trimming": "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}",
    "json": "{{ messages | tojson(indent=2) }}{{ tools is none }}{{ style | default('plain') }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


@pytest.fixture(scope="session")
def reference(smollm_gguf):
    return AutoTokenizer.from_pretrained(smollm_gguf.parent, gguf_file=smollm_gguf.name)


@pytest.fixture
def directory(smollm_gguf, reference, tmp_path):
    """The same tokenizer as a Hugging Face directory."""
    reference.save_pretrained(tmp_path)
    return tmp_path


def test_metadata_is_what_the_gguf_library_reads(smollm_gguf):
    metadata = read_gguf_metadata(smollm_gguf)
    fields = gguf.GGUFReader(smollm_gguf).fields
    assert metadata == {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


@pytest.mark.parametrize("text", TEXTS)
def test_a_gguf_file_encodes_and_decodes_as_transformers_does(smollm, reference, text):
    tokens = smollm.encode(text)
    assert tokens == reference.encode(text)
    assert smollm.decode(tokens) == reference.decode(tokens, skip_special_tokens=True)


def test_random_texts_encode_as_transformers_does(smollm, reference):
    draw = random.Random(0)
    words = [
        "alpha",
        "Übung",
        "x_1",
        "don't",
        "—",
        "..",
        "\n",
        "\t",
        "日本",
        "🙂",
        "(",
        ")",
        "==",
        "x72",
        "https://a.b/c?d=e",
    ]
    for _ in range(300):
        text = " ".join(draw.choices(words, k=draw.randint(1, 20)))
        assert smollm.encode(text) == reference.encode(text), text


def test_a_run_of_spaces_before_a_digit_is_one_token_as_the_model_was_trained(smollm, reference):
    # transformers' conversion of GGUF files drops the rule that digits stand alone, and so cuts the spaces elsewhere.
    spaces = smollm.encode("   ")
    assert len(spaces) == 1
    assert smollm.encode("   7") == spaces + smollm.encode("7")
    assert reference.encode("   7") != smollm.encode("   7")


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", [None, *TEMPLATES.values()], ids=["model's", *TEMPLATES])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_render_as_transformers_renders_them(
    smollm, smollm_gguf, reference, conversation, template, add_generation_prompt
):
    tokenizer = load_tokenizer(smollm_gguf, template) if template else smollm
    variables = {"style": "fancy"} if template and "style" in template else {}
    assert tokenizer.render_chat(
        conversation, add_generation_prompt=add_generation_prompt, variables=variables
    ) == reference.apply_chat_template(
        conversation,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )


@pytest.mark.parametrize(
    "template", [None, TEMPLATES["blocks"], TEMPLATES["trimming"]], ids=["model's", "blocks", "trimming"]
)
@pytest.mark.parametrize("last", ["The answer is", " im_end ", "ends with spaces  ", "x\n"])
def test_a_last_message_is_left_open_as_transformers_leaves_it(smollm, smollm_gguf, reference, template, last):
    tokenizer = load_tokenizer(smollm_gguf, template) if template else smollm
    conversation = [{"role": "user", "content": "x?"}, {"role": "assistant", "content": last}]
    expected = reference.apply_chat_template(
        conversation, chat_template=template, tokenize=False, continue_final_message=True
    )
    given = tokenizer.render_chat(conversation, add_generation_prompt=False, continue_final_message=True)
    assert given == expected


def test_a_directory_loads_like_transformers(directory, reference):
    tokenizer = load_tokenizer(directory)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text)
    chat = CONVERSATIONS[1]
    assert tokenizer.render_chat(chat) == reference.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


def test_the_qwen2_kind_of_gguf_file_encodes_as_transformers_does(smollm_gguf):
    metadata = read_gguf_metadata(smollm_gguf) | {"tokenizer.ggml.pre": "qwen2"}
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    ours = tokenizer_from_gguf(metadata)
    theirs = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[tuple(merge.split(" ")) for merge in merges]
    )
    for text in TEXTS:
        if "<|im" not in text:  # theirs was not told of special tokens
            assert ours.encode(text).ids == theirs.encode(text), text


def test_the_llama_3_kind_cuts_numbers_in_threes_and_begins_with_its_token(smollm_gguf):
    metadata = read_gguf_metadata(smollm_gguf) | {"tokenizer.ggml.pre": "llama-bpe"}
    del metadata["tokenizer.ggml.add_bos_token"]
    encoded = tokenizer_from_gguf(metadata).encode("a 12345")
    assert encoded.ids[0] == metadata["tokenizer.ggml.bos_token_id"]
    words = tokenizer_from_gguf(metadata).pre_tokenizer.pre_tokenize_str("a 12345\n")
    assert [word for word, _ in words] == ["a", "Ġ", "123", "45", "Ċ"]


def test_kinds_that_are_not_known_here_are_left_to_transformers(smollm_gguf, smollm, monkeypatch):
    assert tokenizer_from_gguf({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": []}) is None
    monkeypatch.setattr("tidegate.server.load_tokenizer.tokenizer_from_gguf", lambda metadata: None)
    through_transformers = load_tokenizer(smollm_gguf)
    assert through_transformers.encode(TEXTS[2]) == smollm.encode(TEXTS[2])
    assert through_transformers.eos_ids == smollm.eos_ids


def test_a_directory_without_tokenizer_json_is_left_to_transformers(directory, reference):
    converted = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(converted["vocab"]))
    (directory / "merges.txt").write_text("\n".join(" ".join(pair) for pair in converted["merges"]))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert load_tokenizer(directory).encode(TEXTS[2]) == reference.encode(TEXTS[2])


def test_all_ends_of_sequence_are_known(directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert sorted(load_tokenizer(directory).eos_ids) == [0, 2]


def test_a_template_may_come_from_a_file(directory, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("own:{{ messages[0].content }}")
    assert load_tokenizer(directory, str(file)).render_chat([{"role": "user", "content": "hi"}]) == "own:hi"


def test_a_template_that_refuses_says_why(directory):
    tokenizer = load_tokenizer(directory, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_a_template_can_not_reach_python(directory):
    tokenizer = load_tokenizer(directory, "{{ ''.__class__.__mro__ }}")
    with pytest.raises(RequestError):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("template", ["{% if %}", "/no/such/file"])
def test_a_bad_template_is_a_configuration_error(directory, template):
    with pytest.raises(ConfigError, match="chat template"):
        load_tokenizer(directory, template)


def test_a_model_without_tokenizer_has_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"GGML....", b"GGUF" + struct.pack("<IQQ", 3, 0, 5), b"GGUF" + bytes(20)])
def test_a_file_that_is_no_gguf_is_a_model_error(tmp_path, content):
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError):
        load_tokenizer(file)
