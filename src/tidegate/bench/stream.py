"""Reads one streamed answer: which of its events are tokens, when they came, and how the answer ended.

An event is a JSON document on a line of its own that begins with "data:". It counts as a token when it carries a
choice, even one without text (a detokenizer may hold text back), with two exceptions. The event that only names the
assistant's role opens a chat and is no token. And an event that has a finish reason but no text may be a token or
only a farewell, depending on the server: it counts if there are fewer other events than tokens.
"""

from array import array
from typing import Any

import msgspec

_DONE = b"[DONE]"
_MAX_ERROR_BYTES = 2000


class Failure(msgspec.Struct, frozen=True):
    """``kind``: "http STATUS", "connection", "timeout", "protocol", "stream" (the server reported an error after it
    had begun to answer) or "too few tokens"."""

    kind: str
    message: str


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    def speaks(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class StreamReader:
    """A receiver of one answer. After its end: ``close`` it, then read the attributes.

    ``times_s`` are when events with tokens came, ``tokens`` how many tokens there were: as the server counted them
    in ``usage``, else all that were allowed where that ended the answer, else one an event.
    """

    def __init__(self) -> None:
        self.times_s = array("d")
        self.tokens = 0
        self.usage: Usage | None = None
        self.failure: Failure | None = None
        self._status = 0
        self._body = b""  # of an answer that is no stream of events
        self._line = b""  # the beginning of a line whose end has not come yet
        self._finish_reason: str | None = None
        self._closing_s: float | None = None
        self._done = False

    def begin(self, status: int) -> None:
        self._status = status

    def receive(self, data: bytes, now: float) -> None:
        if self._status != 200:
            self._body += data[: _MAX_ERROR_BYTES - len(self._body)]
            return
        lines = (self._line + data).split(b"\n")
        self._line = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:], now)

    def _event(self, document: bytes, now: float) -> None:
        try:
            event = _decode_event(document)
        except msgspec.MsgspecError as error:
            if document.strip() == _DONE:
                self._done = True
            else:
                self._fail(
                    "protocol", f"an event could not be read ({error}): {document[:200].decode(errors='replace')}"
                )
            return
        if event.usage is not None:
            self.usage = event.usage
        if event.error is not None:
            self._fail("stream", f"{event.error}")
        for choice in event.choices:
            self._choice(choice, now)

    def _choice(self, choice: _Choice, now: float) -> None:
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
        delta = choice.delta
        if choice.text or (delta is not None and delta.speaks()):
            self.times_s.append(now)
        elif choice.finish_reason is not None:
            self._closing_s = now
        elif delta is None or delta.role is None or self.times_s:
            self.times_s.append(now)

    def close(self, asked_tokens: int, *, all_expected: bool) -> None:
        """The answer has ended. ``all_expected``: fewer than ``asked_tokens`` are a failure."""
        if self._status != 200 and self.failure is None:
            self._fail(f"http {self._status}", self._body.decode(errors="replace"))
        if self.usage is not None:
            self.tokens = self.usage.completion_tokens
        elif self._finish_reason == "length":
            self.tokens = asked_tokens
        else:
            self.tokens = len(self.times_s) + (self._closing_s is not None)
        if self._closing_s is not None and len(self.times_s) < self.tokens:
            self.times_s.append(self._closing_s)
        if not self.times_s or (all_expected and self.tokens < asked_tokens):
            self._fail("too few tokens", f"{self.tokens} of {asked_tokens} (finish reason: {self._finish_reason})")

    def lost(self, kind: str, message: str) -> None:
        """The answer broke off, unless all of it but the end of the body had come."""
        if not self._done:
            self._fail(kind, message)

    def _fail(self, kind: str, message: str) -> None:
        """The first failure is the cause of others, so it stays."""
        if self.failure is None:
            self.failure = Failure(kind, message)
