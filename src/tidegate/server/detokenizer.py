"""Turning one request's tokens into text as they come, never showing half a character.

Two ways, for the two kinds of tokenizer:

- byte-level (GPT-2, Llama 3, Qwen, SmolLM): every token is a fixed string of bytes, so the text is an incremental
  UTF-8 decoding of their concatenation;
- all others (SentencePiece and the like): a token's text depends on its neighbours, so a short window of tokens is
  decoded again for each new one, and what it adds at its end is the new text.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_MAX_HELD_TOKENS = 16  # no character is spread over so many: what is still broken then stays broken
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Of one request. The concatenation of all that it returns is the text of the tokens."""

    def feed(self, token: int) -> str: ...

    def flush(self) -> str:
        """What was held back because it was half a character, once no more tokens will come."""
        ...


class ByteDetokenizer:
    """``token_bytes(token)``: the bytes a token stands for; empty for those that are not shown."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """``decode(tokens)``: their text. ``context``: the last tokens before the first one, on which its text may depend.

    The window is ``context`` tokens whose text is out, then held tokens whose text is not.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(context)
        self._shown = decode(self._context) if self._context else ""
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        self._held.append(token)
        text = self._decode(self._context + self._held)
        if text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._context + self._held)) if self._held else ""

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        # A token without text stays held: it may yet change what follows.
        if new or len(self._held) >= _MAX_HELD_TOKENS:
            self._context, self._held = self._held, []
            self._shown = self._decode(self._context)
        return new


class NoDetokenizer:
    """For a model without a tokenizer: its tokens have no text."""

    def feed(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""
