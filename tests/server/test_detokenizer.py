import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tidegate.server.tokenizer import FastTokenizer

UNICODE = [
    "Hello, world! 12  345\n\n\tindented",
    "naïve café – “quoted” … €100",
    "日本語のテキスト、中文文本，한국어",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 🇩🇪",
    "مرحبا بالعالم שלום עולם",
    "a\u0301 e\u0308 \u200b zero width \ufeff",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓀁",
]


@pytest.fixture(scope="module")
def sentencepiece_like() -> FastTokenizer:
    """Like Llama 2's: spaces are ▁, unknown characters are bytes, and a text begins with a space."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learned = tokenizers.Tokenizer(models.BPE())
    learned.normalizer = normalizer
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    learned.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 5, *UNICODE[:2]], trainer)
    model = json.loads(learned.to_str())["model"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(vocabulary)},
            [tuple(pair) for pair in model["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(vocabulary[:3])
    return FastTokenizer(tokenizer, eos_ids=(2,))


def pieces(tokenizer: FastTokenizer, tokens: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer([], skip)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("text", UNICODE)
def test_pieces_join_to_the_text_and_none_is_half_a_character(smollm, text):
    tokens = smollm.encode(text)
    shown = pieces(smollm, tokens)
    assert "".join(shown) == smollm.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in shown)


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_any_tokens_at_all_give_the_same_text_in_pieces_as_at_once(smollm, tokens, skip):
    assert "".join(pieces(smollm, tokens, skip)) == smollm.decode(tokens, skip)


def test_every_token_of_the_vocabulary_is_the_bytes_that_it_decodes_to(smollm):
    for token in range(49152):
        assert smollm.token_bytes(token).decode(errors="replace") == smollm.decode([token], skip_special_tokens=False)


def test_half_a_character_at_the_end_is_shown_as_broken_only_then(smollm):
    tokens = smollm.encode("𓀀")
    assert len(tokens) > 1
    shown = pieces(smollm, tokens[:-1])
    assert "".join(shown[:-1]) == ""
    assert "\ufffd" in shown[-1]


@pytest.mark.parametrize("text", UNICODE)
def test_a_sentencepiece_tokenizer_gives_the_same_text_in_pieces_as_at_once(sentencepiece_like, text):
    tokens = sentencepiece_like.encode(text)
    shown = pieces(sentencepiece_like, tokens)
    assert "".join(shown) == sentencepiece_like.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_a_word_after_the_prompt_keeps_its_space(sentencepiece_like):
    prompt = sentencepiece_like.encode("the quick")
    tokens = sentencepiece_like.encode("the quick fox")
    assert tokens[: len(prompt)] == prompt
    detokenizer = sentencepiece_like.detokenizer(prompt)
    text = "".join(detokenizer.feed(token) for token in tokens[len(prompt) :]) + detokenizer.flush()
    assert text == " fox"


def test_special_tokens_have_text_only_if_they_are_not_skipped(smollm):
    tokens = smollm.encode("<|im_start|>hi<|im_end|>")
    assert "".join(pieces(smollm, tokens)) == "hi"
    assert "".join(pieces(smollm, tokens, skip=False)) == "<|im_start|>hi<|im_end|>"
