"""The bodies of requests: prompts made up to a length, in the words of OpenAI's API."""

from typing import Any, Literal

import msgspec
import numpy as np

from tidegate.bench.workloads import BLOCK_TOKENS, Request

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

_FIRST_ORDINARY_TOKEN = 1000  # vocabularies often begin with special tokens and single bytes
_UNIQUE, _BLOCK = 0, 1  # what a source of tokens is for

# Short words: in most vocabularies each is one token after a space.
WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money",
    "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side",
    "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law",
    "car", "city", "name", "team", "minute", "idea", "body", "back", "parent", "face", "others", "level", "office",
    "door", "health", "person", "art", "war", "history", "party", "result", "change", "morning", "reason", "research",
    "girl", "guy", "moment", "air", "teacher",
]  # fmt: skip


class Payloads(msgspec.Struct, frozen=True):
    """Makes bodies. Equal settings and arguments give equal bytes.

    A prompt for ``completions`` is a list of token ids, exactly as long as asked. One for ``chat`` is a text of as
    many words, about one token each; the server's template adds a few.
    """

    model: str
    endpoint: Endpoint = "completions"
    vocab_size: int = 32000
    seed: int = 0
    ignore_eos: bool = True
    include_usage: bool = True

    def body(self, run: int, index: int, request: Request) -> bytes:
        """Of the request with this index in this run. Prompts of two runs share no prefix, whatever their blocks."""
        tokens = self.prompt(run, index, request)
        body: dict[str, Any] = {"model": self.model}
        if self.endpoint == "chat":
            text = " ".join(WORDS[token % len(WORDS)] for token in tokens)
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = tokens
        body |= {"max_tokens": request.output_tokens, "temperature": 0.0, "stream": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)

    def prompt(self, run: int, index: int, request: Request) -> list[int]:
        """Token ids, uniformly drawn."""
        if not request.blocks:
            return self._draw(request.prompt_tokens, run, _UNIQUE, index)
        tokens: list[int] = []
        for block in request.blocks:
            tokens += self._draw(min(BLOCK_TOKENS, request.prompt_tokens - len(tokens)), run, _BLOCK, block)
        return tokens

    def _draw(self, count: int, *key: int) -> list[int]:
        low = min(_FIRST_ORDINARY_TOKEN, self.vocab_size // 2)
        drawn: list[int] = np.random.default_rng([self.seed, *key]).integers(low, self.vocab_size, count).tolist()
        return drawn
