"""The bytes of an answer, whole or as server-sent events.

Every token of a stream is an event, so events are put together from parts that are encoded once for each answer;
only the text, and log-probabilities where asked for, are encoded for each token.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tidegate.server.generation import Choice, Delta

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class AnswerHead(msgspec.Struct, frozen=True):
    """What every event of an answer repeats."""

    id: str
    created: int
    model: str


class AnswerOptions(msgspec.Struct, frozen=True):
    """``usage_field``: events have a usage field; ``usage_each``: it is filled in; ``token_ids``: tell them."""

    logprobs: bool = False
    token_ids: bool = False
    usage_field: bool = False
    usage_each: bool = False


class Answer:
    """How one endpoint words an answer. Subclasses say what differs: the part around the text, and the whole form."""

    event_object: str
    whole_object: str
    before_text: bytes
    after_text: bytes

    def __init__(self, head: AnswerHead, options: AnswerOptions) -> None:
        self.head = head
        self.options = options
        named = {"id": head.id, "object": self.event_object, "created": head.created, "model": head.model}
        self._event_head = b"data: " + _encode(named)[:-1] + b',"choices":['
        self._choice_heads: dict[int, bytes] = {}
        self._tail = b'}],"usage":null}\n\n' if options.usage_field else b"}]}\n\n"

    def opening(self, choice: Choice) -> bytes:
        """Events that come before the first token of ``choice``."""
        return b""

    def event(self, choice: Choice, delta: Delta, finish: str | None) -> bytes:
        """The event of one token; ``finish`` is set on the last one."""
        head = self._choice_heads.get(choice.index)
        if head is None:
            head = self._event_head + b'{"index":%d,' % choice.index + self.before_text
            self._choice_heads[choice.index] = head
        logprobs = _encode(self.logprobs([delta])) if self.options.logprobs else b"null"
        ending = (
            b"null" if finish is None else b'"%s","stop_reason":%s' % (finish.encode(), _encode(choice.stop_reason))
        )
        parts = [head, _encode(delta.text), self.after_text, b',"logprobs":', logprobs, b',"finish_reason":', ending]
        if self.options.token_ids:
            parts.append(b',"token_ids":' + _encode([] if delta.token is None else [delta.token]))
        parts.append(self._tail if not self.options.usage_each else self._tail_with_usage(choice, delta))
        return b"".join(parts)

    def usage_event(self, total: dict[str, Any]) -> bytes:
        return self._event_head + b'],"usage":' + _encode(total) + b"}\n\n"

    def whole(self, choices: Sequence[tuple[Choice, list[Delta]]], total: dict[str, Any]) -> bytes:
        """The answer in one piece."""
        return _encode(
            {
                "id": self.head.id,
                "object": self.whole_object,
                "created": self.head.created,
                "model": self.head.model,
                "choices": [self._whole_choice(choice, deltas) for choice, deltas in choices],
                "usage": total,
            }
        )

    def content(self, text: str) -> dict[str, Any]:
        """The text of a whole choice, under the endpoint's name for it."""
        raise NotImplementedError

    def logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_choice(self, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        fields = {
            "index": choice.index,
            **self.content("".join(delta.text for delta in deltas)),
            "logprobs": self.logprobs(deltas) if self.options.logprobs else None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self.options.token_ids:
            fields["token_ids"] = [delta.token for delta in deltas if delta.token is not None]
            fields["prompt_token_ids"] = choice.spec.prompt
        return fields

    def _tail_with_usage(self, choice: Choice, delta: Delta) -> bytes:
        so_far = usage(len(choice.spec.prompt), delta.count, choice.cached_tokens)
        return b'}],"usage":' + _encode(so_far) + b"}\n\n"
