"""Text to token ids and back, and conversations to text."""

from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers
from tokenizers.decoders import ByteLevel

from tidegate.base.errors import RequestError
from tidegate.server.chat_template import ChatTemplate
from tidegate.server.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

_CONTEXT_TOKENS = 6  # of a prompt's end that a window detokenizer starts from


class Tokenizer(Protocol):
    """What the server asks of a tokenizer. ``eos_ids``: every token that ends a generation."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """``add_special_tokens``: put the tokens around it that the model expects, such as one for the beginning."""
        ...

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def detokenizer(self, prompt: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer: ...

    def token_bytes(self, token: int) -> bytes:
        """What the token stands for by itself: perhaps half a character."""
        ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation, as the model's chat template puts it. Raises RequestError if it can't."""
        ...


class FastTokenizer:
    """A Tokenizer over Hugging Face's ``tokenizers``."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, eos_ids: Sequence[int] = (), chat_template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._chat_template = chat_template
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self._shown: dict[int, bytes] = {}
        self._byte_level = isinstance(tokenizer.decoder, ByteLevel)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, prompt: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer:
        if self._byte_level:
            return ByteDetokenizer(self._shown_bytes if skip_special_tokens else self.token_bytes)
        return WindowDetokenizer(lambda tokens: self.decode(tokens, skip_special_tokens), prompt[-_CONTEXT_TOKENS:])

    def token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        if self._chat_template is None:
            raise RequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template."
            )
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def _shown_bytes(self, token: int) -> bytes:
        known = self._shown.get(token)
        if known is None:
            known = self._shown[token] = b"" if token in self._special else self.token_bytes(token)
        return known

    def _find_bytes(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""  # the model's vocabulary may be padded beyond the tokenizer's
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in text)
            except KeyError:
                return str(text).encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return str(text).replace("\u2581", " ").encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: bytes that print stand for themselves, the others are moved to U+0100 and up, in order."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in prints}
    for moved, byte in enumerate(sorted(set(range(256)) - set(prints))):
        table[chr(0x100 + moved)] = byte
    return table


_BYTE_OF_CHAR = _byte_of_char()
