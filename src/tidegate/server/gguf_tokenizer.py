"""The tokenizer inside a GGUF file, for byte-level BPE models (``tokenizer.ggml.model`` is "gpt2").

A GGUF file names its way of cutting text into words (``tokenizer.ggml.pre``); the patterns are those of the models'
original tokenizers. Files of other kinds give None, and are left to transformers.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS.replace("{DIGITS}", digits)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2(single_digits: bool) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not single_digits:
        return words
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])


_PRE_TOKENIZERS = {
    "gpt-2": lambda: _gpt2(single_digits=False),
    "smollm": lambda: _gpt2(single_digits=True),
    "starcoder": lambda: _gpt2(single_digits=True),
    "llama-bpe": lambda: _words("{1,3}"),
    "qwen2": lambda: _words(""),
}


def tokenizer_from_gguf(metadata: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """``metadata``: by key, as in the file. None if the kind of tokenizer is not one known here."""
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or pre not in _PRE_TOKENIZERS:
        return None
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer
